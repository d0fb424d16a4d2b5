"""Verified reads and quarantine: what was rewritten is thrown away, what may still land is never reused (B01-B03, B24)."""

import pytest

from proto.baton.v1 import common_pb2
from services.kv.hash import page_digests
from services.kv.messages import WIRE_VERSION
from services.kv.pages import HolderKind
from services.kv.pull import PullState
from services.runtime.errors import HandoffError
from tests.kv.rig import STATE, Pair, compatible, request

READ_LATE_S = 6.0  # beyond 5 s + bytes / 100 MB/s


@pytest.fixture
def pair():
    pair = Pair()
    pair.fabric.hold_reads = True
    return pair


def begin(pair, num_pages=4, chunks=1, key=None):
    """A hand-off whose page reads are posted and held."""
    key = key or pair.key()
    source = pair.compute(key, num_pages)
    target = pair.claim(key, num_pages)
    pair.announce(key, source, chunks)
    pair.tick()
    return key, source, target


def complete_all(pair):
    ended = []
    while pair.fabric.reads:
        for read in list(pair.fabric.reads):
            read.complete()
        ended += pair.tick()
    return ended


def of_reader(ended):
    return [(event.state, event.reason) for event in ended if isinstance(event.state, PullState)]


def test_epochs_are_read_after_every_page_and_for_exactly_those_pages(pair):
    key, source, target = begin(pair, 4, chunks=2)
    assert [read.of_epochs for read in pair.fabric.reads] == [False, False]
    pair.fabric.reads[1].complete()
    pair.tick()
    assert [read.of_epochs for read in pair.fabric.reads] == [False], "one page read is still out"
    pair.fabric.reads[0].complete()
    pair.tick()
    (epochs,) = pair.fabric.reads
    assert epochs.of_epochs and epochs.remote_pages == source and epochs.local_pages == target
    assert not any(pair.reader.pool.pages.is_writable(page, request(key)) for page in target), "a read is another holder"
    assert of_reader(complete_all(pair)) == [(PullState.READY, 0)]
    pair.reader.pool.release(request(key))
    pair.assert_all_free()


@pytest.mark.parametrize("when", ["before the pages", "between pages and epochs"])
def test_a_page_rewritten_while_it_is_read_is_thrown_away(pair, when):
    key, source, target = begin(pair)
    if when == "between pages and epochs":
        pair.fabric.reads[0].complete()
        pair.tick()
    pair.fabric.on_notify = lambda *_: []  # no notice reaches the reader from here on
    pair.holder.leases.abort(key, common_pb2.LEASE_EXPIRED, "unheard")
    pair.holder.pool.release(request(key))
    again = pair.holder.pool.take(1, request(pair.key()))
    assert again[0] in source
    assert of_reader(complete_all(pair)) == [(PullState.ABORTED, common_pb2.EPOCH_MISMATCH)]
    assert pair.reader.pool.num_available == 8, "nothing of it is used, nothing kept"
    assert not any(page in pair.reader.pool.pages.pages_of(request(key)) for page in target)


def test_an_expired_lease_whose_pages_were_not_rewritten_leaves_the_read_standing(pair):
    key, _, target = begin(pair)
    pair.fabric.on_notify = lambda *_: []
    pair.holder.leases.abort(key, common_pb2.LEASE_EXPIRED, "unheard")
    pair.holder.pool.release(request(key))
    assert pair.holder.pool.num_available == 8
    assert of_reader(complete_all(pair)) == [(PullState.READY, 0)] and pair.arrived(key, target)
    pair.reader.pool.release(request(key))


def test_b24_one_failed_read_of_four_fails_all_and_nothing_is_cached(pair):
    _, _, target = begin(pair, 4, chunks=4)
    done, failed, running, late = list(pair.fabric.reads)
    done.complete()
    failed.copy()
    failed.fail()
    ended = pair.tick()
    assert of_reader(ended) == [(PullState.ABORTED, common_pb2.READ_FAILED)]
    assert all(getattr(event, "handoff", None) is None for event in ended)
    held = {page for page in target if pair.reader.pool.pages.holders_of(page)}
    assert held == set(running.local_pages) | set(late.local_pages), "reads in flight hold their pages, the others are free"
    running.complete()
    late.complete()
    assert pair.tick() == []
    assert pair.reader.pool.match(page_digests([1] * 257), request("probe")) == []
    pair.assert_all_free()


