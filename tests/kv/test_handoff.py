"""A hand-off from first announcement to the lease's end, through lost, doubled and reordered messages, ends and refusals on both sides."""

import random

import msgspec
import pytest

from proto.baton.v1 import common_pb2
from services.kv.lease import LeaseState
from services.kv.messages import Announce, Done, Ended, Renew, RenewAnswer, RequestKey, decode, encode
from services.kv.pull import PullState
from services.runtime.errors import EngineError, HandoffError
from tests.kv.rig import STATE, Lossy, Pair, request


@pytest.fixture
def pair():
    return Pair()


def hand_over(pair, num_pages=5, chunks=3):
    key = pair.key()
    source = pair.compute(key, num_pages)
    target = pair.claim(key, num_pages)
    pair.announce(key, source, chunks)
    return key, source, target


def finish(pair, key):
    """The reader's request runs and ends."""
    pair.reader.pool.release(request(key))
    pair.assert_all_free()


def states(ended):
    return [(type(event).__name__, str(event.state), event.reason) for event in ended]


GOOD = [("PullEnded", "ready", 0), ("LeaseEnded", "released", 0)]


def test_pages_and_state_arrive_and_the_lease_ends(pair):
    key, _, target = hand_over(pair)
    ended = pair.tick()
    assert sorted(states(ended)) == sorted(GOOD)
    pull = next(event for event in ended if event.state is PullState.READY)
    assert pull.handoff == STATE and pair.arrived(key, target)
    page_bytes = pair.reader.memory.layout.page_bytes
    assert pull.stats.num_pages == 5 and pull.stats.num_bytes == 5 * (page_bytes + 8) == pair.reader.transport.stats.num_bytes
    assert all(pair.reader.pool.pages.is_writable(page, request(key)) for page in target)
    finish(pair, key)


def test_only_lacking_pages_move_and_none_at_all_when_everything_is_cached(pair):
    key = pair.key()
    source = pair.compute(key, 4)
    pair.reader.pulls.claim(key, pair.holder.instance_id)
    pages = pair.reader.pool.take(2, request(key))
    pair.reader.pulls.begin(key, {1: pages[0], 3: pages[1]})
    pair.announce(key, source)
    pair.tick()
    assert pair.reader.transport.stats.num_pages == 2 == pair.reader.transport.stats.num_words
    assert (pair.reader.memory.page_bytes_view()[pages[1]] == pair.holder.memory.page_bytes_view()[source[3]]).all()
    finish(pair, key)
    key = pair.key()
    pair.compute(key, 1)
    pair.claim(key, 0)
    pair.holder.leases.announce(key, [], STATE)
    assert sorted(states(pair.tick())) == sorted(GOOD) and pair.reader.transport.stats.num_pages == 2
    pair.holder.pool.release(request(key))
    pair.assert_all_free()


def test_reads_start_with_the_first_announcement(pair):
    key = pair.key()
    source = pair.compute(key, 4)
    pair.claim(key, 4)
    pair.holder.leases.announce(key, [(0, source[0]), (1, source[1])])
    pair.tick()
    assert pair.reader.transport.stats.num_pages == 2 and pair.reader.pulls.state(key) is PullState.FETCHING
    pair.holder.leases.announce(key, [(2, source[2]), (3, source[3])], STATE)
    assert sorted(states(pair.tick())) == sorted(GOOD)
    finish(pair, key)


def test_pages_wait_at_the_holder_until_the_reader_has_room(pair):
    key = pair.key()
    pair.reader.pulls.claim(key, pair.holder.instance_id)
    source = pair.compute(key, 5)
    pair.announce(key, source)
    assert pair.pass_time(100) == [], "renewed all along"
    assert pair.holder.leases.state(key) is LeaseState.LEASED and pair.reader.pool.num_available == 8
    target = pair.begin(key, 5)
    assert sorted(states(pair.tick())) == sorted(GOOD) and pair.arrived(key, target)
    finish(pair, key)


