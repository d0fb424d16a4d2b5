"""What goes wrong: cancellation at each stage, refusal, expiry, failing forwards, wrong peers. Pages come back, and all are told why."""

from collections.abc import Callable, Iterator

import pytest

from proto.baton.v1 import common_pb2
from services.kv.messages import Ended, PeerRank, decode
from services.kv.pages import Holder, HolderKind
from services.kv.pull import PullState
from services.prefill.messages import LeaseOver, RunDone, RunFailed
from services.runtime.errors import EngineError
from tests.prefill.rig import VOCAB, Rig, open_kv


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(num_pages=16, chunk_tokens=128)
    yield made
    made.turn(2)
    made.assert_conserved()
    made.engine.close()


def told(rig: Rig) -> list[tuple[int, str]]:
    """Reasons that the reader was told."""
    return [(message.reason, message.key.request_id) for message in map(decode, rig.sent) if isinstance(message, Ended)]


def test_cancelled_while_queued(rig: Rig):  # B27 (1)
    with rig.kv.lock:
        rig.kv.pool.take(16, other := Holder(HolderKind.REQUEST, "other"))
    key = rig.run(num_tokens=512)
    rig.turn()
    assert rig.engine.scheduler.num_queued == 1 and rig.events() == []
    rig.cancel(key)
    rig.turn()
    assert rig.events() == [RunFailed(key, common_pb2.CANCELLED, "no longer wanted")]
    assert rig.forward.batches == [] and told(rig) == [(common_pb2.CANCELLED, "r")]
    with rig.kv.lock:
        rig.kv.pool.release(other)


def test_cancelled_during_the_second_chunk_of_four(rig: Rig):  # B27 (2)
    key = rig.run(num_tokens=512)
    rig.turn()
    rig.forward.during = lambda: rig.cancel(key)
    rig.turn()
    rig.forward.during = lambda: None
    rig.run(num_tokens=1, name="next", read=False, max_tokens=1)
    rig.turn()
    failed, done = rig.events()
    assert failed == RunFailed(key, common_pb2.CANCELLED, "no longer wanted")
    # no chunk ran after the cancel was heard, and the request behind it had the very next step
    assert [[chunk.start for chunk in batch] for batch in rig.forward.batches] == [[0], [128], [0]]
    assert isinstance(done, RunDone) and done.key.request_id == "next"
    assert told(rig) == [(common_pb2.CANCELLED, "r")] and rig.kv.pool.num_available == 16


def test_cancelled_after_the_last_chunk(rig: Rig):  # B27 (3)
    key = rig.run(num_tokens=512)
    rig.turn(4)
    assert isinstance(rig.events()[0], RunDone)
    rig.cancel(key)
    rig.turn()
    assert rig.kv.pool.num_available == 16
    rig.turn()
    assert rig.events() == [LeaseOver(key, common_pb2.CANCELLED, "no longer wanted")]
    assert told(rig) == [(common_pb2.CANCELLED, "r")]


def test_cancelled_while_it_is_read(rig: Rig):  # B27 (4)
    key = rig.run(num_tokens=200)
    rig.turn(2)
    rig.fabric.hold_reads = True
    rig.claim(key, 200)
    rig.now += 6  # the reader renews and hears what is to be read; then the clock stands still
    for _ in range(4):
        rig.reader_kv.exchange.tick()
        rig.turn()
    assert rig.fabric.reads
    rig.cancel(key)
    rig.turn(2)
    assert rig.kv.pool.num_available == 16 and rig.events()[1:] == [LeaseOver(key, common_pb2.CANCELLED, "no longer wanted")]
    [ended] = rig.reader_kv.exchange.tick()
    assert ended.state is PullState.ABORTED and ended.reason == common_pb2.CANCELLED  # pyright: ignore[reportAttributeAccessIssue]


