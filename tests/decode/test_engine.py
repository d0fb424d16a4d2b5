"""The threads of a rank: commands in order, load reports, wake-ups, and the end of one being the end of the other."""
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proto.baton.v1 import common_pb2
from services.decode.engine import HandoffThread
from services.decode.messages import (
    Cancel,
    CaughtUp,
    Failed,
    Finished,
    Granted,
    MovePause,
    MoveStart,
    Paused,
    Ready,
    Resumed,
    SessionLost,
    StepOut,
    Submit,
)
from services.kv.events import KvEventPublisher
from services.kv.hash import page_digests
from services.kv.messages import PeerRank, RequestKey
from services.runtime.config import DecodeSection, SecuritySection
from services.runtime.engine import StepClock
from services.runtime.errors import EngineError
from services.runtime.ipc import RankLoad, Stop
from services.runtime.security import Security
from tests.decode.rig import Rig, greedy, mono
from tests.kv.event_reader import Reader

PROMPT = [3 + 7 * i % 240 for i in range(150)]
PATIENCE_S = 10.0


class FakeChannel:
    """Commands from a queue, events into the rig's list."""

    def __init__(self, rig: Rig) -> None:
        self.commands: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.loads: list[RankLoad] = []
        self.fail_with: Exception | None = None

    def receive(self, timeout_s: float) -> list[object]:
        if self.fail_with is not None:
            raise self.fail_with
        try:
            return [self.commands.get(timeout=max(timeout_s, 0.0001))]
        except queue.Empty:
            return []

    def send(self, event: object) -> None:
        assert isinstance(event, RankLoad)
        self.loads.append(event)


class Threads:
    """A rank with its threads, the holder driven by the test's own."""

    def __init__(self, rig: Rig, events: KvEventPublisher | None = None) -> None:
        self.rig, self.channel = rig, FakeChannel(rig)
        self.raised: list[BaseException] = []
        self.renewed: list[str] = []  # former instance ids
        self.handoff = HandoffThread(self.channel, rig.kv, rig.fetcher, rig.loop, StepClock(), self.renewed.append, events)  # type: ignore[arg-type]
        self.main = threading.Thread(target=self._run, daemon=True)
        self.handoff.start()
        self.main.start()

    def _run(self) -> None:
        try:
            self.rig.loop.run()
        except EngineError as error:
            self.raised.append(error)

    def submit(self, handle: int, max_tokens: int, session: int = 1) -> None:
        spec = self.rig.spec(PROMPT, greedy(max_tokens))
        self.channel.commands.put(Submit(session, handle, spec))
        self.rig.holder.hand_off(spec, self.rig.kv)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "it did not come about"
            self.rig.holder.kv.exchange.tick()
            self.rig.clock.now += 0.001
            time.sleep(0.0005)

    def stop(self) -> None:
        self.channel.commands.put(Stop())
        self.handoff.join(PATIENCE_S)
        self.main.join(PATIENCE_S)
        assert not self.handoff.is_alive() and not self.main.is_alive()
        self.rig.holder.kv.exchange.tick()  # what was sent last


@pytest.fixture
def threads(make_rig: Callable[..., Rig]) -> Iterator[Threads]:
    made = Threads(make_rig(num_pages=64))
    yield made
    if made.main.is_alive():
        made.stop()


def test_request_goes_through_both_threads(threads: Threads) -> None:
    threads.submit(1, 5)
    threads.until(lambda: threads.rig.of(Finished))
    assert threads.rig.tokens(1) == mono(PROMPT, 5)
    threads.submit(2, 5)  # the loop blocked on its inbox meanwhile
    threads.until(lambda: len(threads.rig.of(Finished)) == 2)


