"""Whatever happens to a move, in whatever phase: the text goes on at exactly one rank or ends typed, and every page comes back."""
from collections.abc import Callable

import pytest

from proto.baton.v1 import common_pb2
from services.decode.messages import CaughtUp, Failed, Finished, Granted, Ready, Resumed, Stop
from services.decode.moves import PAUSE_S
from services.kv.messages import Done, Ended, decode
from services.kv.pages import Holder, HolderKind
from tests.decode.move_rig import HANDLE, MoveRig
from tests.decode.rig import greedy, mono

PROMPT = [3 + 7 * i % 240 for i in range(150)]
NUM_TOKENS = 60
PHASES = ["claimed", "granted", "started", "fetching", "caught up", "paused", "verifying", "done on its way", "moved"]
MakeMoveRig = Callable[..., MoveRig]


def hold_done(moving: MoveRig) -> None:
    moving.fabric.on_notify = lambda sender, receiver, payload: [] if isinstance(decode(payload), Done) else [payload]


def bring(moving: MoveRig, phase: str, **fields: float) -> None:
    """A move of the request up to `phase`; reads are held from "fetching" to "verifying"."""
    moving.start(PROMPT, greedy(NUM_TOKENS), 5, **fields)
    moving.submit()
    if phase == "claimed":
        return
    moving.exchange()
    assert moving.target.of(Granted, 1)
    if phase == "granted":
        return
    moving.fabric.hold_reads = phase == "fetching"
    moving.begin()
    if phase == "started":
        return
    moving.step()
    assert bool(moving.target.of(CaughtUp, 1)) == (phase != "fetching")
    if phase in ("fetching", "caught up"):
        return
    moving.fabric.hold_reads = phase in ("paused", "verifying")
    if phase == "done on its way":
        hold_done(moving)
    moving.pause()
    moving.exchange()
    if phase == "verifying":
        moving.fabric.reads[0].complete()
        moving.exchange()
        assert moving.fabric.reads[-1].of_epochs
    if phase == "moved":
        moving.settle()
        assert moving.source.end(HANDLE).reason == common_pb2.REPLACED
    assert bool(moving.target.of(Ready, 1)) == (phase in ("done on its way", "moved"))


def has_moved(phase: str) -> bool:
    return phase in ("done on its way", "moved")


@pytest.mark.parametrize("by", ["cancel", "session"])
@pytest.mark.parametrize("phase", PHASES)
def test_client_gone(moving: MoveRig, phase: str, by: str) -> None:
    """Within one step all pages are back, but those of reads in flight, which come back when these end."""
    bring(moving, phase)
    for rig, handle in ((moving.source, HANDLE), (moving.target, 1)):
        if by == "cancel":
            moving.cancel(rig, handle)
        else:
            rig.lose_session(1)
            assert rig.loop.take_waiting()
    assert moving.source.kv.pool.num_available == 32 and not len(moving.source.kv.leases)
    num_in_flight = len({page for read in moving.fabric.reads for page in read.local_pages})
    assert moving.target.kv.pool.num_available == 32 - num_in_flight
    moving.heal()
    moving.run()
    assert moving.target.kv.pool.num_available == 32
    assert not moving.ends(moving.target, 1)
    assert all(end.reason == common_pb2.REPLACED for end in moving.ends(moving.source, HANDLE)), "nobody asked to hear of it"


@pytest.mark.parametrize("resumed_by", ["router", "time"])
@pytest.mark.parametrize("phase", PHASES)
def test_target_dies(moving: MoveRig, phase: str, resumed_by: str) -> None:
    bring(moving, phase)
    moving.kill(moving.target)
    if phase == "done on its way":
        moving.heal()
    if resumed_by == "router":
        moving.resume()
        assert bool(moving.of(Resumed)) == (phase not in ("claimed", "granted", "moved"))
    else:
        moving.let(3)
    moving.run()
    if phase == "moved":
        assert moving.source.end(HANDLE).reason == common_pb2.REPLACED, "from here on it is a death of decode: the router replays"
        return
    if phase in ("paused", "verifying", "done on its way") and resumed_by == "time":
        assert moving.of(Resumed)[0].reason == common_pb2.DEADLINE
    assert moving.source.tokens(HANDLE) == mono(PROMPT, NUM_TOKENS) and isinstance(moving.source.end(HANDLE), Finished)


