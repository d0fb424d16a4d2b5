"""The table of leases alone: queued requests, shared pages, redirects, several readers, bounds, and what is counted."""

import random

import pytest

from proto.baton.v1 import common_pb2
from services.kv import lease
from services.kv.lease import LeaseEnded, LeaseState
from services.kv.messages import Announce, Done, Ended, Renew, RenewAnswer, RequestKey, decode, encode
from services.kv.pages import Holder, HolderKind
from services.runtime.errors import EngineError
from services.runtime.telemetry import INCIDENTS
from tests.kv.rig import STATE, Lossy, Pair, request


@pytest.fixture
def pair():
    return Pair()


def attempt(key, number):
    return RequestKey(key.request_id, key.choice, number)


def incidents(what, reason=""):
    return INCIDENTS.labels(what, reason)._value.get()


def say(pair, kind, key, kv=None, **fields):
    kv = kv or pair.reader
    kv.transport.notify(pair.holder.instance_id, encode(kind(key=key, holder=pair.holder.instance_id, reader=kv.instance_id, **fields)))


def heard(kv):
    """What a reader that runs no pull was told."""
    return [decode(payload) for _, payload in kv.transport.notifications()]


def test_a_queued_request_is_unknown_to_renewals_holds_nothing_and_never_expires(pair):
    key = pair.key()
    pair.holder.leases.queue(key, [pair.reader.instance_id])
    for _ in range(10):
        pair.clock.now += 100
        say(pair, Renew, key, next_sequence=0)
        assert pair.holder.exchange.tick() == []
    assert [message.known for message in heard(pair.reader)] == [False] * 10
    assert pair.holder.leases.state(key) is LeaseState.QUEUED and not pair.holder.leases.is_serving
    say(pair, Done, key)  # nothing was announced: it cannot be done
    assert pair.holder.exchange.tick() == [] and pair.holder.leases.num_ignored == 1
    pair.holder.leases.open(key, [pair.reader.instance_id])
    assert pair.holder.leases.state(key) is LeaseState.COMPUTING
    pair.clock.now += 31
    assert [(ended.key, ended.state) for ended in pair.holder.exchange.tick()] == [(key, LeaseState.EXPIRED)]
    pair.assert_all_free()


def test_only_a_queued_requests_own_reader_may_refuse_it(pair):
    stranger = pair.rank()
    key = pair.key()
    pair.holder.leases.queue(key, [pair.reader.instance_id])
    before = incidents("message to a holder ignored")
    say(pair, Ended, key, stranger, reason=common_pb2.INVALID)
    say(pair, Ended, attempt(key, 1), reason=common_pb2.INVALID)
    for _ in range(1000):  # nobody's requests: they leave nothing behind
        say(pair, Ended, pair.key(), reason=common_pb2.INVALID)
    assert [pair.holder.exchange.tick() for _ in range(5)] == [[]] * 5 and incidents("message to a holder ignored") == before + 1002
    say(pair, Ended, key, reason=common_pb2.OVERLOADED)
    assert pair.holder.exchange.tick() == [LeaseEnded(key, LeaseState.ABORTED, common_pb2.OVERLOADED, "")]
    pair.assert_all_free()


@pytest.mark.parametrize("seed", range(4))
def test_a_shared_page_is_free_when_the_last_choice_has_ended(pair, seed):
    """The prompt's pages have a holder a choice, the last ones one each; ends of every kind, in any order."""
    keys = [RequestKey("request0", choice, 0) for choice in range(4)]
    shared, lasts = pair.holder.pool.take(2, request(keys[0])), pair.holder.pool.take(4, request(keys[0]))
    for key, last in zip(keys, lasts, strict=True):
        pair.holder.leases.open(key, [pair.reader.instance_id])
        pair.holder.leases.announce(key, list(enumerate([*shared, last])), STATE)
    pair.holder.pool.release(request(keys[0]))
    order = random.Random(seed).sample(range(4), 4)
    for ended, choice in enumerate(order):
        assert pair.holder.pool.num_available == 2 + ended
        assert {len(pair.holder.pool.pages.holders_of(page)) for page in shared} == {4 - ended}
        if choice == 0:
            say(pair, Done, keys[choice])
        elif choice == 1:
            say(pair, Ended, keys[choice], reason=common_pb2.READ_FAILED)
        elif choice == 2:
            pair.holder.leases.abort(keys[choice], common_pb2.CANCELLED, "")
        else:
            pair.holder.leases.redirect(keys[choice], attempt(keys[choice], 1), [pair.reader.instance_id])
            say(pair, Done, attempt(keys[choice], 1))
        pair.holder.exchange.tick()
        pair.holder.check_integrity()
    pair.assert_all_free()