def test_pages_fetched_and_pages_filled_are_told_as_events(make_rig: Callable[..., Rig]) -> None:
    events = KvEventPublisher.open(DecodeSection(), "decode", 0, Path("m"), Security.of(SecuritySection()))
    assert events is not None
    threads = Threads(make_rig(num_pages=64, on_change=events.log), events)
    reader = Reader(events.port, events.replay_port)
    threads.submit(1, 60)
    ids = PROMPT + mono(PROMPT, 60)
    digests = page_digests(ids)

    def is_told() -> bool:
        reader.ask()
        reader.hear()
        return len(reader.copy.pages) == len(digests) == 3  # two of the prompt, one that 42 tokens more have filled

    threads.until(is_told)
    assert reader.copy.pages == {
        digest: (digests[index - 1] if index else None, ids[64 * index : 64 * (index + 1)]) for index, digest in enumerate(digests)
    }
    threads.stop()
    reader.close()
    events.close()


def test_cancel_behind_its_submit_is_never_lost(threads: Threads) -> None:
    for handle in range(1, 13):
        threads.submit(handle, 1500)
        if handle % 3 == 0:
            threads.until(lambda: len(threads.rig.loop.scheduler))
        threads.channel.commands.put(Cancel(1, handle, common_pb2.CANCELLED))
    threads.until(lambda: threads.rig.kv.pool.num_available == threads.rig.kv.pool.num_pages and not threads.rig.fetcher.num_claims)
    threads.until(lambda: not len(threads.rig.holder.kv.leases))


def test_lost_session_takes_requests_of_both_threads(threads: Threads) -> None:
    threads.submit(1, 300)
    threads.until(lambda: threads.rig.of(StepOut))
    threads.channel.commands.put(Submit(1, 2, threads.rig.spec(PROMPT, greedy(5))))
    threads.until(lambda: threads.rig.fetcher.num_claims)
    threads.channel.commands.put(SessionLost(1))
    threads.until(lambda: not threads.rig.fetcher.num_claims and not len(threads.rig.loop.scheduler))


def test_load_is_reported_when_it_changes(threads: Threads) -> None:
    threads.submit(1, 1500)
    threads.until(lambda: any(load.num_running == 1 and load.num_running_tokens > 150 for load in threads.channel.loads))
    threads.channel.commands.put(Cancel(1, 1, 0))
    threads.until(lambda: threads.channel.loads[-1].num_running == 0)
    assert threads.channel.loads[-1].num_free_pages == 64
    num_loads = len(threads.channel.loads)
    time.sleep(0.3)
    assert len(threads.channel.loads) == num_loads, "an idle rank has nothing to say"


def test_stop_fails_what_is_left_as_draining(threads: Threads) -> None:
    threads.submit(1, 1900)
    threads.until(lambda: threads.rig.of(StepOut))
    claimed = threads.rig.spec(PROMPT, greedy(5))
    threads.channel.commands.put(Submit(1, 2, claimed))
    threads.until(lambda: threads.rig.fetcher.num_claims)
    threads.stop()
    assert [(event.handle, event.reason) for event in threads.rig.of(Failed)] == [(2, common_pb2.DRAINING), (1, common_pb2.DRAINING)]


def peer(rig: Rig, address: str) -> PeerRank:
    return PeerRank(rig.kv.instance_id, address, 0, rig.kv.transport.metadata())


def test_move_between_the_threads_of_two_ranks(make_rig: Callable[..., Rig]) -> None:
    source = Threads(make_rig(num_pages=64))
    target = Threads(make_rig(num_pages=64, beside=source.rig))
    source.submit(1, 600)
    source.until(lambda: len(source.rig.of(StepOut)) > 20)
    told = source.rig.tokens(1)
    key, holder = RequestKey("r1", 0, 1), peer(source.rig, "decode:1")
    spec = source.rig.spec(PROMPT + told, greedy(600), key=key, num_output_tokens=len(told), source=holder, is_move=True)
    target.channel.commands.put(Submit(1, 2, spec))
    source.until(lambda: target.rig.of(Granted))
    source.channel.commands.put(MoveStart(1, 1, 1, peer(target.rig, "decode:2")))
    source.until(lambda: target.rig.of(CaughtUp) or target.rig.of(Failed))
    source.channel.commands.put(MovePause(1, 1, 1))
    source.until(lambda: (source.rig.of(Failed) or source.rig.of(Finished)) and target.rig.of(Finished))
    assert source.rig.of(Paused) and source.rig.end(1).reason == common_pb2.REPLACED
    (ready,) = target.rig.of(Ready)
    assert source.rig.tokens(1)[: ready.position] + target.rig.tokens(2) == mono(PROMPT, 600)
    source.stop()
    target.stop()