def test_a_cancel_of_what_is_over_is_ignored(rig: Rig):
    key = rig.run(num_tokens=3, read=False, max_tokens=1)
    rig.turn()
    rig.cancel(key)
    rig.turn()
    assert len(rig.events()) == 1


@pytest.mark.parametrize("reason", [common_pb2.INVALID, common_pb2.OVERLOADED, common_pb2.DRAINING, common_pb2.INTERNAL])
@pytest.mark.parametrize("turns", [1, 4])
def test_refused_by_the_reader(rig: Rig, reason: int, turns: int):  # B26
    key = rig.run(num_tokens=512)
    rig.turn(turns)
    rig.events()
    with rig.reader_kv.lock:
        rig.reader_kv.pulls.refuse(key, rig.kv.instance_id, reason, "not here")
    rig.turn()  # the clock has not moved
    assert rig.kv.pool.num_available == 16
    assert rig.events() == [(RunFailed if turns == 1 else LeaseOver)(key, reason, "not here")]
    assert len(rig.forward.batches) == turns


def test_a_lost_refusal_costs_one_lease(rig: Rig):  # B26, the notice is lost
    key = rig.run(num_tokens=512)
    rig.turn(4)
    rig.events()
    rig.now += 29.9
    rig.turn()
    assert rig.kv.pool.num_available == 8 and rig.events() == []
    rig.now += 0.2
    rig.turn()
    assert rig.kv.pool.num_available == 16
    [over] = rig.events()
    assert isinstance(over, LeaseOver) and (over.key, over.reason) == (key, common_pb2.LEASE_EXPIRED)
    assert told(rig) == [(common_pb2.LEASE_EXPIRED, "r")]


def test_expired_while_computing(rig: Rig):
    key = rig.run(num_tokens=512)
    rig.turn()
    rig.now += 31
    rig.turn(2)
    [failed] = rig.events()
    assert isinstance(failed, RunFailed) and (failed.key, failed.reason) == (key, common_pb2.LEASE_EXPIRED)


@pytest.mark.parametrize("chunk", [2, 4])
def test_a_reader_that_gives_up_during_a_forward(rig: Rig, chunk: int):
    """The hand-off thread hears it while a chunk, perhaps the last, computes."""
    key = rig.run(num_tokens=512)
    rig.turn(chunk - 1)
    rig.events()

    def give_up() -> None:
        with rig.reader_kv.lock:
            rig.reader_kv.pulls.refuse(key, rig.kv.instance_id, common_pb2.CANCELLED, "client left")
        rig.engine.handoffs.tick()

    rig.forward.during = give_up
    rig.turn()
    rig.forward.during = lambda: None
    rig.turn()
    assert rig.events() == [RunFailed(key, common_pb2.CANCELLED, "client left")]
    assert len(rig.forward.batches) == chunk and rig.kv.pool.num_available == 16


def test_a_failing_forward_costs_its_batch_and_nothing_else(rig: Rig, caplog: pytest.LogCaptureFixture):
    def fail() -> None:
        raise RuntimeError("no such kernel")

    keys = [rig.run(num_tokens=20, name="a"), rig.run(num_tokens=300, name="b", first=3)]
    with rig.kv.lock:
        rig.kv.pool.take(9, other := Holder(HolderKind.REQUEST, "other"))
    later = rig.run(num_tokens=130, name="c", read=False)
    rig.forward.during = fail
    rig.turn()
    failed = rig.events()
    assert [(event.key, event.reason) for event in failed] == [(key, common_pb2.INTERNAL) for key in keys]  # pyright: ignore[reportAttributeAccessIssue]
    assert told(rig) == [(common_pb2.INTERNAL, "a"), (common_pb2.INTERNAL, "b")] and rig.kv.pool.num_available == 7
    assert "no such kernel" in caplog.text
    rig.forward.during = lambda: None
    rig.turn(2)
    [done] = rig.events()
    assert isinstance(done, RunDone) and done.key == later
    with rig.kv.lock:
        rig.kv.pool.release(other)