@pytest.mark.parametrize("computing", [False, True])
def test_a_redirect_moves_the_pages_without_freeing_them_and_announces_all_again(pair, computing):
    new = pair.rank()
    key = pair.key()
    pages = pair.compute(key, 5)
    pair.holder.leases.announce(key, list(enumerate(pages))[:3])
    if not computing:
        pair.holder.leases.announce(key, list(enumerate(pages))[3:], STATE)
        pair.holder.pool.release(request(key))
    epochs = [pair.holder.pool.pages.epoch(page) for page in pages]
    heard(pair.reader)
    second = attempt(key, 2)
    before = incidents("lease redirected", "REPLACED")
    assert pair.holder.leases.redirect(key, second, [new.instance_id])
    assert incidents("lease redirected", "REPLACED") == before + 1
    pair.holder.check_integrity()
    assert pair.holder.pool.pages.pages_of(Holder(HolderKind.LEASE, second)) == pages[: 3 if computing else 5]
    assert pair.holder.pool.pages.pages_of(Holder(HolderKind.LEASE, key)) == []
    assert pair.holder.exchange.tick() == [], "no end: the pages are promised on"
    assert [(type(each), each.key, each.reason) for each in heard(pair.reader)] == [(Ended, key, common_pb2.REPLACED)]
    if computing:
        pair.holder.leases.announce(second, list(enumerate(pages))[3:], STATE)
        pair.holder.pool.release(request(key))
    announced = heard(new)
    assert [(each.key, each.reader, each.sequence) for each in announced] == [(second, new.instance_id, 0), (second, new.instance_id, 1)]
    named = [(page.index, page.page, page.epoch) for each in announced for page in each.pages]
    assert named == list(zip(range(5), pages, epochs, strict=True))
    assert announced[1].state == STATE
    for kv, ask, kind in ((pair.reader, key, Ended), (new, second, RenewAnswer)):  # renewals serve what was lost
        say(pair, Renew, ask, kv, next_sequence=0)
        pair.holder.exchange.tick()
        [answer] = heard(kv)
        assert isinstance(answer, kind) and getattr(answer, "reason", common_pb2.REPLACED) == common_pb2.REPLACED
    say(pair, Done, second, new)
    assert pair.holder.exchange.tick() == [LeaseEnded(second, LeaseState.RELEASED, 0, "")]
    assert not pair.holder.leases.redirect(second, attempt(key, 3), [new.instance_id]), "released"
    pair.assert_all_free()


def test_a_redirect_while_queued_is_opened_under_the_new_key(pair):
    new = pair.rank()
    key = pair.key()
    pair.holder.leases.queue(key, [pair.reader.instance_id])
    assert pair.holder.leases.redirect(key, attempt(key, 1), [new.instance_id])
    assert pair.holder.leases.state(attempt(key, 1)) is LeaseState.QUEUED and pair.holder.leases.state(key) is None
    say(pair, Ended, key, reason=common_pb2.CANCELLED)  # crossed the redirect
    assert pair.holder.exchange.tick() == []
    pair.holder.leases.open(attempt(key, 1), [new.instance_id])
    pair.holder.leases.finish(attempt(key, 1))
    assert [(each.key, each.reason) for each in heard(new)] == [(attempt(key, 1), 0)]
    pair.holder.exchange.tick()
    pair.assert_all_free()


def test_the_newest_attempt_of_a_choice(pair):
    key = pair.key()
    assert pair.holder.leases.newest(key.request_id, 0) is None
    for number in (3, 9, 5):
        pair.holder.leases.queue(attempt(key, number), [pair.reader.instance_id])
    pair.holder.leases.queue(RequestKey(key.request_id, 1, 11), [pair.reader.instance_id])
    assert pair.holder.leases.newest(key.request_id, 0) == attempt(key, 9)
    pair.holder.leases.abort(attempt(key, 9), common_pb2.CANCELLED, "")
    assert pair.holder.leases.newest(key.request_id, 0) == attempt(key, 5)
    pair.holder.leases.abort_all(common_pb2.FENCED, "agent renewed")
    assert [(ended.key.attempt, ended.reason) for ended in pair.holder.exchange.tick()][1:] == [(n, common_pb2.FENCED) for n in (3, 5, 11)]
    pair.assert_all_free()


