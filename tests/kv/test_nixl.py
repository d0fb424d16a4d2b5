"""The real transport between two processes: bytes, epoch words and notifications over NIXL, and peers that are killed or stopped."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest
import torch

from proto.baton.v1 import common_pb2
from services.kv.layout import KvLayout
from services.kv.memory import KvMemory
from services.kv.messages import HandoffState, RequestKey
from services.kv.nixl_transport import NixlTransport
from services.kv.pages import Holder, HolderKind
from services.kv.pull import PullState
from services.kv.rank_kv import RankKv, open_rank_kv
from services.kv.transport import IDLE_S
from services.runtime.errors import ConfigError, HandoffError
from tests.kv.nixl_holder import SMALL, compatible, expected_byte

NUM_PAGES = 12
PATIENCE_S = 30.0


class Child:
    """nixl_holder.py in a process of its own."""

    def __init__(self, layout: KvLayout, num_pages: int, prefix: Sequence[str] = ()) -> None:
        """`prefix`: words before the command, such as `ip netns exec NAME`, that end in the same process."""
        shape = json.dumps([layout.num_layers, layout.kv_lora_rank, layout.rope_dim, layout.dtype])
        command = [*prefix, sys.executable, "-m", "tests.kv.nixl_holder", shape, str(num_pages)]
        self.blob, self.peer = b"", ""
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def tell(self, order: dict) -> None:
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> dict:
        assert select.select([self.process.stdout], [], [], PATIENCE_S)[0], "the holder says nothing"
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        """Whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Two:
    """A reader here, a holder there, introduced to each other."""

    layout, num_pages = SMALL, NUM_PAGES

    def __init__(self) -> None:
        self.skipped_s = 0.0
        self.child = Child(self.layout, self.num_pages)
        self.kv: RankKv = open_rank_kv(
            layout=self.layout,
            num_pages=self.num_pages,
            transport="nixl",
            compatibility=compatible(self.layout),
            clock=lambda: time.monotonic() + self.skipped_s,
        )
        self.children = [self.child]
        self.touched: set[int] = set()  # pages that were ever read into
        self.child.blob = bytes.fromhex(self.child.hear()["metadata"])
        self.meet(self.child)
        self.blob, self.peer = self.child.blob, self.child.peer

    def another(self) -> Child:
        """One more holder."""
        child = Child(self.layout, self.num_pages)
        self.children.append(child)
        child.blob = bytes.fromhex(child.hear()["metadata"])
        return child

    def meet(self, child: Child) -> None:
        """Introduce a holder and this rank's present instance to each other."""
        child.peer = self.kv.transport.add_peer(child.blob)
        child.tell({"peer": self.kv.transport.metadata().hex()})
        assert child.hear() == {"peer": self.kv.instance_id}

    def claim(self, name: str, num_pages: int, child: Child | None = None) -> tuple[RequestKey, list[int]]:
        key = RequestKey(name, 0, 0)
        with self.kv.lock:
            self.kv.pulls.claim(key, (child or self.child).peer)
            return key, self.kv.pool.take(num_pages, Holder(HolderKind.REQUEST, key))

    def announce(self, key: RequestKey, num_pages: int, child: Child | None = None) -> None:
        """Let the holder announce, and the reader hear all of it."""
        child = child or self.child
        child.tell({"announce": num_pages, "request": key.request_id})
        assert len(child.hear()["pages"]) == num_pages
        self.until(lambda: self.kv.pulls._pulls[key].handoff)

    def begin(self, key: RequestKey, pages: list[int]) -> None:
        self.touched |= set(pages)
        with self.kv.lock:
            self.kv.pulls.begin(key, dict(enumerate(pages)))

    def until(self, condition) -> list:
        """Tick until `condition()` holds; what ended on the way."""
        ended = []
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "nothing happened"
            ended += self.kv.exchange.tick()
            time.sleep(self.kv.exchange.pause_s)
        return ended

    def ended(self) -> list:
        return self.until(lambda: not len(self.kv.pulls))[:1] if len(self.kv.pulls) else []

    def free(self, key: RequestKey) -> None:
        with self.kv.lock:
            self.kv.pool.release(Holder(HolderKind.REQUEST, key))

    def hand_over(self, name: str, num_pages: int, child: Child | None = None) -> None:
        key, pages = self.claim(name, num_pages, child)
        self.announce(key, num_pages, child)
        self.begin(key, pages)
        (event,) = self.ended()
        assert event.state is PullState.READY and isinstance(event.handoff, HandoffState) and event.handoff.first_token == 7
        view = self.kv.memory.page_bytes_view()
        assert all((view[page] == expected_byte(index)).all() for index, page in enumerate(pages))
        assert (child or self.child).hear() == {"ended": [[name, "released"]]}
        self.free(key)

    def close(self) -> int:
        """Conservation on both sides; the holder's exit status."""
        self.kv.check_integrity()
        assert self.kv.pool.num_available == self.num_pages and self.kv.pulls.num_reads == 0
        if self.child.process.poll() is None:
            self.child.tell({"quit": True})
        self.child.process.wait(PATIENCE_S)
        return self.child.process.returncode


