"""Agent renewal over the local transport: what a fence voids, tells, frees and keeps (B01, B03)."""

import threading

import pytest

from proto.baton.v1 import common_pb2
from services.kv.lease import LeaseEnded, LeaseState
from services.kv.messages import PeerRank
from services.kv.pages import HolderKind
from services.kv.peers import Peers
from services.kv.pull import PullState
from services.kv.puller import PullEnded
from services.kv.rank_kv import RETRY_S, FenceRule
from services.kv.transport import IDLE_S
from services.runtime.errors import ConfigError, EngineError, HandoffError
from services.runtime.telemetry import INCIDENTS
from tests.kv.rig import Clock, Pair, request

LATE_S = 6.0  # beyond 5 s + bytes / 100 MB/s


def peer_rank(kv, address="a:1", rank=0):
    return PeerRank(instance_id=kv.instance_id, address=address, rank=rank, peer=kv.transport.metadata())


def num_renewed() -> float:
    return INCIDENTS.labels("agent renewed", "")._value.get()


def num_not_opened() -> float:
    return INCIDENTS.labels("agent not opened", "")._value.get()


@pytest.fixture
def pair():
    pair = Pair(num_pages=10)
    pair.fabric.hold_reads = True
    return pair


def late_read(pair, num_pages):
    """A hand-off whose page read is late; its request is over."""
    key = pair.key()
    source = pair.compute(key, num_pages)
    target = pair.claim(key, num_pages)
    pair.announce(key, source, chunks=1)
    pair.tick()
    pair.pass_time(LATE_S)
    pair.holder.pool.release(request(key))
    assert pair.reader.pool.num_quarantined == num_pages
    return target


def healthy_read(pair, num_pages):
    """A further holder, the key of a hand-off whose pages are being read from it, and their destinations."""
    other, key = pair.rank(), pair.key()
    source = pair.compute(key, num_pages, at=other)
    target = pair.claim(key, num_pages, other)
    other.leases.announce(key, list(enumerate(source)))
    for kv in (pair.reader, other, pair.reader):
        kv.exchange.tick()
    return other, key, target


def introduce(pair):
    """Everybody meets the reader's new instance, and it them."""
    for other in pair.ranks:
        if other is not pair.reader:
            other.transport.add_peer(pair.reader.transport.metadata())
            pair.reader.transport.add_peer(other.transport.metadata())


@pytest.mark.parametrize(("num_pages", "due"), [(2, False), (3, True)])
def test_a_fence_is_due_beyond_a_share_of_the_pool(pair, num_pages, due):
    late_read(pair, num_pages)
    assert bool(pair.reader.fence_reason()) == due
    if due:
        assert "3 of 10 pages" in pair.reader.fence_reason()


def test_a_fence_is_due_when_a_read_is_late_for_long(pair):
    late_read(pair, 1)
    pair.pass_time(58.0)
    assert pair.reader.fence_reason() == ""
    pair.pass_time(3.0)
    assert "60 s" in pair.reader.fence_reason()


def test_thresholds_can_be_set():
    pair = Pair(num_pages=10)
    pair.reader._fence_rule = FenceRule(share=0.0)
    pair.fabric.hold_reads = True
    late_read(pair, 1)
    assert pair.reader.fence_reason()


def test_a_renewed_agent_frees_quarantine_and_nothing_lands_any_more(pair):
    target = late_read(pair, 4)
    (read,) = pair.fabric.reads
    epochs, former, renewed = pair.reader.memory.epochs.copy(), pair.reader.instance_id, num_renewed()
    assert pair.reader.renew_if_due() == former != pair.reader.instance_id
    assert pair.reader.pool.num_available == 10 and pair.reader.pool.num_quarantined == 0
    assert (pair.reader.memory.epochs == epochs).all(), "epoch words keep their values"
    assert num_renewed() == renewed + 1 and pair.reader.fence_reason() == "" and pair.reader.renew_if_due() == ""
    pages = pair.reader.pool.take(10, request(pair.key()))
    assert set(target) <= set(pages)
    pair.reader.memory.page_bytes_view()[:] = 99
    read.complete()  # the peer wakes
    assert (pair.reader.memory.page_bytes_view() == 99).all()
    pair.reader.check_integrity()


def test_the_renewed_agent_reads_once_both_have_met(pair):
    late_read(pair, 4)
    assert pair.reader.renew_if_due()
    pair.fabric.hold_reads = False
    introduce(pair)
    key = pair.key()
    source = pair.compute(key, 5)
    target = pair.claim(key, 5)
    pair.announce(key, source)
    assert PullState.READY in [event.state for event in pair.tick() if isinstance(event, PullEnded)]
    assert pair.arrived(key, target)
    pair.reader.pool.release(request(key))
    pair.assert_all_free()