@pytest.mark.parametrize("last", ["done", "aborts"])
def test_b56_freed_with_the_last_of_four_readers_and_not_before(pair, last):
    readers = [pair.reader, *(pair.rank() for _ in range(3))]
    key = pair.key()
    pages = pair.holder.pool.take(3, request(key))
    pair.holder.leases.open(key, [kv.instance_id for kv in readers])
    pair.holder.leases.announce(key, list(enumerate(pages)), STATE)
    pair.holder.pool.release(request(key))
    for kv in readers[:3]:
        assert isinstance(heard(kv)[0], Announce)
        for _ in range(2):  # a doubled notice is one reader's all the same
            say(pair, Done, key, kv)
        assert pair.holder.exchange.tick() == [] and pair.holder.pool.num_available == 5
    if last == "done":
        say(pair, Done, key, readers[3])
    else:
        say(pair, Ended, key, readers[3], reason=common_pb2.CANCELLED)
    [ended] = pair.holder.exchange.tick()
    assert ended.state is (LeaseState.RELEASED if last == "done" else LeaseState.ABORTED)
    assert [heard(kv) for kv in readers[:3]] == [[], [], []], "those that are done need no notice"
    pair.assert_all_free()


def test_one_of_four_readers_that_aborts_ends_it_for_all(pair):
    readers = [pair.reader, *(pair.rank() for _ in range(3))]
    key = pair.key()
    pair.holder.leases.open(key, [kv.instance_id for kv in readers])
    say(pair, Done, key, readers[1])
    say(pair, Ended, key, readers[0], reason=common_pb2.READ_FAILED, message="no route")
    assert [ended.reason for ended in pair.holder.exchange.tick()] == [common_pb2.READ_FAILED]
    told = [[(each.reason, each.message) for each in heard(kv)] for kv in readers]
    assert told == [[], [], [(common_pb2.READ_FAILED, "no route")], [(common_pb2.READ_FAILED, "no route")]]
    pair.assert_all_free()


def test_graves_are_bounded_and_the_oldest_give_way(pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease, "MAX_GRAVES", 50)
    before = incidents("end of a lease forgotten early")
    keys = [pair.key() for _ in range(120)]
    for key in keys:
        pair.holder.leases.open(key, [pair.reader.instance_id])
        pair.holder.leases.abort(key, common_pb2.CANCELLED, "")
    pair.holder.leases.refuse(keys[71], [pair.reader.instance_id], common_pb2.OVERLOADED, "again")  # renewed: no longer among the oldest
    assert len(pair.holder.leases._graves) == 50 and incidents("end of a lease forgotten early") == before + 70
    assert list(pair.holder.leases._graves) == [*keys[70:71], *keys[72:], keys[71]]
    pair.holder.exchange.tick()
    heard(pair.reader)
    for key in (keys[0], keys[71], keys[119]):
        say(pair, Renew, key, next_sequence=0)
    pair.holder.exchange.tick()
    forgotten, again, last = heard(pair.reader)
    assert isinstance(forgotten, RenewAnswer) and not forgotten.known
    assert (again.reason, last.reason) == (common_pb2.OVERLOADED, common_pb2.CANCELLED)
    pair.clock.now += 31
    pair.holder.exchange.tick()
    assert not pair.holder.leases._graves and not pair.holder.leases._ended
    pair.assert_all_free()


def test_ends_are_counted_by_kind_and_reason(pair):
    names = [("lease expired", "LEASE_EXPIRED"), ("lease aborted", "DRAINING"), ("lease aborted", "777")]
    before = [incidents(*name) for name in names]
    keys = [pair.key() for _ in range(4)]
    for key in keys:
        pair.holder.leases.open(key, [pair.reader.instance_id])
    pair.holder.leases.abort(keys[1], common_pb2.DRAINING, "")
    pair.holder.leases.abort(keys[2], 777, "a newer peer's reason")
    pair.holder.leases.finish(keys[3])  # no incident
    pair.clock.now += 31
    assert len(pair.holder.exchange.tick()) == 4
    assert [incidents(*name) for name in names] == [count + 1 for count in before]
    pair.assert_all_free()


