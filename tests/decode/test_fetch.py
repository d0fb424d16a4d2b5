"""From claim to READY: what is pulled, in which order, and how everything that goes wrong ends."""
from collections.abc import Callable

import msgspec
import pytest

from proto.baton.v1 import common_pb2
from services.decode.messages import Claimed, Failed, Finished, Ready
from services.kv.layout import Compatibility
from services.kv.messages import Announce, Done, Ended, RequestKey, decode
from tests.decode.rig import LAYOUT, PAGE_SIZE, Rig, ScriptedHolder, greedy, mono

PROMPT = [3 + 7 * i % 240 for i in range(150)]  # three pages
MakeRig = Callable[..., Rig]


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 128, 150])
def test_hand_off_is_pulled_verified_and_told(rig: Rig, num_tokens: int) -> None:
    rig.start(PROMPT[:num_tokens], greedy(4), handle=1)
    rig.run()
    (ready,) = rig.of(Ready, 1)
    num_pages = -(-num_tokens // PAGE_SIZE)
    assert (ready.transfer.num_pages, ready.transfer.num_cached_pages) == (num_pages, 0)
    assert ready.transfer.num_bytes == num_pages * (LAYOUT.page_bytes + 8)
    assert rig.kv.transport.stats.num_pages == num_pages and rig.kv.transport.stats.num_words == num_pages
    assert rig.tokens(1) == mono(PROMPT[:num_tokens], 4)
    assert len(rig.holder.kv.leases) == 0, "Done frees the lease at once"


def test_pages_are_pulled_while_later_chunks_compute(rig: Rig) -> None:
    spec = rig.spec(PROMPT, greedy(3))
    rig.submit(spec, 1)
    rig.holder.open(spec, rig.kv)
    rig.exchange()
    assert rig.kv.transport.stats.num_pages == 0
    rig.holder.announce(spec, 0, 1)
    rig.exchange()
    assert rig.kv.transport.stats.num_pages == 1 and not rig.of(Ready)
    rig.holder.announce_last(spec, 1)
    rig.run()
    assert rig.tokens(1) == mono(PROMPT, 3)


def test_prefix_hit_pulls_only_what_is_lacking(rig: Rig) -> None:
    rig.start(PROMPT, greedy(3), handle=1)
    rig.run()
    rig.start(PROMPT, greedy(3), handle=2)
    rig.run()
    assert rig.of(Claimed, 2)[0].num_cached_tokens == 128
    transfer = rig.of(Ready, 2)[0].transfer
    assert (transfer.num_pages, transfer.num_cached_pages, transfer.num_bytes) == (1, 2, LAYOUT.page_bytes + 8)
    assert rig.tokens(2) == rig.tokens(1) == mono(PROMPT, 3)


def test_tenants_salt_shares_nothing(rig: Rig) -> None:
    rig.start(PROMPT, greedy(2), handle=1, salt=b"a")
    rig.run()
    rig.start(PROMPT, greedy(2), handle=2, salt=b"b")
    rig.run()
    assert rig.of(Ready, 2)[0].transfer.num_cached_pages == 0


def test_pages_of_the_output_are_cached_when_final(rig: Rig) -> None:
    rig.start(PROMPT, greedy(60), handle=1)
    rig.run()
    text = PROMPT + mono(PROMPT, 60)
    rig.start(text, greedy(2), handle=2)
    rig.run()
    assert rig.of(Ready, 2)[0].transfer.num_cached_pages == 3, "a page of prompt and output tokens is a prefix like any other"


def test_claims_are_served_first_come_first_served(make_rig: MakeRig) -> None:
    rig = make_rig(num_pages=8)
    rig.start(PROMPT, greedy(100), handle=1)  # 3 pages and 1
    rig.exchange()
    big = [5] * (5 * PAGE_SIZE)
    rig.start(big, greedy(2), handle=2)  # 5 pages and 1: must wait for request 1
    rig.start(PROMPT[:10], greedy(2), handle=3)  # would fit now
    rig.exchange()
    rig.step()
    assert [event.handle for event in rig.of(Ready)] == [1], "nobody overtakes the first claim"
    assert len(rig.holder.kv.leases) == 2, "the pages wait at the holder"
    rig.cancel(1)
    rig.run()
    assert [event.handle for event in rig.of(Ready)] == [1, 2, 3]
    assert rig.tokens(2) == mono(big, 2) and rig.tokens(3) == mono(PROMPT[:10], 2)


def test_claim_queued_at_its_holder_is_passed(make_rig: MakeRig) -> None:
    """A holder full of leases for later claims admits the first one only when those are read: pages taken for it would be a deadlock."""
    rig = make_rig(num_pages=4)
    queued = rig.spec(PROMPT[:100], greedy(2))  # 2 pages and 1, but its holder has no room to compute it
    rig.submit(queued, 1)
    rig.exchange()
    assert rig.kv.pool.num_available == 4, "nothing is taken for a prompt that may never come"
    big = [5] * (3 * PAGE_SIZE)
    rig.start(big, greedy(2), handle=2)  # 3 pages and none beside
    rig.exchange()
    rig.step()
    assert [event.handle for event in rig.of(Ready)] == [2]
    rig.holder.hand_off(queued, rig.kv)
    rig.run()
    assert [event.handle for event in rig.of(Ready)] == [2, 1]
    assert rig.tokens(1) == mono(PROMPT[:100], 2) and rig.tokens(2) == mono(big, 2)


def test_waiting_claim_pins_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(num_pages=4)
    rig.start(PROMPT[:64], greedy(2), handle=1)
    rig.run()
    rig.start([9] * 100, greedy(90), handle=2)  # 2 pages and 1: all but the cached one
    rig.exchange()
    spec = rig.spec(PROMPT[:150], greedy(3))
    rig.submit(spec, 3)
    rig.exchange()
    assert rig.kv.pool.pages.num_idle_cached == 1, "the claim's prefix hit stays evictable until it is served"
    rig.cancel(3)
    rig.cancel(2)
    rig.step()


def test_too_large_is_refused_and_told(make_rig: MakeRig) -> None:
    rig = make_rig(num_pages=4)
    spec = rig.spec(PROMPT, greedy(200))
    rig.holder.open(spec, rig.kv)
    rig.submit(spec, 1)
    rig.exchange()
    end = rig.end(1)
    assert isinstance(end, Failed) and end.reason == common_pb2.TOO_LARGE and "6 pages" in end.message and "4" in end.message
    (ended,) = rig.holder.kv.leases.take_ended() or [None]
    rig.holder.drop(spec)
    assert ended is None or ended.reason == common_pb2.TOO_LARGE  # exchange() may have taken it
    assert len(rig.holder.kv.leases) == 0, "B26: the holder hears of the refusal"


def test_more_than_max_claims_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig(max_claims=2)
    for handle in (1, 2, 3):
        rig.submit(rig.spec(PROMPT, greedy(2)), handle)
    assert rig.end(3).reason == common_pb2.OVERLOADED
    for handle in (1, 2):
        rig.cancel(handle)


def test_lost_announcement_is_asked_for(rig: Rig) -> None:
    lost: list[bytes] = []

    def lose_first(_sender: str, _receiver: str, payload: bytes) -> list[bytes]:
        message = decode(payload)
        if isinstance(message, Announce) and message.sequence == 0 and not lost:
            lost.append(payload)
            return []
        return [payload]

    rig.fabric.on_notify = lose_first
    spec = rig.spec(PROMPT, greedy(3))
    rig.submit(spec, 1)
    rig.exchange()
    rig.holder.open(spec, rig.kv)
    rig.holder.announce(spec, 0, 1)
    rig.holder.announce_last(spec, 1)
    rig.run()
    assert lost and rig.tokens(1) == mono(PROMPT, 3)


def test_what_was_announced_before_the_claim_is_asked_for_soon(rig: Rig) -> None:
    spec = rig.spec(PROMPT, greedy(3))
    rig.holder.hand_off(spec, rig.kv)
    rig.exchange()
    rig.submit(spec, 1)
    rig.exchange()
    rig.clock.now += 0.1
    rig.run()
    assert rig.tokens(1) == mono(PROMPT, 3)


def test_rewritten_page_is_never_used(rig: Rig) -> None:
    rig.fabric.hold_reads = True
    spec = rig.start(PROMPT, greedy(3), handle=1)
    rig.exchange()
    (read,) = rig.fabric.reads
    read.complete()
    rig.holder.kv.memory.epochs[read.remote_pages[1]] += 1  # the holder gave the page to somebody else
    rig.fabric.hold_reads = False
    rig.run()
    end = rig.end(1)
    assert isinstance(end, Failed) and end.reason == common_pb2.EPOCH_MISMATCH
    assert not rig.delivered and len(rig.kv.pool.cache) == 0, "B24: nothing that was read is cached"
    rig.start(spec.token_ids, greedy(3), handle=2)
    rig.run()
    assert rig.of(Ready, 2)[0].transfer.num_cached_pages == 0 and rig.tokens(2) == mono(PROMPT, 3)


def test_failed_read_ends_the_request(rig: Rig) -> None:
    rig.fabric.hold_reads = True
    rig.start(PROMPT, greedy(3), handle=1)
    rig.exchange()
    rig.fabric.reads[0].copy(2)
    rig.fabric.reads[0].fail()
    rig.exchange()
    assert rig.end(1).reason == common_pb2.READ_FAILED and len(rig.kv.pool.cache) == 0
    rig.fabric.hold_reads = False
    rig.start(PROMPT, greedy(3), handle=2)  # the peer was closed; the next claim adds it afresh
    rig.run()
    assert rig.tokens(2) == mono(PROMPT, 3)


def test_holder_that_dies_while_read_from(rig: Rig) -> None:
    rig.fabric.hold_reads = True
    spec = rig.spec(PROMPT, greedy(3))
    rig.submit(spec, 1)
    rig.holder.open(spec, rig.kv)
    rig.holder.announce(spec, 0, 2)
    rig.fetcher.tick()
    rig.fetcher.tick()
    rig.fabric.kill(rig.holder.kv.instance_id)
    rig.fetcher.tick()
    rig.fetcher.tick()
    assert rig.end(1).reason == common_pb2.READ_FAILED
    rig.holder.kv.leases.abort(spec.key, common_pb2.PEER_GONE, "test is over")
    rig.holder.drop(spec)


def test_silent_holder_is_given_up(rig: Rig) -> None:
    rig.submit(rig.spec(PROMPT, greedy(3)), 1)
    rig.fabric.on_notify = lambda _sender, _receiver, _payload: []
    for _ in range(40):
        rig.clock.now += 1.0
        rig.fetcher.tick()
    assert rig.end(1).reason == common_pb2.LEASE_EXPIRED


def test_holders_failure_is_passed_on(rig: Rig) -> None:
    spec = rig.spec(PROMPT, greedy(3))
    rig.submit(spec, 1)
    rig.holder.open(spec, rig.kv)
    rig.holder.announce(spec, 0, 1)
    rig.exchange()
    rig.holder.kv.leases.abort(spec.key, common_pb2.INTERNAL, "forward failed")
    rig.holder.drop(spec)
    rig.exchange()
    end = rig.end(1)
    assert (end.reason, end.message) == (common_pb2.INTERNAL, "forward failed")


def test_first_token_that_ends_the_request_needs_no_page(rig: Rig) -> None:
    spec = rig.spec(PROMPT, greedy(3))
    rig.submit(spec, 1)
    rig.holder.open(spec, rig.kv)
    rig.holder.kv.leases.finish(spec.key)
    rig.holder.drop(spec)
    rig.run()
    end = rig.end(1)
    assert isinstance(end, Finished) and end.num_output_tokens == 1
    assert not rig.forward.batches and not rig.of(Ready)


def test_late_read_keeps_its_pages_in_quarantine(make_rig: MakeRig) -> None:
    """B01: pages of a request that is gone are reused only when the read into them has ended."""
    rig = make_rig(num_pages=4)
    rig.fabric.hold_reads = True
    rig.start(PROMPT, greedy(2), handle=1)  # 3 pages and 0: 151 tokens fit
    rig.exchange()
    rig.clock.now += 20.0
    rig.exchange()
    assert rig.end(1).reason == common_pb2.READ_DEADLINE and rig.kv.pool.num_quarantined == 3
    rig.fabric.hold_reads = False
    (read,) = rig.fabric.reads
    other = ScriptedHolder(rig.fabric, rig.clock)
    spec = rig.spec(PROMPT[:70], greedy(2), source=other.rank("prefill:2"))
    rig.fabric.hold_reads = True
    rig.submit(spec, 2)
    other.hand_off(spec, rig.kv)
    rig.exchange()
    assert not rig.of(Ready, 2), "three of four pages may still be written to"
    read.complete()  # lands at last, in quarantine
    rig.fabric.hold_reads = False
    rig.run()
    assert rig.tokens(2) == mono(PROMPT[:70], 2)
    other.kv.exchange.tick()
    assert other.kv.pool.num_available == other.kv.pool.num_pages


def test_deadline_of_a_claim(rig: Rig) -> None:
    told: list[object] = []
    rig.fabric.on_notify = lambda _sender, _receiver, payload: (told.append(decode(payload)), [payload])[1]
    rig.submit(rig.spec(PROMPT, greedy(3), timeout_s=2.0), 1)
    rig.clock.now += 1.9
    rig.exchange()
    assert not rig.of(Failed)
    rig.clock.now += 0.2
    rig.exchange()
    assert rig.end(1).reason == common_pb2.DEADLINE
    assert [message.reason for message in told if isinstance(message, Ended)] == [common_pb2.DEADLINE]


def test_other_fingerprint_is_refused_by_name(rig: Rig) -> None:
    other = ScriptedHolder(rig.fabric, rig.clock, Compatibility({"model": "another"}))
    rig.submit(rig.spec(PROMPT, greedy(3), source=other.rank()), 1)
    end = rig.end(1)
    assert end.reason == common_pb2.FINGERPRINT_MISMATCH and "scripted" in end.message and "another" in end.message


def test_holder_restarted_at_its_address(rig: Rig) -> None:
    """B02: a new incarnation is a new peer; nothing of the old one is used again."""
    rig.start(PROMPT, greedy(2), handle=1)
    rig.run()
    old = rig.holder.kv.instance_id
    rig.fabric.kill(old)
    rig.holder = ScriptedHolder(rig.fabric, rig.clock)
    rig.start([8] * 70, greedy(2), handle=2)
    rig.run()
    assert rig.tokens(2) == mono([8] * 70, 2)
    assert not rig.kv.transport.has_peer(old) and rig.kv.transport.has_peer(rig.holder.kv.instance_id)


def test_attempt_submitted_twice_leaves_the_first_alone(rig: Rig) -> None:
    spec = rig.start(PROMPT, greedy(2), handle=1)
    rig.submit(spec, 2)
    assert rig.end(2).reason == common_pb2.STALE_ATTEMPT
    rig.run()
    assert rig.tokens(1) == mono(PROMPT, 2)


def test_announcement_of_another_attempt_is_ignored(rig: Rig) -> None:
    spec = rig.spec(PROMPT, greedy(2))
    newer = rig.spec(PROMPT, greedy(2), key=RequestKey(spec.key.request_id, 0, 1))
    rig.submit(newer, 1)
    rig.holder.hand_off(spec, rig.kv)
    rig.exchange()
    assert not rig.of(Ready) and rig.kv.transport.stats.num_pages == 0
    rig.holder.kv.leases.abort(spec.key, common_pb2.STALE_ATTEMPT, "")
    rig.holder.hand_off(newer, rig.kv)
    rig.run()
    assert rig.tokens(1) == mono(PROMPT, 2)


def test_done_is_sent_once(rig: Rig) -> None:
    told: list[object] = []
    rig.fabric.on_notify = lambda _sender, _receiver, payload: (told.append(decode(payload)), [payload])[1]
    rig.start(PROMPT, greedy(2), handle=1)
    rig.run()
    assert sum(isinstance(message, Done) for message in told) == 1


@pytest.mark.parametrize(("change", "words"), [({"peer": b"x"}, "cannot be read"), ({"instance_id": "0123"}, "0123")])
def test_unusable_holder_is_no_fault_of_the_request(rig: Rig, change: dict[str, object], words: str) -> None:
    """PEER_GONE, so that the router tries another holder."""
    spec = rig.spec(PROMPT, greedy(3))
    rig.submit(msgspec.structs.replace(spec, source=msgspec.structs.replace(spec.source, **change)), 1)
    end = rig.end(1)
    assert isinstance(end, Failed) and end.reason == common_pb2.PEER_GONE and words in end.message