@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize("sequence", [0, 1, 2])
def test_a_lost_or_doubled_announcement(pair, sequence, copies):
    lost = []

    def verdict(message):
        if isinstance(message, Announce) and message.sequence == sequence and not lost:
            lost.append(message)
            return copies
        return 1

    lossy = Lossy(pair.fabric, verdict)
    key, _, target = hand_over(pair)
    ended = pair.tick()
    gap_seen = copies or sequence < 2
    assert bool(ended) == bool(gap_seen), "a gap is asked for at once; the last announcement only shows in the next renewal"
    ended += pair.pass_time(6)
    assert sorted(states(ended)) == sorted(GOOD) and pair.arrived(key, target)
    renewals = [message for message in lossy.seen if isinstance(message, Renew)]
    assert [message.next_sequence for message in renewals] == ([] if copies else [sequence])
    finish(pair, key)


@pytest.mark.parametrize("seed", range(8))
def test_announcements_in_any_order(pair, seed):
    lossy = Lossy(pair.fabric, lambda message: -1 if isinstance(message, Announce) else 1)
    key, _, target = hand_over(pair, 6, chunks=6)
    order = list(range(6)) * 2
    random.Random(seed).shuffle(order)
    lossy.deliver_kept(order)
    assert sorted(states(pair.tick())) == sorted(GOOD) and pair.arrived(key, target)
    assert pair.reader.transport.stats.num_pages == 6, "doubles are read once"
    finish(pair, key)


def test_unknown_is_no_failure_until_admission(pair):
    key = pair.key()
    lossy = Lossy(pair.fabric, lambda _: 1)
    target = pair.claim(key, 2)
    assert pair.pass_time(60) == []
    answers = [message for message in lossy.seen if isinstance(message, RenewAnswer)]
    assert len(answers) >= 10 and not any(message.known for message in answers)
    pair.announce(key, pair.compute(key, 2))
    assert sorted(states(pair.tick())) == sorted(GOOD) and pair.arrived(key, target)
    finish(pair, key)


def test_a_silent_holder_is_given_up_after_half_a_ttl(pair):
    Lossy(pair.fabric, lambda message: 0)
    key = pair.key()
    pair.claim(key, 2)
    asked_at = pair.clock.now + 5
    ended = pair.pass_time(30, step=0.5)
    assert states(ended) == [("PullEnded", "aborted", common_pb2.LEASE_EXPIRED)]
    assert "15 s" in ended[0].message and asked_at + 15 <= pair.clock.now
    pair.assert_all_free()


def test_a_lease_nobody_renews_expires_and_its_reader_hears(pair):
    key = pair.key()
    pair.announce(key, pair.compute(key, 3))
    pair.holder.pool.release(request(key))
    assert pair.pass_time(29.5, step=0.5) == [] and pair.holder.pool.num_available == 5
    assert states(pair.pass_time(1)) == [("LeaseEnded", "expired", common_pb2.LEASE_EXPIRED)]
    pair.claim(key, 3)  # too late, and the holder says so
    assert states(pair.pass_time(6)) == [("PullEnded", "aborted", common_pb2.LEASE_EXPIRED)]
    pair.assert_all_free()


@pytest.mark.parametrize("reason", [common_pb2.OVERLOADED, common_pb2.DEADLINE, common_pb2.INVALID, common_pb2.ENGINE_DIED])
@pytest.mark.parametrize("when", ["before admission", "computing", "leased"])
def test_b05_the_reader_hears_why_prefill_failed(pair, reason, when):
    key = pair.key()
    pair.claim(key, 4)
    if when == "before admission":
        pair.holder.leases.refuse(key, [pair.reader.instance_id], reason, "why")
    else:
        pair.fabric.hold_reads = True
        source = pair.compute(key, 4)
        pair.holder.leases.announce(key, list(enumerate(source))[:2])
        pair.tick()
        if when == "leased":
            pair.holder.leases.announce(key, list(enumerate(source))[2:], STATE)
        pair.holder.leases.abort(key, reason, "why")
    ended = [event for event in pair.tick() if type(event).__name__ == "PullEnded"]
    assert [(event.reason, event.message, event.handoff) for event in ended] == [(reason, "why", None)]
    for read in list(pair.fabric.reads):
        read.complete()
    pair.tick()
    pair.assert_all_free()