def test_misuse_is_an_error(pair):
    key = pair.key()
    reader = [pair.reader.instance_id]
    pair.holder.leases.queue(key, reader)
    for misuse in (
        lambda: pair.holder.leases.queue(key, reader),
        lambda: pair.holder.leases.queue(pair.key(), []),
        lambda: pair.holder.leases.announce(key, []),
        lambda: pair.holder.leases.redirect(key, key, reader),
    ):
        with pytest.raises(EngineError):
            misuse()
    pair.holder.leases.abort(key, common_pb2.CANCELLED, "")
    pair.holder.exchange.tick()
    pair.assert_all_free()


@pytest.mark.parametrize("seed", range(6))
def test_redirects_amid_lost_and_doubled_messages_end_with_one_reader_served(pair, seed):
    """Whatever is lost but renewals, the reader of the last attempt gets every page, and nothing stays."""
    rng = random.Random(seed)
    readers = [pair.reader, pair.rank(), pair.rank()]
    Lossy(pair.fabric, lambda message: 1 if isinstance(message, Renew | RenewAnswer) else rng.choice([0, 1, 1, 2]))
    key = pair.key()
    source = pair.compute(key, 4)
    ended = []
    for number, kv in enumerate(readers):
        current = attempt(key, number)
        if number:
            assert pair.holder.leases.redirect(attempt(key, number - 1), current, [kv.instance_id])
        kv.pulls.claim(current, pair.holder.instance_id)
        pair.holder.leases.announce(current, [(number, source[number])])
        ended += pair.pass_time(rng.choice([0.1, 3, 6]), step=0.5)
    pair.holder.leases.announce(current, [(3, source[3])], STATE)
    pair.holder.pool.release(request(key))
    target = kv.pool.take(4, request(current))
    kv.pulls.begin(current, dict(enumerate(target)))
    ended += pair.pass_time(60, step=0.5)
    [ready] = [event for event in ended if getattr(event, "handoff", None) is not None]
    assert ready.key == current and ready.handoff == STATE
    view, original = kv.memory.page_bytes_view(), pair.holder.memory.page_bytes_view()
    assert all((view[mine] == original[theirs]).all() for mine, theirs in zip(target, source, strict=True))
    replaced = [event.reason for event in ended if event.key in (attempt(key, 0), attempt(key, 1))]
    assert len(replaced) == 2 and set(replaced) <= {common_pb2.REPLACED, common_pb2.LEASE_EXPIRED}
    kv.pool.release(request(current))
    pair.assert_all_free()


@pytest.mark.parametrize("how", ["queue", "open", "redirect"])
def test_a_refusal_that_came_before_the_request_ends_it_at_once(pair, how):
    """The router told the reader first, and its refusal was faster: no timer is waited for."""
    former = pair.key()
    key = attempt(former, 1)
    another = pair.rank()
    if how == "redirect":
        pages = pair.compute(former, 2)
        pair.announce(former, pages)
        pair.holder.pool.release(request(former))
    another.pulls.refuse(key, pair.holder.instance_id, common_pb2.OVERLOADED, "full")
    pair.tick()
    if how == "redirect":
        assert pair.holder.leases.redirect(former, key, [another.instance_id])
    else:
        getattr(pair.holder.leases, how)(key, [another.instance_id])
    (ended,) = [event for event in pair.tick() if isinstance(event, LeaseEnded)]
    assert (ended.key, ended.state, ended.reason, ended.message) == (key, LeaseState.ABORTED, common_pb2.OVERLOADED, "full")
    assert len(pair.holder.leases) == 0 and pair.holder.pool.pages.num_free == 8


def test_early_refusals_are_bounded_forgotten_and_count_for_their_own_reader_alone(pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("services.kv.lease.MAX_GRAVES", 3)
    another, keys = pair.rank(), [pair.key() for _ in range(6)]
    for key in keys[:5]:
        another.pulls.refuse(key, pair.holder.instance_id, common_pb2.OVERLOADED, "full")
    pair.tick()
    for key in keys[:3]:  # the first two were forgotten; another reader may have the third
        pair.holder.leases.queue(key, [another.instance_id if key != keys[2] else pair.reader.instance_id])
    assert [pair.holder.leases.state(key) for key in keys[:3]] == [LeaseState.QUEUED] * 3
    pair.pass_time(31.0)
    pair.holder.leases.queue(keys[3], [another.instance_id])
    assert pair.holder.leases.state(keys[3]) is LeaseState.QUEUED