@pytest.mark.parametrize("phase", PHASES)
def test_source_dies(moving: MoveRig, phase: str) -> None:
    bring(moving, phase)
    told = moving.source.tokens(HANDLE)
    assert told == mono(PROMPT, len(told))
    moving.kill(moving.source)
    moving.fabric.hold_reads = False
    if has_moved(phase):
        moving.run()
        assert moving.text() == mono(PROMPT, NUM_TOKENS)
        return
    moving.let(20)
    (failed,) = moving.ends(moving.target, 1)
    assert isinstance(failed, Failed)
    in_flight = phase in ("fetching", "paused", "verifying")
    reasons = (common_pb2.READ_FAILED,) if in_flight else (common_pb2.LEASE_EXPIRED, common_pb2.READ_FAILED)
    assert failed.reason in reasons and not moving.target.of(Ready)
    moving.run()


@pytest.mark.parametrize("phase", PHASES)
def test_partition_and_heal(moving: MoveRig, phase: str) -> None:
    bring(moving, phase)
    moving.part()
    moving.let(40)
    if has_moved(phase):
        assert bool(moving.of(Resumed)) == (phase == "done on its way"), "the source did not hear: the router has both"
    else:
        (failed,) = moving.ends(moving.target, 1)
        in_flight = phase in ("started", "fetching", "paused", "verifying")  # the announcement of "started" was on its way
        assert isinstance(failed, Failed) and failed.reason == (common_pb2.READ_DEADLINE if in_flight else common_pb2.LEASE_EXPIRED)
        assert moving.target.kv.pool.num_quarantined == len({page for read in moving.fabric.reads for page in read.local_pages})
        assert not moving.of(Failed)
    moving.heal()
    moving.run()
    assert moving.target.kv.pool.num_available == 32, "late reads have ended"
    if phase != "moved":
        assert moving.source.tokens(HANDLE) == mono(PROMPT, NUM_TOKENS)
    assert moving.text() == mono(PROMPT, NUM_TOKENS)


@pytest.mark.parametrize("phase", ["fetching", "paused", "verifying"])
def test_target_ready_after_the_source_resumed(moving: MoveRig, phase: str) -> None:
    """The source's word is lost, so the target verifies and says `ready`, late: what it read stands, and its Done is ignored."""
    bring(moving, phase)
    if phase == "fetching":
        moving.pause()
    lost: list[object] = []

    def lose_ended(sender: str, receiver: str, payload: bytes) -> list[bytes]:
        if isinstance(decode(payload), Ended):
            lost.append(payload)
            return []
        return [payload]

    moving.fabric.on_notify = lose_ended
    moving.clock.now += PAUSE_S
    moving.source.step()
    assert moving.of(Resumed) and lost and not moving.target.of(Ready)
    for _ in range(10):  # the source appends to the very page that is being read
        moving.source.step()
    ignored = moving.source.kv.leases.num_ignored
    moving.heal()
    moving.run()
    assert moving.target.of(Ready, 1) and moving.source.kv.leases.num_ignored == ignored + 1
    assert moving.source.tokens(HANDLE) == mono(PROMPT, NUM_TOKENS)
    assert moving.text() == mono(PROMPT, NUM_TOKENS), "both give the same tokens, so the router may take either's"


@pytest.mark.parametrize("phase", ["paused", "verifying"])
def test_pages_rewritten_before_they_were_read_are_not_used(moving: MoveRig, phase: str) -> None:
    """The request ended at the source unheard, and another one writes where it was."""
    bring(moving, phase)
    moving.fabric.on_notify = lambda sender, receiver, payload: []
    moving.cancel(moving.source, HANDLE)
    kv, other = moving.source.kv, Holder(HolderKind.REQUEST, "other")
    kv.memory.pages[kv.pool.take(32, other)] = 77.0
    moving.fabric.hold_reads = False
    moving.exchange()
    kv.pool.release(other)
    moving.heal()
    (failed,) = moving.ends(moving.target, 1)
    assert isinstance(failed, Failed) and failed.reason == common_pb2.EPOCH_MISMATCH
    assert not moving.target.of(Ready, 1)