def test_b05_an_abort_whose_notice_is_lost_shows_in_the_next_renewal(pair):
    Lossy(pair.fabric, lambda message: 0 if isinstance(message, Ended) and pair.clock.now < 1001 else 1)
    key = pair.key()
    pair.claim(key, 2)
    pair.compute(key, 2)
    pair.holder.leases.abort(key, common_pb2.INTERNAL, "why")
    assert states(pair.tick()) == [("LeaseEnded", "aborted", common_pb2.INTERNAL)]
    assert states(pair.pass_time(6)) == [("PullEnded", "aborted", common_pb2.INTERNAL)]
    pair.pass_time(60)
    assert not pair.holder.leases._graves
    pair.assert_all_free()


def test_first_token_ends_the_request(pair):
    key = pair.key()
    pair.claim(key, 2)
    pair.compute(key, 2)
    pair.holder.leases.finish(key)
    assert sorted(states(pair.tick())) == sorted([("LeaseEnded", "released", 0), ("PullEnded", "aborted", 0)])
    pair.assert_all_free()


@pytest.mark.parametrize("reason", [common_pb2.INVALID, common_pb2.OVERLOADED, common_pb2.DRAINING, common_pb2.FINGERPRINT_MISMATCH])
@pytest.mark.parametrize("claimed", [False, True])
@pytest.mark.parametrize("admitted", [False, True])
def test_b26_the_holder_hears_that_decode_refuses(pair, reason, claimed, admitted):
    key = pair.key()
    pair.holder.leases.queue(key, [pair.reader.instance_id])
    if admitted:
        pair.announce(key, pair.compute(key, 3))
    if claimed:
        pair.reader.pulls.claim(key, pair.holder.instance_id)
        pair.reader.pulls.cancel(key, reason, "why")
    else:
        pair.reader.pulls.refuse(key, pair.holder.instance_id, reason, "why")
    assert states(pair.tick()) == [("LeaseEnded", "aborted", reason)], "without the clock moving"
    pair.assert_all_free()


def test_b26_a_lost_refusal_ends_with_the_lease(pair):
    Lossy(pair.fabric, lambda message: 0)
    key = pair.key()
    pair.announce(key, pair.compute(key, 3))
    pair.reader.pulls.refuse(key, pair.holder.instance_id, common_pb2.OVERLOADED, "why")
    assert pair.tick() == []
    assert states(pair.pass_time(30)) == [("LeaseEnded", "expired", common_pb2.LEASE_EXPIRED)]
    pair.assert_all_free()


def test_a_lease_waits_for_all_its_readers(pair):
    other = pair.rank()
    key = pair.key()
    pages = pair.holder.pool.take(2, request(key))
    pair.holder.leases.open(key, [pair.reader.instance_id, other.instance_id])
    for kv in (pair.reader, other):
        kv.pulls.claim(key, pair.holder.instance_id)
    pair.holder.leases.announce(key, list(enumerate(pages)), STATE)
    pair.reader.pulls.begin(key, dict(enumerate(pair.reader.pool.take(2, request(key)))))
    assert states(pair.tick()) == [("PullEnded", "ready", 0)]
    assert pair.holder.leases.state(key) is LeaseState.LEASED
    other.pulls.begin(key, dict(enumerate(other.pool.take(2, request(key)))))
    assert sorted(states(pair.tick())) == sorted(GOOD)
    for kv in (pair.reader, other):
        kv.pool.release(request(key))
    pair.assert_all_free()


