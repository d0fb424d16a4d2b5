"""Holders outlive their readers (resets.py): over TCP, UCX ends a process that answers a read whose reader has gone."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence

import pytest
import torch

from services.doctor.chaos.netns import Host, Network, why_unavailable
from tests.kv.nixl_holder import SMALL
from tests.kv.test_nixl import NUM_PAGES, PATIENCE_S, Child

FIN_WAIT_1 = "04"  # in /proc/net/tcp: something is yet to be acknowledged


class Two:
    """A holder that leases, and readers, each in a process of its own."""

    def __init__(self, at_holder: Sequence[str] = (), at_reader: Sequence[str] = ()) -> None:
        self.at_reader = at_reader
        self.children: list[Child] = []
        self.holder = self.start(at_holder)
        self.holder_id = ""

    def start(self, prefix: Sequence[str]) -> Child:
        child = Child(SMALL, NUM_PAGES, prefix)
        self.children.append(child)
        child.blob = bytes.fromhex(child.hear()["metadata"])
        return child

    def reader(self) -> Child:
        """One that has met the holder, is met by it, and has read every page once."""
        child = self.start(self.at_reader)
        child.tell({"peer": self.holder.blob.hex()})
        self.holder_id = child.hear()["peer"]
        self.holder.tell({"peer": child.blob.hex()})
        self.holder.hear()
        self.holder.tell({"announce": 2, "request": f"r{len(self.children)}"})  # its lease is what makes it a holder
        assert len(self.holder.hear()["pages"]) == 2
        child.tell({"read": self.holder_id, "wait": True})
        assert child.hear() == {"read": "done"}
        return child

    def post(self, reader: Child) -> None:
        """Read every page, once more, and do not wait."""
        reader.tell({"read": self.holder_id, "wait": False})
        assert reader.hear() == {"read": "running"}

    def close(self) -> None:
        for child in self.children:
            child.end()


@pytest.fixture
def tcp(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy" if torch.cuda.is_available() else "tcp")


def test_a_holder_that_was_stopped_outlives_a_reader_killed_meanwhile(tcp, monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")  # one connection: the end of a second one would be seen first
    two = Two()
    try:
        reader = two.reader()
        os.kill(two.holder.process.pid, signal.SIGSTOP)
        two.post(reader)
        reader.end()
        os.kill(two.holder.process.pid, signal.SIGCONT)
        two.reader()
        assert two.holder.process.poll() is None
    finally:
        two.close()


@pytest.fixture
def network():
    if reason := why_unavailable():
        pytest.skip(reason)
    network = Network()
    yield network
    network.close()


@pytest.mark.slow
def test_a_holder_outlives_a_reader_that_ended_while_its_link_was_down(tcp, network, monkeypatch):
    """The kernel of the reader's node sends the requests again once the link is up, and resets whatever answers them."""
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    host, other = network.add_host(), network.add_host()
    two = Two(host.prefix, other.prefix)
    try:
        reader = two.reader()
        other.cut()
        two.post(reader)
        reader.end()
        other.mend()
        deadline = time.monotonic() + PATIENCE_S
        while FIN_WAIT_1 in tcp_states(other):
            assert time.monotonic() < deadline, "the reader's kernel sends what waits"
            time.sleep(0.1)
        two.reader()
        assert two.holder.process.poll() is None
    finally:
        two.close()


def tcp_states(host: Host) -> list[str]:
    """One for each connection."""
    listed = subprocess.run([*host.prefix, "cat", "/proc/net/tcp"], check=True, capture_output=True, text=True).stdout
    return [line.split()[3] for line in listed.splitlines()[1:]]