def test_b24_an_unknown_status_is_a_failure():
    from services.kv.nixl_transport import _STATES
    from services.kv.transport import TransferState

    for said in ("ERR", "CANCELLED", "TIMEOUT", "", "NIXL_ERR_NEW"):
        assert _STATES.get(said, TransferState.FAILED) is TransferState.FAILED
    assert set(_STATES.values()) == {TransferState.RUNNING, TransferState.DONE}


@pytest.mark.parametrize("ends", ["complete", "fail"])
def test_b01_a_late_read_keeps_its_pages_from_the_next_request(pair, ends):
    key, _, target = begin(pair, 5)
    (read,) = pair.fabric.reads
    pair.reader.pulls.cancel(key, common_pb2.CANCELLED, "client gone")
    pair.reader.pool.release(request(key))
    pair.tick()
    assert pair.reader.pool.num_available == 3, "B, which needs 5, waits"
    other = pair.reader.pool.take(3, request("b"))
    assert not set(other) & set(target)
    pair.pass_time(READ_LATE_S)
    assert pair.reader.pool.num_quarantined == 5 and pair.fabric.reads == [read], "the handle is not released"
    pair.pass_time(1000, step=50)
    assert pair.reader.pool.num_quarantined == 5, "for ever rather than reused"
    marks = pair.reader.memory.page_bytes_view()[other].copy()
    getattr(read, ends)()
    pair.tick()
    assert (pair.reader.memory.page_bytes_view()[other] == marks).all()
    assert pair.reader.pool.num_quarantined == 0 and pair.fabric.reads == []
    pair.reader.pool.release(request("b"))
    pair.holder.pool.release(request(key))
    pair.assert_all_free()


def test_a_late_read_fails_its_request_at_once_and_closes_the_peer(pair):
    begin(pair, 2)
    waiting = pair.key()
    pair.claim(waiting, 2)
    ended = pair.pass_time(READ_LATE_S)
    assert sorted(of_reader(ended)) == [(PullState.ABORTED, common_pb2.READ_DEADLINE)] * 2, "every pull from that peer"
    peer = pair.holder.instance_id
    assert not pair.reader.transport.has_peer(peer)
    with pytest.raises(HandoffError) as refused:
        pair.reader.pulls.claim(pair.key(), peer)
    assert refused.value.reason == common_pb2.PEER_GONE
    with pytest.raises(HandoffError, match="late"):
        pair.reader.transport.add_peer(pair.holder.transport.metadata())
    pair.fabric.reads[0].complete()  # the peer wakes up: the network heals by itself
    pair.tick()
    pair.reader.transport.add_peer(pair.holder.transport.metadata())
    pair.fabric.hold_reads = False
    again, _, target = begin(pair, 3)
    assert pair.arrived(again, target)
    pair.reader.pool.release(request(again))
    pair.assert_all_free()


def test_a_late_epoch_read_is_quarantined_with_its_landing_words(pair):
    _, _, target = begin(pair, 3)
    pair.fabric.reads[0].complete()
    pair.tick()
    (read,) = pair.fabric.reads
    assert read.of_epochs
    assert of_reader(pair.pass_time(READ_LATE_S)) == [(PullState.ABORTED, common_pb2.READ_DEADLINE)]
    assert {holder.kind for page in target for holder in pair.reader.pool.pages.holders_of(page)} == {HolderKind.QUARANTINE}
    read.complete()
    pair.tick()
    pair.assert_all_free()


def test_b03_a_hundred_aborts_leak_nothing(pair):
    for _ in range(100):
        key, _, _ = begin(pair, 3)
        pair.reader.pulls.cancel(key, common_pb2.CANCELLED, "client gone")
        pair.reader.pool.release(request(key))
        pair.tick()
        assert pair.reader.pool.num_available == 5
        pair.fabric.reads[0].complete()
        pair.tick()
        pair.assert_all_free()
    assert not pair.holder.leases._graves and not pair.reader.transport._reads