def test_nan_in_one_prompt_reaches_no_other(rig: Rig):
    rig.forward.tokens[11] = [float("nan")] * VOCAB
    keys = [rig.run(num_tokens=10 + i, name=f"r{i}", first=i, read=False, temperature=0.7) for i in range(3)]
    rig.turn()
    events = {event.key: event for event in rig.events()}  # pyright: ignore[reportAttributeAccessIssue]
    assert [type(events[key]) for key in keys] == [RunDone, RunFailed, RunDone]
    assert events[keys[1]].reason == common_pb2.INTERNAL


def test_a_reader_of_another_model_is_refused_naming_both(rig: Rig):
    other = open_kv(rig.fabric, rig.clock, num_pages=4, revision="another")
    rig.reader_kv = other
    rig.run(num_tokens=10)
    rig.turn()
    [failed] = rig.events()
    assert isinstance(failed, RunFailed) and failed.reason == common_pb2.FINGERPRINT_MISMATCH
    assert rig.kv.compatibility.fingerprint in failed.message and other.compatibility.fingerprint in failed.message


def test_metadata_of_another_instance_is_refused(rig: Rig):
    real: Callable[[], PeerRank] = rig.reader
    rig.reader = lambda kv: PeerRank(instance_id="0123", address="decode:1", rank=0, peer=real().peer)  # pyright: ignore[reportAttributeAccessIssue]
    rig.run(num_tokens=10)
    rig.turn()
    [failed] = rig.events()
    assert isinstance(failed, RunFailed) and failed.reason == common_pb2.PEER_GONE and "0123" in failed.message


def test_a_newer_incarnation_of_a_reader_replaces_the_older(rig: Rig):
    old = rig.reader_kv.instance_id
    first = rig.run(num_tokens=10, name="first")
    rig.turn()
    rig.reader_kv = open_kv(rig.fabric, rig.clock, num_pages=4)
    second = rig.run(num_tokens=10, name="second", first=3)
    rig.turn()
    assert not rig.kv.transport.has_peer(old) and rig.kv.transport.has_peer(rig.reader_kv.instance_id)
    rig.cancel(first)
    rig.cancel(second)


def test_too_large_and_overloaded_are_told_to_both_sides():
    rig = Rig(num_pages=4, chunk_tokens=64, max_queued=1)
    rig.run(num_tokens=257, name="large")
    rig.run(num_tokens=200, name="queued", read=False)
    rig.run(num_tokens=20, name="over")
    rig.turn()
    assert [(event.key.request_id, event.reason) for event in rig.events()] == [  # pyright: ignore[reportAttributeAccessIssue]
        ("large", common_pb2.TOO_LARGE), ("over", common_pb2.OVERLOADED),
    ]
    assert told(rig) == [(common_pb2.TOO_LARGE, "large"), (common_pb2.OVERLOADED, "over")]
    rig.turn(8)
    rig.assert_conserved()


def test_stopping_tells_everybody(rig: Rig):
    leased = rig.run(num_tokens=10, name="leased")
    rig.turn()
    computing = rig.run(num_tokens=512, name="computing", first=3)
    rig.turn()
    rig.events()
    rig.engine.close()
    assert rig.events() == [RunFailed(computing, common_pb2.DRAINING, "the prefill rank stops")]
    assert told(rig) == [(common_pb2.DRAINING, "computing"), (common_pb2.DRAINING, leased.request_id)]


def test_a_dead_hand_off_thread_ends_the_engine(caplog: pytest.LogCaptureFixture):
    """Without it no lease would ever end: the process must go, and its supervisor starts it anew."""
    rig = Rig()

    def broken() -> list[tuple[str, bytes]]:
        raise RuntimeError("lost the fabric")

    rig.kv.transport.notifications = broken  # pyright: ignore[reportAttributeAccessIssue]
    rig.engine.start()
    with pytest.raises(EngineError, match="lost the fabric"):
        for _ in range(100_000):
            rig.engine.turn()