@pytest.mark.parametrize("phase", PHASES[:-2])
def test_deadline_passes_at_the_source(moving: MoveRig, phase: str) -> None:
    bring(moving, phase, timeout_s=1.0)
    moving.clock.now += 1.5
    moving.source.step()
    assert moving.source.end(HANDLE).reason == common_pb2.DEADLINE and moving.source.kv.pool.num_available == 32
    if phase in ("claimed", "granted"):
        moving.cancel(moving.target, 1)  # the router's part: its holder never heard of the move
    moving.exchange()
    moving.heal()
    moving.run()
    if phase not in ("claimed", "granted"):
        assert moving.target.end(1).reason == common_pb2.DEADLINE


@pytest.mark.parametrize("phase", ["fetching", "paused", "caught up"])
def test_deadline_passes_at_the_target(moving: MoveRig, phase: str) -> None:
    moving.start(PROMPT, greedy(NUM_TOKENS), 5)
    moving.submit(timeout_s=1.0)
    moving.step()
    moving.begin()
    moving.fabric.hold_reads = phase != "caught up"
    moving.step()
    if phase == "paused":
        moving.pause()
    moving.clock.now += 1.5
    moving.settle()
    assert moving.target.end(1).reason == common_pb2.DEADLINE and moving.of(Resumed)[0].reason == common_pb2.DEADLINE
    moving.heal()
    moving.run()
    assert moving.source.tokens(HANDLE) == mono(PROMPT, NUM_TOKENS)


@pytest.mark.parametrize("phase", ["started", "fetching", "caught up"])
@pytest.mark.parametrize("end", ["length", "nan", "forward"])
def test_request_ends_by_itself(moving: MoveRig, phase: str, end: str) -> None:
    bring(moving, phase)
    if end == "nan":
        moving.source.forward.nan_for = set(range(260))
    for _ in range(NUM_TOKENS):
        if end == "forward":
            moving.source.forward.fail_with = RuntimeError("lost its device")
        moving.source.step()
        if moving.ends(moving.source, HANDLE):
            break
    assert moving.source.kv.pool.num_available == 32 and not len(moving.source.kv.leases)
    moving.settle()
    if end == "length":
        assert moving.source.tokens(HANDLE) == mono(PROMPT, NUM_TOKENS)
        finished = moving.target.end(1)
        assert isinstance(finished, Finished) and finished.reason == common_pb2.FINISH_UNSPECIFIED
    else:
        assert moving.source.end(HANDLE).reason == moving.target.end(1).reason == common_pb2.INTERNAL
    moving.heal()
    moving.run()
    assert not moving.target.of(Ready) and not moving.of(Resumed)


@pytest.mark.parametrize("phase", ["started", "caught up", "paused"])
def test_preempted_while_it_moves(make_move_rig: MakeMoveRig, phase: str) -> None:
    moving = make_move_rig(num_pages=7)
    moving.source.start([9] * 60, greedy(200), handle=8)  # 2 pages, 4 or 5 in the end
    moving.exchange()
    moving.source.step()
    moving.start(PROMPT, greedy(200), 2)  # 4 pages, 6 in the end
    moving.submit()
    moving.exchange()
    moving.begin()
    if phase != "started":
        moving.step()
    if phase == "paused":
        moving.fabric.hold_reads = True
        moving.pause()
    for _ in range(150):
        moving.source.step()
    assert moving.source.end(HANDLE).reason == common_pb2.PREEMPTED
    assert moving.source.kv.pool.pages.num_idle_cached >= 2, "its final pages are a prefix that may be evicted"
    moving.exchange()
    assert moving.target.end(1).reason == common_pb2.PREEMPTED
    moving.heal()
    moving.run()
    assert moving.source.tokens(8) == mono([9] * 60, 200)