def test_reader_that_cannot_be_met_is_told_by_the_handoff_thread(threads: Threads) -> None:
    threads.submit(1, 1500)
    threads.until(lambda: threads.rig.of(StepOut))
    threads.channel.commands.put(MoveStart(1, 1, 1, PeerRank("x", "decode:2", 0, b"garbage")))
    threads.until(lambda: threads.rig.of(Resumed))
    assert threads.rig.loop.num_moves == 0
    threads.channel.commands.put(Cancel(1, 1, 0))
    threads.until(lambda: not len(threads.rig.loop.scheduler))


def test_commands_wait_in_the_fronts_queue_while_many_items_wait_for_the_loop(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.decode.engine._MAX_INBOX", 3)
    channel = FakeChannel(rig)
    handoff = HandoffThread(channel, rig.kv, rig.fetcher, rig.loop, StepClock(), print)  # type: ignore[arg-type]
    for _ in range(5):
        channel.commands.put(SessionLost(1))
    for _ in range(8):
        assert handoff._turn()
    assert rig.loop.inbox.qsize() == 3 and channel.commands.qsize() == 2
    assert rig.loop.take_waiting()
    for _ in range(8):
        assert handoff._turn()
    assert rig.loop.inbox.qsize() == 2 and channel.commands.empty()
    assert rig.loop.take_waiting()


def test_broken_handoff_thread_ends_the_rank(threads: Threads) -> None:
    threads.channel.fail_with = RuntimeError("a bug")
    threads.main.join(PATIENCE_S)
    assert not threads.main.is_alive() and isinstance(threads.raised[0].__cause__, RuntimeError)


def test_a_renewed_agent_keeps_what_runs_and_frees_what_was_late(threads: Threads) -> None:
    """A third of the pool is in quarantine: the hand-off thread renews the agent, says so, and the running request goes on."""
    rig = threads.rig
    threads.submit(1, 900)
    threads.until(lambda: rig.of(StepOut))
    rig.fabric.hold_reads = True
    late = [rig.spec([2 + i] * 512, greedy(4)) for i in range(3)]
    for handle, spec in enumerate(late, start=2):
        threads.channel.commands.put(Submit(1, handle, spec))
        rig.holder.hand_off(spec, rig.kv)
    threads.until(lambda: len(rig.fabric.reads) == 3)
    former, reads = rig.kv.instance_id, list(rig.fabric.reads)
    rig.clock.now += 6.0
    threads.until(lambda: threads.renewed)
    assert threads.renewed == [former] and rig.kv.instance_id != former
    assert sorted((event.handle, event.reason) for event in rig.of(Failed)) == [(n, common_pb2.READ_DEADLINE) for n in (2, 3, 4)]
    for read in reads:
        read.complete()  # the holder's network is back: nothing of it lands
    rig.fabric.hold_reads = False
    rig.holder.kv.transport.add_peer(rig.kv.transport.metadata())
    threads.submit(5, 5)
    threads.until(lambda: len(rig.of(Finished)) == 2)
    assert rig.tokens(1) == mono(PROMPT, 900) and rig.tokens(5) == mono(PROMPT, 5)
    threads.until(lambda: rig.kv.pool.num_available == rig.kv.pool.num_pages)