def test_every_hand_off_of_the_old_agent_is_void_and_told(pair):
    """As reader: claimed and fetching. As holder: computing and leased. Running requests keep their pages."""
    other = pair.rank()  # holder of two pulls that are no part of the trouble
    claimed, fetching, computing, leased, running = (pair.key() for _ in range(5))
    kept = pair.reader.pool.take(1, request(running))
    late_read(pair, 3)
    pair.fabric.hold_reads = False
    pair.reader.pulls.claim(claimed, other.instance_id)
    other.leases.open(claimed, [pair.reader.instance_id])
    pair.reader.pulls.claim(fetching, other.instance_id)
    pair.begin(fetching, 1)
    other.leases.open(fetching, [pair.reader.instance_id])
    for key in (computing, leased):
        pair.reader.leases.open(key, [other.instance_id])
        other.pulls.claim(key, pair.reader.instance_id)
    pages = pair.reader.pool.take(1, request(leased))
    pair.reader.leases.announce(leased, [(0, pages[0])])
    assert pair.reader.renew_if_due()
    mine = {event.key: (event.state, event.reason) for event in pair.reader.exchange.tick()}
    assert mine == dict.fromkeys((claimed, fetching), (PullState.ABORTED, common_pb2.FENCED)) | dict.fromkeys(
        (computing, leased), (LeaseState.ABORTED, common_pb2.FENCED)
    )
    theirs = other.exchange.tick()
    assert {(event.key, event.reason) for event in theirs} == {(key, common_pb2.FENCED) for key in mine}
    assert {type(event) for event in theirs} == {LeaseEnded, PullEnded}
    for key in (fetching, leased):
        pair.reader.pool.release(request(key))
    assert pair.reader.pool.pages.pages_of(request(running)) == kept
    assert pair.reader.pool.num_available == 9 and len(pair.reader.leases) == len(pair.reader.pulls) == 0
    assert len(other.leases) == len(other.pulls) == 0


def test_healthy_reads_end_first_and_claims_are_refused_meanwhile(pair):
    late_read(pair, 3)
    other, key, target = healthy_read(pair, 2)
    assert pair.reader.pulls.reads.num_healthy == 1
    former = pair.reader.instance_id
    assert pair.reader.renew_if_due() == "" and pair.reader.instance_id == former
    with pytest.raises(HandoffError) as refused:
        pair.reader.pulls.claim(pair.key(), other.instance_id)
    assert refused.value.reason == common_pb2.FENCED
    (ended,) = pair.reader.exchange.tick()
    assert (ended.key, ended.reason) == (key, common_pb2.FENCED)
    pair.reader.pool.release(request(key))
    assert all(pair.reader.pool.pages.holders_of(page) for page in target), "the read still has its pages"
    pair.fabric.reads[-1].complete()
    pair.reader.exchange.tick()
    assert pair.reader.renew_if_due() == former
    assert pair.reader.pool.num_available == 10


def test_a_healthy_read_that_becomes_late_is_fenced_too(pair):
    late_read(pair, 3)
    _, key, _ = healthy_read(pair, 2)
    assert pair.reader.renew_if_due() == ""
    pair.clock.now += LATE_S
    pair.reader.exchange.tick()
    pair.reader.pool.release(request(key))
    assert pair.reader.renew_if_due() and pair.reader.pool.num_available == 10


def test_late_reads_that_end_by_themselves_call_the_fence_off(pair):
    late_read(pair, 3)
    other, _, _ = healthy_read(pair, 1)
    assert pair.reader.renew_if_due() == ""
    pair.fabric.reads[0].complete()  # the late one
    pair.reader.exchange.tick()
    assert pair.reader.renew_if_due() == ""
    pair.reader.pulls.claim(pair.key(), other.instance_id)


def test_a_message_to_the_former_instance_is_never_heard(pair):
    late_read(pair, 3)
    former = pair.reader.instance_id
    assert pair.reader.renew_if_due()
    assert not pair.holder.transport.notify(former, b"x")
    with pytest.raises(HandoffError):
        pair.reader.pulls.claim(pair.key(), pair.holder.instance_id)  # not met anew yet