def test_b02_a_restarted_peer_is_a_new_instance_and_nothing_of_the_old_one_is_read(pair):
    old = pair.holder
    key, _, _ = begin(pair, 2)
    pair.fabric.kill(old.instance_id)
    pair.ranks.remove(old)
    assert of_reader(pair.tick()) == [(PullState.ABORTED, common_pb2.READ_FAILED)]
    assert not pair.reader.transport.has_peer(old.instance_id)
    pair.holder = pair.rank()
    assert pair.holder.instance_id != old.instance_id
    with pytest.raises(HandoffError):
        pair.reader.pulls.claim(key, old.instance_id)
    pair.fabric.hold_reads = False
    again, _, target = begin(pair, 2)
    assert pair.arrived(again, target)
    pair.reader.pool.release(request(again))
    pair.assert_all_free()


def test_a_read_that_cannot_be_posted_fails_the_request(pair):
    key = pair.key()
    source = pair.compute(key, 2)
    pair.claim(key, 2)
    pair.holder.leases.announce(key, list(enumerate(source)), STATE)
    pair.fabric._members.pop(pair.holder.instance_id)
    assert of_reader(pair.tick()) == [(PullState.ABORTED, common_pb2.READ_FAILED)]
    assert pair.reader.pool.num_available == 8


def test_b55_a_peer_that_differs_is_refused_with_both_values(pair):
    from services.kv.local_transport import LocalTransport
    from services.kv.transport import PeerInfo, encode_peer

    odd = LocalTransport("odd", pair.holder.memory, compatible(num_hidden_layers=3), pair.fabric)
    with pytest.raises(HandoffError, match="num_hidden_layers is 2 here and 3 there") as refused:
        pair.reader.transport.add_peer(odd.metadata())
    assert refused.value.reason == common_pb2.FINGERPRINT_MISMATCH
    assert compatible().fingerprint in str(refused.value) and compatible(num_hidden_layers=3).fingerprint in str(refused.value)
    short = PeerInfo(
        instance_id="short", agent=b"", pages_address=0, epochs_address=0, num_pages=1, page_bytes=64, compatibility=compatible()
    )
    with pytest.raises(HandoffError, match=r"64 there"):
        pair.reader.transport.add_peer(encode_peer(short))
    for blob in (b"", b"\x00", encode_peer(short)[:-4], encode_peer(short).replace(b"short", b"\xff" * 5)):
        with pytest.raises(HandoffError, match="cannot be read") as refused:
            pair.reader.transport.add_peer(blob)
        assert refused.value.reason == common_pb2.PEER_GONE, "a peer's fault: the request is tried with another one"


def test_b55_another_wire_version_is_told_apart_before_its_fields_are_read(pair):
    import msgspec

    with pytest.raises(HandoffError, match=f"wire version is 99 and ours is {WIRE_VERSION}") as refused:
        pair.reader.transport.add_peer(msgspec.msgpack.encode((99, b"fields of the future")))
    assert refused.value.reason == common_pb2.FINGERPRINT_MISMATCH


def test_reads_of_two_requests_end_in_one_turn_one_failed_one_verified(pair):
    """The failed one closes the peer, which ends the other request too: its last read, done in the same turn, must find it gone."""
    first, _, first_target = begin(pair, 2)
    second, _, second_target = begin(pair, 2)
    pair.fabric.reads[1].complete()
    pair.tick()
    assert [read.of_epochs for read in pair.fabric.reads] == [False, True]
    pair.fabric.reads[0].fail()
    pair.fabric.reads[1].complete()
    assert of_reader(pair.tick()) == [(PullState.ABORTED, common_pb2.READ_FAILED)] * 2
    for key in (first, second):
        pair.reader.pool.release(request(key))
    assert pair.reader.pool.num_available == pair.reader.pool.num_pages, f"{first_target} and {second_target} are free"