def test_b43_other_attempts_instances_and_choices_are_ignored(pair):
    key, _, target = hand_over(pair, chunks=1)
    me, you = pair.reader.instance_id, pair.holder.instance_id
    stale = msgspec.structs.replace(key, attempt=1)
    twin = msgspec.structs.replace(key, choice=1)
    forged = [
        Done(key=stale, holder=you, reader=me),
        Done(key=twin, holder=you, reader=me),
        Done(key=key, holder="gone", reader=me),
        Done(key=key, holder=you, reader="gone"),
        Ended(key=key, holder="gone", reader=me, reason=1),
        Ended(key=key, holder=you, reader="gone", reason=1),
        Renew(key=key, holder="gone", reader=me, next_sequence=0),
    ]
    for message in forged:
        pair.reader.transport.notify(you, encode(message))
    for message in (Announce(key=stale, holder=you, reader=me, sequence=0, pages=()), Ended(key=key, holder="gone", reader=me, reason=1)):
        pair.holder.transport.notify(me, encode(message))
    assert pair.holder.exchange.tick() == [], "no forged message ends the lease"
    # Ended for a holder that is not this rank is taken for a pull's, so two of the seven were counted on the other side
    assert pair.holder.leases.num_ignored + pair.holder.pulls.num_ignored == len(forged)
    assert pair.holder.leases.state(key) is LeaseState.LEASED
    assert sorted(states(pair.tick())) == sorted(GOOD) and pair.arrived(key, target)
    assert pair.reader.pulls.num_ignored == 2
    finish(pair, key)


def test_late_notices_of_an_ended_request_do_not_touch_the_next_one(pair):
    first = pair.key()
    pair.compute(first, 3)
    pair.holder.leases.abort(first, common_pb2.CANCELLED, "gone")
    pair.tick()
    second = RequestKey(first.request_id, 0, 1)
    source = pair.compute(second, 3)
    target = pair.claim(second, 3)
    for late in (Done, Ended):
        fields = {"reason": common_pb2.CANCELLED} if late is Ended else {}
        message = late(key=first, holder=pair.holder.instance_id, reader=pair.reader.instance_id, **fields)
        pair.reader.transport.notify(pair.holder.instance_id, encode(message))
    pair.announce(second, source)
    ended = [event for event in pair.tick() if event.key == second]
    assert sorted(states(ended)) == sorted(GOOD) and pair.arrived(second, target)
    finish(pair, second)


def test_garbage_is_counted_and_ignored(pair):
    for payload in (b"", b"\xff\xff", b"hello", encode(Renew(key=pair.key(), holder="a", reader="b", next_sequence=0))[:-3]):
        pair.reader.transport.notify(pair.holder.instance_id, payload)
        with pytest.raises(ValueError, match="not a hand-off message"):
            decode(payload)
    pair.tick()
    assert pair.holder.exchange.num_ignored == 4


def test_misuse_is_an_error(pair):
    key = pair.key()
    source = pair.compute(key, 1)
    with pytest.raises(EngineError):
        pair.holder.leases.open(key, [pair.reader.instance_id])
    pair.holder.leases.announce(key, [(0, source[0])], STATE)
    with pytest.raises(EngineError):
        pair.holder.leases.announce(key, [], STATE)
    with pytest.raises(HandoffError) as refused:
        pair.reader.pulls.claim(key, "nobody")
    assert refused.value.reason == common_pb2.PEER_GONE
    pair.claim(key, 1)
    with pytest.raises(EngineError):
        pair.reader.pulls.claim(key, pair.holder.instance_id)


def test_two_sides_that_disagree_on_the_pages_fail_at_once(pair):
    key = pair.key()
    source = pair.compute(key, 2)
    pair.claim(key, 3)
    pair.announce(key, source, 1)
    ended = pair.tick()
    assert ("PullEnded", "aborted", common_pb2.INTERNAL) in states(ended)
    pair.assert_all_free()