def test_source_stops(moving: MoveRig) -> None:
    bring(moving, "paused")
    moving.source.fetcher.close()
    moving.source.loop.inbox.put(Stop())
    moving.source.loop.run()
    assert moving.source.end(HANDLE).reason == common_pb2.DRAINING
    moving.exchange()
    assert moving.target.end(1).reason == common_pb2.DRAINING
    moving.heal()
    moving.exchange()


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("phase", ["started", "fetching", "caught up", "paused", "verifying"])
def test_agent_renewed(moving: MoveRig, phase: str, side: str) -> None:
    """What hung on the old instance id is void on both sides; the request runs on, and moves under the new one."""
    bring(moving, phase)
    rig = getattr(moving, side)
    former = rig.kv.renew_agent()
    assert rig.kv.instance_id != former
    for _ in range(2):
        moving.settle()
    assert moving.of(Resumed) and moving.target.end(1).reason in (common_pb2.FENCED, common_pb2.READ_FAILED)
    moving.heal()
    moving.settle()
    moving.move(attempt=2)
    moving.run()
    assert moving.target.of(Ready, 2) and moving.text(2) == mono(PROMPT, NUM_TOKENS)


def test_move_refused_by_a_full_target(make_move_rig: MakeMoveRig) -> None:
    moving = make_move_rig(max_claims=1)
    moving.start(PROMPT, greedy(NUM_TOKENS), 5)
    moving.target.submit(moving.target.spec([5] * 10, greedy(2)), 7)
    moving.submit()
    assert moving.target.end(1).reason == common_pb2.OVERLOADED
    moving.cancel(moving.target, 7)
    moving.run()
    assert moving.source.tokens(HANDLE) == mono(PROMPT, NUM_TOKENS) and not moving.of(Resumed), "it never heard of a move"


def test_moves_wait_for_pages_in_their_turn(make_move_rig: MakeMoveRig) -> None:
    moving = make_move_rig(target_pages=8)
    moving.target.start([4] * 300, greedy(90), handle=9)  # 5 pages and 1
    moving.target.exchange()
    moving.target.step()
    moving.start(PROMPT, greedy(NUM_TOKENS), 5)  # 3 pages and 1: it can become no longer
    moving.submit()
    moving.step()
    assert not moving.target.of(Granted, 1)
    moving.cancel(moving.target, 9)
    moving.exchange()
    assert moving.target.of(Granted, 1)
    moving.begin()
    moving.step()
    moving.pause()
    moving.run()
    assert moving.text() == mono(PROMPT, NUM_TOKENS)


@pytest.mark.parametrize("kind", ["lost", "doubled", "late"])
def test_announcements_lost_doubled_late(moving: MoveRig, kind: str) -> None:
    """Renewals ask for what is missing; what comes twice or out of order changes nothing."""
    late: list[tuple[str, str, bytes]] = []
    ranks: list[str] = [moving.source.kv.instance_id, moving.target.kv.instance_id]
    seen = 0

    def meddle(sender: str, receiver: str, payload: bytes) -> list[bytes]:
        nonlocal seen
        if type(decode(payload)).__name__ != "Announce" or {sender, receiver} != set(ranks):
            return [payload]
        seen += 1
        if kind == "doubled":
            return [payload, payload]
        if seen % 2:
            if kind == "late":
                late.append((sender, receiver, payload))
            return []
        return [payload]

    moving.start(PROMPT, greedy(160), 5)
    moving.fabric.on_notify = meddle
    moving.submit()
    moving.step()
    moving.begin()
    for _ in range(80):
        moving.clock.now += 0.1
        moving.step()
    moving.pause()
    while late:
        moving.fabric.deliver(*late.pop())
    moving.let(8, stride=0.25)
    moving.heal()
    moving.run()
    assert seen >= 3 and moving.text() == mono(PROMPT, 160)
    if kind == "doubled":
        assert not moving.of(Resumed)