@pytest.fixture(params=["default", "tcp"])
def two(request, monkeypatch):
    monkeypatch.delenv("UCX_TLS", raising=False)
    if request.param == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy" if torch.cuda.is_available() else "tcp")
    pair = Two()
    pair.tls = request.param
    yield pair
    pair.child.end()
    pair.kv.close()


def test_pages_arrive_bit_exact_and_every_byte_is_counted(two):
    for number, num_pages in enumerate((1, 7, NUM_PAGES, NUM_PAGES)):
        two.hand_over(f"r{number}", num_pages)
    stats = two.kv.transport.stats
    total = 1 + 7 + 2 * NUM_PAGES
    assert (stats.num_pages, stats.num_words, stats.num_bytes, stats.num_failed) == (total, total, total * (SMALL.page_bytes + 8), 0)
    assert stats.busy_s > 0
    assert ("tcp" in stats.ucx) == (two.tls == "tcp"), stats.ucx
    assert two.close() == 0


@pytest.mark.parametrize("two", ["default"], indirect=True)
def test_a_page_that_the_peer_does_not_have_is_never_read(two):
    for page in (-1, NUM_PAGES):
        with pytest.raises(HandoffError, match=f"but has {NUM_PAGES}") as refused:
            two.kv.transport.read_pages(two.peer, [0, page], [0, 1])
        assert refused.value.reason == common_pb2.PEER_GONE
    assert two.kv.transport.stats.num_bytes == 0


def test_a_killed_holder_fails_the_read_and_everything_comes_back(two):
    two.hand_over("warm", 2)
    key, pages = two.claim("r", 6)
    two.announce(key, 6)
    os.kill(two.child.process.pid, signal.SIGKILL)
    two.child.process.wait()
    two.begin(key, pages)
    (event,) = two.ended()
    assert event.state is PullState.ABORTED and event.reason in (common_pb2.READ_FAILED, common_pb2.READ_DEADLINE)
    two.until(lambda: two.kv.pulls.num_reads == 0)
    assert not two.kv.transport.has_peer(two.peer)
    with pytest.raises(HandoffError):
        two.claim("next", 1)
    two.free(key)
    two.close()


@pytest.mark.slow
@pytest.mark.parametrize("two", ["tcp"], indirect=True)
def test_a_read_from_a_stopped_holder_is_quarantined_and_lands_there_when_it_wakes(two):
    two.hand_over("warm", 2)
    key, pages = two.claim("r", 6)
    two.announce(key, 6)
    os.kill(two.child.process.pid, signal.SIGSTOP)
    try:
        two.begin(key, pages)
        two.until(lambda: two.kv.pulls.num_reads == 2)
        two.skipped_s += 10
        (event,) = two.ended()
        assert (event.state, event.reason) == (PullState.ABORTED, common_pb2.READ_DEADLINE)
        two.free(key)
        assert two.kv.pool.num_quarantined == 6 and two.kv.pool.num_available == NUM_PAGES - 6
        with pytest.raises(HandoffError, match="late"):
            two.kv.transport.add_peer(two.blob)
    finally:
        os.kill(two.child.process.pid, signal.SIGCONT)
    two.until(lambda: two.kv.pulls.num_reads == 0)
    assert two.kv.pool.num_quarantined == 0
    assert two.child.hear() == {"ended": [["r", "aborted"]]}, "the holder was told"
    assert two.kv.transport.add_peer(two.blob) == two.peer
    two.hand_over("healed", 4)
    assert two.close() == 0


def test_unusable_ucx_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "no_such_transport")
    with pytest.raises(ConfigError, match="UCX_TLS=no_such_transport"):
        open_rank_kv(layout=SMALL, num_pages=2, transport="nixl", compatibility=compatible(SMALL))


def test_peers_that_nobody_speaks_of_are_forgotten() -> None:
    """Incarnations that are gone do not pile up; one in use stays, one that is back is met anew."""
    now = 0.0
    memories = [KvMemory(SMALL, 2) for _ in range(8)]
    ours = NixlTransport("ours", memories[0], compatible(SMALL), lambda: now)
    others = [NixlTransport(f"other-{i}", memory, compatible(SMALL)) for i, memory in enumerate(memories[1:])]
    for number, other in enumerate(others):
        now = number * IDLE_S / 2
        ours.add_peer(other.metadata())
        assert ours.has_peer("other-0") and ours.num_peers == min(number + 1, 4), number  # it and the last 3
    assert not ours.has_peer("other-1") and not ours.notify("other-1", b"x")
    assert ours.add_peer(others[1].metadata()) == "other-1" and ours.notify("other-1", b"x")
    now += 2 * IDLE_S
    assert ours.notify("other-1", b"x")
    ours.add_peer(others[2].metadata())
    assert ours.num_peers == 2
    for each in (ours, *others):
        each.close()
