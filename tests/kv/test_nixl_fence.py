"""The fence with real NIXL over TCP: a holder is stopped while a read is in flight, the reader renews its agent, the holder wakes.

Over shared memory a stopped peer still reads fine, so only TCP shows this.
"""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from proto.baton.v1 import common_pb2
from services.kv.layout import KvLayout
from services.kv.nixl_transport import NixlTransport
from services.kv.pages import HolderKind
from services.kv.pull import PullState
from services.kv.rank_kv import RETRY_S
from services.runtime.errors import HandoffError
from tests.kv.nixl_holder import expected_byte
from tests.kv.test_nixl import NUM_PAGES, PATIENCE_S, Two

CLOSE_S = 5.0


class Fenced(Two):
    """The holder in `child` was stopped while it was read."""

    def woken(self):
        """It after SIGCONT, told that its lease is over. Without resets.py UCX ends the process here."""
        assert self.child.hear() == {"ended": [["late", "aborted"]]}, "it was told before the agent went"
        return self.child


@pytest.fixture
def two(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy" if torch.cuda.is_available() else "tcp")
    pair = Fenced()
    yield pair
    for child in pair.children:
        child.end()
    pair.kv.close()


class Large(Fenced):
    """Pages of 1 MiB: what is in flight fills the sockets' buffers many times."""

    layout, num_pages = KvLayout(num_layers=8, kv_lora_rank=448, rope_dim=64, dtype="float32"), 48


@pytest.fixture
def large(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy" if torch.cuda.is_available() else "tcp")
    pair = Large()
    yield pair
    for child in pair.children:
        child.end()
    pair.kv.close()


def num_unread_bytes() -> int:
    """The most that waits in one TCP socket of this process."""
    links = [os.readlink(fd.path) for fd in os.scandir("/proc/self/fd") if os.path.islink(fd.path)]
    ours = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return max((int(row[4].split(":")[1], 16) for row in rows if row[9] in ours), default=0)


def test_a_holder_stopped_amid_its_answer_lands_nothing_more_after_the_fence_and_is_read_again(large):
    """Part of the pages has landed, part waits in sockets and in the holder: the rest never comes."""
    large.hand_over("warm", 2)
    key, pages = large.claim("late", large.num_pages)
    large.announce(key, large.num_pages)
    view = large.kv.memory.page_bytes_view()
    view[:] = 0xEE

    def num_landed() -> int:
        return sum(bool((view[page] == expected_byte(index)).all()) for index, page in enumerate(pages))

    large.begin(key, pages)
    large.kv.exchange.tick()  # posts; from here on nothing is taken from the sockets until the holder stands still
    deadline = time.monotonic() + PATIENCE_S
    while num_unread_bytes() < 100_000:
        assert time.monotonic() < deadline, "the holder answers"
    os.kill(large.child.process.pid, signal.SIGSTOP)
    large.skipped_s += 10
    (event,) = large.ended()
    assert (event.state, event.reason) == (PullState.ABORTED, common_pb2.READ_DEADLINE)
    large.free(key)
    assert 0 < num_landed() < large.num_pages and large.kv.pool.num_quarantined > 0.2 * large.num_pages
    began = time.monotonic()
    assert large.kv.renew_if_due() and time.monotonic() - began < CLOSE_S
    assert large.kv.pool.num_available == large.num_pages
    view[:] = 0x5A
    os.kill(large.child.process.pid, signal.SIGCONT)
    woken = large.woken()
    for _ in range(100):
        large.kv.exchange.tick()
        time.sleep(0.002)
    assert (view == 0x5A).all()
    large.meet(woken)
    large.hand_over("woken", large.num_pages, woken)
    large.close()


def stop_amid_a_read(two, num_pages: int) -> list[int]:
    """Its pages; the request is over, they are in quarantine."""
    key, pages = two.claim("late", num_pages)
    two.announce(key, num_pages)
    os.kill(two.child.process.pid, signal.SIGSTOP)
    two.begin(key, pages)
    two.until(lambda: two.kv.pulls.num_reads == 2)
    two.skipped_s += 10
    (event,) = two.ended()
    assert (event.state, event.reason) == (PullState.ABORTED, common_pb2.READ_DEADLINE)
    two.free(key)
    assert two.kv.pool.num_quarantined == num_pages
    return pages


@pytest.mark.slow
def test_a_fence_frees_pages_and_what_the_woken_peer_sends_never_lands(two):
    two.hand_over("warm", 2)
    pages = stop_amid_a_read(two, 6)
    assert "6 of 12 pages" in two.kv.fence_reason()
    former, old = two.kv.instance_id, two.kv.transport
    assert isinstance(old, NixlTransport)
    began = time.monotonic()
    assert two.kv.renew_if_due() == former != two.kv.instance_id
    assert time.monotonic() - began < CLOSE_S, "bounded, whatever the peer does"
    assert two.kv.pool.num_available == NUM_PAGES and not two.kv.pool.pages.num_holds(HolderKind.QUARANTINE)
    epochs = two.kv.memory.epochs.copy()

    two.kv.memory.page_bytes_view()[:] = 0xEE
    two.kv.memory.landing[:] = 0xEEEE
    marks = two.kv.memory.page_bytes_view().copy()
    two.touched = set()

    healthy = two.another()  # while the first is still stopped
    two.meet(healthy)
    two.hand_over("healthy", 4, healthy)
    assert two.kv.pool.num_available == NUM_PAGES
    touched = two.touched
    os.kill(two.child.process.pid, signal.SIGCONT)
    woken = two.woken()
    for _ in range(100):  # the woken peer sends whatever it had queued
        two.kv.exchange.tick()
        time.sleep(0.002)
    untouched = [page for page in range(NUM_PAGES) if page not in touched]
    assert (two.kv.memory.page_bytes_view()[untouched] == marks[untouched]).all() and set(untouched) & set(pages)
    assert (two.kv.memory.landing[untouched] == 0xEEEE).all()

    two.meet(woken)
    two.hand_over("woken", NUM_PAGES, woken)
    assert (two.kv.memory.epochs >= epochs).all(), "epoch words go on from where they were"
    two.close()


def test_a_renewal_without_any_trouble_costs_nothing_but_time(two):
    two.hand_over("before", 3)
    stats = two.kv.transport.stats
    two.kv.renew_agent()
    two.meet(two.child)
    two.hand_over("after", 3)
    assert two.kv.transport.stats.num_pages == 6 == stats.num_pages + 3, "the rank counts on"
    assert two.close() == 0


def test_an_agent_that_ucx_cannot_open_is_opened_once_it_can(two, monkeypatch):
    two.hand_over("before", 3)
    with monkeypatch.context() as patch:
        patch.setenv("UCX_NET_DEVICES", "gone0")
        assert two.kv.renew_agent() == "" and "UCX_TLS=tcp" in two.kv.fence_reason()
        two.skipped_s += RETRY_S
        assert two.kv.renew_if_due() == ""
        with pytest.raises(HandoffError) as refused:
            two.kv.transport.add_peer(two.blob)
        assert refused.value.reason == common_pb2.FENCED and two.kv.exchange.tick() == []
    two.skipped_s += RETRY_S
    assert two.kv.renew_if_due()
    two.meet(two.child)
    two.hand_over("after", 3)
    assert two.close() == 0
