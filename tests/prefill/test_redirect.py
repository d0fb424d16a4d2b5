"""Another reader for a hand-off, in each of its states: it gets everything, the one before hears REPLACED and counts for nothing more."""

from collections.abc import Iterator

import pytest

from proto.baton.v1 import common_pb2
from services.kv.messages import Done, Ended, Message, Renew, RequestKey, decode, encode
from services.kv.pages import Holder, HolderKind
from services.kv.pull import PullState
from services.kv.rank_kv import RankKv
from services.prefill.messages import Cancel, LeaseOver, Redirect, RedirectDone, RunDone, RunFailed
from tests.prefill.rig import VOCAB, Rig, ScriptedForward, open_kv

STATES = [("queued", 1), ("computing", 2), ("leased", 4)]
NUM_TOKENS = 500


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(num_pages=16, chunk_tokens=128)
    yield made
    made.turn(2)
    made.assert_conserved()
    made.engine.close()


def bring(rig: Rig, turns: int, *, n: int = 1) -> RequestKey:
    """A request in the state that so many turns bring it to; one of QUEUED waits for pages until `release`."""
    with rig.kv.lock:
        rig.kv.pool.take(16 if turns == 1 else 0, Holder(HolderKind.REQUEST, "other"))
    key = rig.run(num_tokens=NUM_TOKENS, n=n)
    rig.turn(turns)
    return key


def release(rig: Rig) -> None:
    with rig.kv.lock:
        rig.kv.pool.release(Holder(HolderKind.REQUEST, "other"))


def attempt(key: RequestKey, number: int) -> RequestKey:
    return RequestKey(key.request_id, key.choice, number)


def told(rig: Rig) -> list[tuple[RequestKey, int]]:
    return [(message.key, message.reason) for message in map(decode, rig.sent) if isinstance(message, Ended)]


def say(rig: Rig, kv: RankKv, message: Message) -> None:
    kv.transport.notify(rig.kv.instance_id, encode(message))


@pytest.mark.parametrize(("state", "turns"), STATES)
@pytest.mark.parametrize("heard_before", [False, True])
def test_the_new_reader_gets_everything_and_the_old_one_counts_no_more(rig: Rig, state: str, turns: int, heard_before: bool):
    old, new = rig.reader_kv, rig.add_reader()
    key = bring(rig, turns)
    second = attempt(key, 1)
    if heard_before:
        with old.lock:
            old.pulls.claim(key, rig.kv.instance_id)  # it waits for pages of its own
        old.exchange.tick()
    events = rig.events()
    assert [type(event) for event in events] == ([RunDone] if state == "leased" else [])
    held = rig.kv.pool.pages.num_holds(HolderKind.LEASE)
    rig.redirect(second, new)
    assert rig.engine.turn()
    assert RedirectDone(second, key, 0, "") in rig.events()
    assert told(rig) == [(key, common_pb2.REPLACED)] and rig.kv.pool.pages.num_holds(HolderKind.LEASE) >= held
    release(rig)
    # What the old reader still says matches nothing any more, but for a renewal, which hears how it ended.
    ignored = rig.kv.leases.num_ignored
    me = {"key": key, "holder": rig.kv.instance_id, "reader": old.instance_id}
    say(rig, old, Done(**me))  # pyright: ignore[reportArgumentType]
    say(rig, old, Ended(**me, reason=common_pb2.READ_FAILED))  # pyright: ignore[reportArgumentType]
    say(rig, old, Done(**me | {"key": second}))  # pyright: ignore[reportArgumentType]
    say(rig, old, Renew(**me, next_sequence=0))  # pyright: ignore[reportArgumentType]
    rig.turn(4)
    assert rig.kv.leases.num_ignored == ignored + 3 and told(rig) == [(key, common_pb2.REPLACED)] * 2
    pages = rig.claim(second, NUM_TOKENS, new)
    ended = rig.pull(new)
    assert ended.state is PullState.READY and ended.key == second and ended.stats.num_pages == 8
    assert ScriptedForward.entries(new.memory.pages, pages, NUM_TOKENS).tolist() == [(2 + i) % VOCAB + 1 for i in range(NUM_TOKENS)]
    rig.turn(2)
    *done, over = rig.events()
    assert over == LeaseOver(second, 0, "")
    if state != "leased":
        [run_done] = done
        assert isinstance(run_done, RunDone) and run_done.key == key, "the Run answers as ever"
        assert [choice.key for choice in run_done.choices] == [second] and run_done.choices[0].leased
    if heard_before:
        [gone] = old.exchange.tick()
        assert gone.state is PullState.ABORTED and gone.reason == common_pb2.REPLACED  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("state", "turns"), STATES)
def test_redirected_twice(rig: Rig, state: str, turns: int):
    first, second = rig.add_reader(), rig.add_reader()
    key = bring(rig, turns)
    rig.redirect(attempt(key, 1), first)
    rig.redirect(attempt(key, 4), second)
    assert rig.engine.turn()
    release(rig)
    rig.turn(4)
    answers = [event for event in rig.events() if isinstance(event, RedirectDone)]
    assert answers == [RedirectDone(attempt(key, 1), key, 0, ""), RedirectDone(attempt(key, 4), attempt(key, 1), 0, "")]
    assert told(rig) == [(key, common_pb2.REPLACED), (attempt(key, 1), common_pb2.REPLACED)]
    rig.claim(attempt(key, 4), NUM_TOKENS, second)
    assert rig.pull(second).state is PullState.READY