def test_an_agent_that_cannot_be_opened_is_tried_again_and_all_else_lives_on(pair):
    """The only link is down when the fence is due: pages are free at once, what runs stays, nothing new comes until there is an agent."""
    running, before = pair.key(), num_not_opened()
    kept = pair.reader.pool.take(1, request(running))
    target, (read,) = late_read(pair, 4), pair.fabric.reads
    former, epochs, opens = pair.reader.instance_id, pair.reader.memory.epochs.copy(), pair.reader._open_transport
    tries = []

    def no_device(instance_id):
        tries.append(instance_id)
        raise ConfigError("no such device")

    pair.reader._open_transport = no_device
    assert pair.reader.renew_if_due() == "" and len(tries) == 1 and num_not_opened() == before + 1
    assert pair.reader.pool.num_quarantined == 0 and pair.reader.pool.num_available == 9, "the old agent is gone, and quarantine with it"
    assert "no such device" in pair.reader.fence_reason(), "the turn that tries again takes its time"
    pair.reader.pool.take(9, request(pair.key()))
    pair.reader.memory.page_bytes_view()[:] = 99
    read.complete()
    assert (pair.reader.memory.page_bytes_view()[target] == 99).all(), "nothing of it lands"

    peers, opened = Peers(lambda: pair.reader.transport), pair.key()
    for refused in (lambda: pair.reader.pulls.claim(pair.key(), pair.holder.instance_id), lambda: peers.meet(peer_rank(pair.holder))):
        with pytest.raises(HandoffError) as error:
            refused()
        assert error.value.reason == common_pb2.FENCED
    pair.reader.leases.queue(opened, [pair.holder.instance_id])
    assert [(event.key, event.reason) for event in pair.reader.exchange.tick()] == [(opened, common_pb2.FENCED)]
    assert pair.reader.pool.pages.pages_of(request(running)) == kept and pair.reader.instance_id == former

    assert pair.reader.renew_if_due() == "" and len(tries) == 1, "not before a second has passed"
    pair.clock.now += RETRY_S
    assert pair.reader.renew_if_due() == "" and len(tries) == 2 and num_not_opened() == before + 2
    pair.reader._open_transport, pair.clock.now = opens, pair.clock.now + RETRY_S
    untold = pair.key()
    pair.reader.leases.queue(untold, [pair.holder.instance_id])  # by a thread that came between
    assert pair.reader.renew_if_due() == former != pair.reader.instance_id and pair.reader.fence_reason() == ""
    assert [(event.key, event.reason) for event in pair.reader.exchange.tick()] == [(untold, common_pb2.FENCED)]
    introduce(pair)
    pair.reader.pulls.claim(pair.key(), pair.holder.instance_id)
    assert (pair.reader.memory.epochs >= epochs).all()
    pair.reader.check_integrity()


def test_a_rank_without_an_agent_can_close(pair):
    late_read(pair, 4)

    def no_device(instance_id):
        raise ConfigError("no such device")

    pair.reader._open_transport = no_device
    assert pair.reader.renew_if_due() == ""
    pair.reader.close()


def test_peers_follow_the_renewed_transport(pair):
    peers = Peers(lambda: pair.reader.transport)
    peers.meet(peer_rank(pair.holder))
    late_read(pair, 3)
    assert pair.reader.renew_if_due() and not pair.reader.transport.has_peer(pair.holder.instance_id)
    peers.meet(peer_rank(pair.holder))
    assert pair.reader.transport.has_peer(pair.holder.instance_id)


def test_b54_places_that_nobody_meets_are_forgotten():
    pair, clock = Pair(), Clock()
    peers = Peers(lambda: pair.reader.transport, clock)
    for port in range(50):
        clock.now += IDLE_S / 10
        peers.meet(peer_rank(pair.rank(), f"a:{port}"))
        assert len(peers) <= 12
    assert len(peers) > 5, "those met of late stay"


def test_main_thread_opens_and_announces_while_the_agent_is_renewed(pair):
    """Under the lock it finds either the old table or the new one; whatever it did in the old one is told as FENCED."""
    pair.fabric.hold_reads = False
    stop, failures, opened = threading.Event(), [], set()

    def main() -> None:
        try:
            for _ in range(100_000):
                if stop.is_set():
                    return
                key = pair.key()
                with pair.reader.lock:
                    opened.add(key)
                    (page,) = pair.reader.pool.take(1, request(key))
                    pair.reader.leases.open(key, [pair.holder.instance_id])
                    pair.reader.leases.announce(key, [(0, page)])
                    pair.reader.leases.abort(key, common_pb2.CANCELLED, "over")
                    pair.reader.pool.release(request(key))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=main)
    thread.start()
    ended = []
    for _ in range(20):
        pair.reader.renew_agent()
        ended += pair.reader.exchange.tick()
    stop.set()
    thread.join()
    ended += pair.reader.exchange.tick()
    assert not failures, failures
    assert {event.key for event in ended} == opened, "no end of a lease is lost with its table"
    assert pair.reader.pool.num_available == 10
    pair.reader.check_integrity()


def test_b49_a_closed_transport_is_an_engine_error(pair):
    pair.reader.transport.close()
    with pytest.raises(EngineError, match="closed"):
        pair.reader.exchange.tick()


def test_notifications_are_bounded_in_size_and_number(pair, monkeypatch):
    from services.kv import exchange as module

    monkeypatch.setattr(module, "MAX_NOTIFICATION_BYTES", 1000)
    monkeypatch.setattr(module, "MAX_NOTIFICATIONS_A_TICK", 4)
    monkeypatch.setattr(module, "MAX_INBOX", 10)
    pair.fabric.deliver("x", pair.reader.instance_id, b"x" * 1001)
    pair.reader.exchange.tick()
    assert pair.reader.exchange.num_ignored == 1
    for _ in range(12):
        pair.fabric.deliver("x", pair.reader.instance_id, b"no message")
    for ignored in (1 + 2 + 4, 1 + 2 + 8, 1 + 2 + 10):
        assert pair.reader.exchange.num_ignored == 1 or pair.reader.exchange.pause_s == 0.0
        pair.reader.exchange.tick()
        assert pair.reader.exchange.num_ignored == ignored
    assert {holder.kind for page in range(10) for holder in pair.reader.pool.pages.holders_of(page)} <= {HolderKind.REQUEST}