@pytest.mark.parametrize(("state", "turns"), STATES)
def test_one_choice_redirected_leaves_the_others(rig: Rig, state: str, turns: int):
    new = rig.add_reader()
    key = bring(rig, turns, n=3)
    middle = RequestKey(key.request_id, 1, 1)
    rig.redirect(middle, new)
    assert rig.engine.turn()
    release(rig)
    rig.turn(4)
    assert told(rig) == [(RequestKey(key.request_id, 1, 0), common_pb2.REPLACED)] and rig.engine.num_leased == 3
    rig.claim(middle, NUM_TOKENS, new)
    assert rig.pull(new).state is PullState.READY
    rig.claim(key, NUM_TOKENS)
    assert rig.pull().state is PullState.READY
    rig.turn(2)
    assert [event.key for event in rig.events() if isinstance(event, LeaseOver)] == [middle, key]
    rig.cancel(RequestKey(key.request_id, 2, 0))


@pytest.mark.parametrize("end", ["released", "expired", "cancelled", "never"])
def test_what_is_here_no_more_is_unknown_and_the_new_reader_hears_it(rig: Rig, end: str):
    new = rig.add_reader()
    key = RequestKey("r", 0, 0)
    if end != "never":
        rig.run(num_tokens=100)
        rig.turn()
    if end == "released":
        rig.claim(key, 100)
        rig.pull()
    elif end == "expired":
        rig.now += 31
        rig.engine.handoffs.tick()
    elif end == "cancelled":
        rig.cancel(key)
    rig.redirect(attempt(key, 1), new)
    with new.lock:
        new.pulls.claim(attempt(key, 1), rig.kv.instance_id)
    rig.turn(2)
    [answer] = [event for event in rig.events() if isinstance(event, RedirectDone)]
    assert (answer.key, answer.former, answer.reason) == (attempt(key, 1), None, common_pb2.UNKNOWN_REQUEST) and "replay" in answer.message
    [ended] = new.exchange.tick()
    assert ended.reason == common_pb2.UNKNOWN_REQUEST


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_attempt_that_is_not_above_is_stale(rig: Rig, number: int):
    new = rig.add_reader()
    key = bring(rig, 4)
    rig.redirect(attempt(key, 2), new)
    rig.turn()
    rig.events()
    rig.redirect(attempt(key, number), rig.reader_kv)
    rig.turn()
    [answer] = rig.events()
    assert isinstance(answer, RedirectDone) and answer.reason == common_pb2.STALE_ATTEMPT and "not above 2" in answer.message
    rig.claim(attempt(key, 2), NUM_TOKENS, new)
    assert rig.pull(new).state is PullState.READY, "the hand-off itself is untouched"


def test_a_run_without_a_reader_has_nothing_to_redirect(rig: Rig):
    key = rig.run(num_tokens=500, read=False)
    rig.turn()
    rig.redirect(attempt(key, 1), rig.add_reader())
    rig.turn(4)
    answer, done = rig.events()
    assert isinstance(answer, RedirectDone) and answer.reason == common_pb2.UNKNOWN_REQUEST and isinstance(done, RunDone)


def test_a_reader_of_another_model_is_refused_and_nothing_changes(rig: Rig):
    key = bring(rig, 4)
    rig.redirect(attempt(key, 1), open_kv(rig.fabric, rig.clock, num_pages=4, revision="another"))
    rig.turn()
    answer = rig.events()[-1]
    assert isinstance(answer, RedirectDone) and answer.reason == common_pb2.FINGERPRINT_MISMATCH and told(rig) == []
    rig.claim(key, NUM_TOKENS)
    assert rig.pull().state is PullState.READY


def test_a_redirect_for_the_agent_before_is_refused(rig: Rig):
    key = bring(rig, 4)
    rig.channel.commands.append(Redirect(key=attempt(key, 1), instance_id="before", reader=rig.reader(rig.add_reader())))
    rig.turn()
    answer = rig.events()[-1]
    assert isinstance(answer, RedirectDone) and answer.reason == common_pb2.FENCED
    rig.cancel(key)


@pytest.mark.parametrize(("state", "turns"), STATES[:2])
@pytest.mark.parametrize("by", ["run", "choice"])
def test_cancelled_after_a_redirect(rig: Rig, state: str, turns: int, by: str):
    new = rig.add_reader()
    key = bring(rig, turns)
    rig.redirect(attempt(key, 1), new)
    assert rig.engine.turn()
    rig.events()
    rig.channel.commands.append(Cancel(key if by == "run" else attempt(key, 1), common_pb2.CANCELLED, "no longer wanted"))
    rig.turn(2)
    assert rig.events() == [RunFailed(key, common_pb2.CANCELLED, "no longer wanted")]
    assert told(rig) == [(key, common_pb2.REPLACED), (attempt(key, 1), common_pb2.CANCELLED)]
    release(rig)
    assert rig.kv.pool.num_available == 16


def test_a_redirected_lease_lives_for_a_whole_ttl_more(rig: Rig):
    new = rig.add_reader()
    key = bring(rig, 4)
    rig.now += 25
    rig.redirect(attempt(key, 1), new)
    rig.turn()
    rig.now += 29
    rig.turn()
    assert rig.engine.num_leased == 1
    rig.now += 2
    rig.turn(2)
    over = rig.events()[-1]
    assert isinstance(over, LeaseOver) and (over.key, over.reason) == (attempt(key, 1), common_pb2.LEASE_EXPIRED)
