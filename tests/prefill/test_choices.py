"""Several choices from one prefill: one computation, a first token, a lease and a last page of its own for each."""

import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from proto.baton.v1 import common_pb2
from services.kv.hash import page_digests
from services.kv.layout import PAGE_SIZE
from services.kv.messages import Ended, PenaltyCounts, RequestKey, decode
from services.kv.pages import Holder, HolderKind
from services.kv.pull import PullState
from services.kv.puller import PullEnded
from services.kv.rank_kv import RankKv
from services.model.params import SamplingParams
from services.model.sampling import RowState, sample
from services.prefill.messages import LeaseOver, RunDone, RunFailed
from tests.prefill.rig import EOS, VOCAB, Rig, ScriptedForward


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(num_pages=16, chunk_tokens=128)
    yield made
    made.turn(2)
    made.assert_conserved()
    made.engine.close()


def script(rig: Rig, num_tokens: int, *, eos: float = -50.0) -> list[float]:
    """Logits that leave a choice to the noise; the same for every test of this length."""
    logits = [random.Random(num_tokens).uniform(0, 2) for _ in range(VOCAB)]
    logits[EOS] = eos
    rig.forward.tokens[num_tokens] = logits
    return logits


def oracle(logits: list[float], num_tokens: int, choice: int) -> int:
    """The token of a choice alone."""
    params = SamplingParams(max_tokens=8, seed=7, temperature=1.0)
    row = RowState(params=params, position=num_tokens, num_output_tokens=0, eos_token_ids=(EOS,), choice=choice)
    return int(sample(torch.tensor([logits]), [row]).token_ids[0])


def keys_of(key: RequestKey, n: int) -> list[RequestKey]:
    return [RequestKey(key.request_id, key.choice + i, key.attempt) for i in range(n)]


def announced(rig: Rig, key: RequestKey) -> list[int]:
    """Pages that were announced to this choice, by their index."""
    pages = {page.index: page.page for each in rig.announcements() if each.key == key for page in each.pages}
    return [pages[index] for index in sorted(pages)]


def pull_all(rig: Rig, readers: Sequence[RankKv], count: int) -> dict[RequestKey, PullEnded]:
    ended: dict[RequestKey, PullEnded] = {}
    for _ in range(30):
        rig.now += 3.0
        rig.turn()
        for kv in readers:
            ended |= {event.key: event for event in kv.exchange.tick() if isinstance(event, PullEnded)}
        if len(ended) == count:
            return ended
    raise AssertionError(f"{len(ended)} of {count} pulls ended")


def told(rig: Rig) -> list[tuple[int, int]]:
    """(reason, choice) of every end that readers were told."""
    return [(message.reason, message.key.choice) for message in map(decode, rig.sent) if isinstance(message, Ended)]


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_each_choice_has_its_token_and_all_pages(rig: Rig, n: int, num_tokens: int):
    logits = script(rig, num_tokens)
    readers = [rig.reader_kv, *(rig.add_reader() for _ in range(n - 1))]
    key = rig.run(num_tokens=num_tokens, n=n, readers=readers, temperature=1.0)
    rig.turn(2)
    [done] = rig.events()
    assert isinstance(done, RunDone) and [choice.key for choice in done.choices] == keys_of(key, n) and all(c.leased for c in done.choices)
    tokens = [oracle(logits, num_tokens, choice) for choice in range(n)]
    assert [choice.token_id for choice in done.choices] == tokens
    assert sum(len(chunk.token_ids) for batch in rig.forward.batches for chunk in batch) == num_tokens, "computed once"
    tables = [announced(rig, choice) for choice in keys_of(key, n)]
    num_pages = -(-num_tokens // PAGE_SIZE)
    assert all(len(table) == num_pages and table[:-1] == tables[0][:-1] for table in tables), "all but the last page are shared"
    assert len({table[-1] for table in tables}) == n, "each choice has a last page of its own"
    assert rig.kv.pool.num_available == 16 - (num_pages - 1) - n
    assert rig.kv.pool.pages.num_holds(HolderKind.LEASE) == n * num_pages and rig.kv.pool.pages.num_holds(HolderKind.REQUEST) == 0
    targets = {choice: rig.claim(choice, num_tokens, kv) for choice, kv in zip(keys_of(key, n), readers, strict=True)}
    ended = pull_all(rig, readers, n)
    for kv, (choice, pages) in zip(readers, targets.items(), strict=True):
        handoff = ended[choice].handoff
        assert handoff is not None and handoff.first_token == tokens[choice.choice], ended[choice]
        assert ScriptedForward.entries(kv.memory.pages, pages, num_tokens).tolist() == [(2 + i) % VOCAB + 1 for i in range(num_tokens)]
    rig.turn(2)
    assert sorted(event.key.choice for event in rig.events() if isinstance(event, LeaseOver) and event.reason == 0) == list(range(n))  # pyright: ignore[reportUnknownMemberType]


def test_choices_differ_and_one_alone_is_the_same(rig: Rig):
    logits = script(rig, 40)
    key = rig.run(num_tokens=40, n=5, read=False, temperature=1.0, max_tokens=1)
    rig.turn()
    [done] = rig.events()
    assert isinstance(done, RunDone)
    together = [choice.token_id for choice in done.choices]
    assert len(set(together)) > 1 and together == [oracle(logits, 40, choice) for choice in range(5)]
    assert not any(choice.leased for choice in done.choices) and rig.sent == []
    for choice in range(5):
        rig.run(num_tokens=40, first_choice=choice, attempt=1, read=False, temperature=1.0, max_tokens=1)
        rig.turn()
        [alone] = rig.events()
        assert isinstance(alone, RunDone) and [c.key for c in alone.choices] == [RequestKey(key.request_id, choice, 1)]
        assert alone.choices[0].token_id == together[choice]


def test_choices_that_end_with_their_first_token_end_alone(rig: Rig):
    logits = script(rig, 100, eos=3.0)
    ending = [choice for choice in range(5) if oracle(logits, 100, choice) == EOS]
    assert 0 < len(ending) < 5, "the script must end some choices and not others"
    key = rig.run(num_tokens=100, n=5, temperature=1.0)
    rig.turn()
    [done] = rig.events()
    assert isinstance(done, RunDone)
    assert [c.key.choice for c in done.choices if not c.leased] == [c.key.choice for c in done.choices if c.finish_reason] == ending
    assert told(rig) == [(0, choice) for choice in ending]
    assert rig.kv.pool.num_available == 16 - 1 - (5 - len(ending)), "copies that nobody needs are free"
    rig.turn()
    assert rig.events() == [] and rig.engine.num_leased == 5 - len(ending)
    for choice in set(range(5)) - set(ending):
        rig.cancel(RequestKey(key.request_id, choice, 0))
    rig.turn(2)
    assert rig.kv.pool.num_available == 16


def test_penalties_count_each_choices_own_token(rig: Rig):
    script(rig, 10)
    key = rig.run(num_tokens=10, n=3, num_output=2, temperature=1.0, repetition_penalty=1.1)
    rig.turn()
    [done] = rig.events()
    assert isinstance(done, RunDone)
    for choice in done.choices:
        [state] = [each.state for each in rig.announcements() if each.key == choice.key]
        expected = {10: 1, 11: 1}
        expected[choice.token_id] = expected.get(choice.token_id, 0) + 1
        assert state is not None and state.penalties == PenaltyCounts(tuple(range(2, 10)), expected)
        rig.cancel(choice.key)
    assert len({choice.token_id for choice in done.choices}) > 1 and key == done.choices[0].key


def test_a_page_that_the_prompt_fills_is_cached_under_each_first_token(rig: Rig):
    script(rig, 128)
    key = rig.run(num_tokens=128, n=4, temperature=1.0)
    rig.turn(2)
    [done] = rig.events()
    assert isinstance(done, RunDone)
    ids = [(2 + i) % VOCAB for i in range(128)]
    tokens = {choice.token_id for choice in done.choices}
    assert len(tokens) > 1 and len(rig.kv.pool.cache) == 1 + len(tokens)
    for choice in done.choices:
        digests = page_digests([*ids, choice.token_id])
        pages = rig.kv.pool.match(digests, Holder(HolderKind.REQUEST, "test"))
        assert len(pages) == 2 and pages[1] in [announced(rig, other)[1] for other in keys_of(key, 4)]
        rig.kv.pool.release(Holder(HolderKind.REQUEST, "test"))
        rig.cancel(choice.key)


def test_copies_that_no_pool_could_hold_are_too_large():
    rig = Rig(num_pages=4, chunk_tokens=64)
    rig.run(num_tokens=150, n=3, name="large")
    key = rig.run(num_tokens=150, n=2, name="fits")
    rig.turn(4)
    failed, done = rig.events()
    assert isinstance(failed, RunFailed) and failed.reason == common_pb2.TOO_LARGE
    assert "150 tokens need 3 pages and 2 copies of the last but this rank has 4" in failed.message
    assert told(rig) == [(common_pb2.TOO_LARGE, choice) for choice in range(3)], "every reader hears it"
    assert isinstance(done, RunDone) and rig.kv.pool.num_available == 0
    for choice in keys_of(key, 2):
        rig.cancel(choice)
    rig.turn(2)
    rig.assert_conserved()


def test_prompt_and_copies_are_admitted_together_or_not_at_all(rig: Rig):
    with rig.kv.lock:
        rig.kv.pool.take(12, other := Holder(HolderKind.REQUEST, "other"))
    key = rig.run(num_tokens=65, n=4)
    rig.turn(3)
    assert rig.engine.scheduler.num_queued == 1 and rig.kv.pool.num_available == 4 and rig.forward.batches == []
    with rig.kv.lock:
        rig.kv.pool.pages.drop(rig.kv.pool.pages.pages_of(other)[:1], other)
    rig.turn()
    assert isinstance(rig.events()[0], RunDone) and rig.kv.pool.num_available == 0
    for choice in keys_of(key, 4):
        rig.cancel(choice)
    rig.turn()
    with rig.kv.lock:
        rig.kv.pool.release(other)


@pytest.mark.parametrize(("state", "turns"), [("queued", 0), ("computing", 1), ("leased", 4)])
def test_cancelling_a_run_ends_every_choice_that_is_not_leased(rig: Rig, state: str, turns: int):  # B27
    other = Holder(HolderKind.REQUEST, "other")
    if state == "queued":
        with rig.kv.lock:
            rig.kv.pool.take(16, other)
    key = rig.run(num_tokens=512, n=3)
    rig.turn(turns or 1)
    rig.events()
    rig.cancel(key)
    rig.turn(2)
    if state == "leased":  # of those the key names one: each lives on its own
        assert rig.events() == [LeaseOver(key, common_pb2.CANCELLED, "no longer wanted")] and told(rig) == [(common_pb2.CANCELLED, 0)]
        assert rig.kv.pool.num_available == 16 - 7 - 2
        for choice in keys_of(key, 3)[1:]:
            rig.cancel(choice)
        rig.turn(2)
        assert sorted(event.key.choice for event in rig.events()) == [1, 2]  # pyright: ignore[reportAttributeAccessIssue]
    else:
        assert rig.events() == [RunFailed(key, common_pb2.CANCELLED, "no longer wanted")]
        assert told(rig) == [(common_pb2.CANCELLED, choice) for choice in range(3)]
    with rig.kv.lock:
        rig.kv.pool.release(other)
    assert rig.kv.pool.num_available == 16


def refuse(rig: Rig, key: RequestKey, reason: int = common_pb2.OVERLOADED) -> None:
    with rig.reader_kv.lock:
        rig.reader_kv.pulls.refuse(key, rig.kv.instance_id, reason, "not here")


@pytest.mark.parametrize(("state", "turns"), [("queued", 0), ("computing", 1), ("leased", 4)])
def test_one_reader_that_refuses_leaves_the_others(rig: Rig, state: str, turns: int):  # B26
    other = Holder(HolderKind.REQUEST, "other")
    if state == "queued":
        with rig.kv.lock:
            rig.kv.pool.take(16, other)
    key = rig.run(num_tokens=512, n=3)
    rig.turn(turns or 1)
    if state == "queued":
        refuse(rig, keys_of(key, 3)[1])
        rig.turn()
        with rig.kv.lock:
            rig.kv.pool.release(other)
    else:
        refuse(rig, keys_of(key, 3)[1])
    rig.turn(4)
    events = rig.events()
    assert isinstance(events[0], RunDone) and len(events[0].choices) == 3  # a replay goes on from its token
    assert [choice.leased for choice in events[0].choices] == [True, state == "leased", True]
    assert events[1:] == ([LeaseOver(keys_of(key, 3)[1], common_pb2.OVERLOADED, "not here")] if state == "leased" else [])
    assert told(rig) == [] and rig.kv.pool.num_available == 16 - 7 - 2
    rig.claim(key, 512)
    assert rig.pull().handoff is not None
    rig.cancel(keys_of(key, 3)[2])


@pytest.mark.parametrize("turns", [1, 2])
def test_a_run_whose_readers_have_all_gone_fails(rig: Rig, turns: int):
    key = rig.run(num_tokens=800, n=3)
    rig.turn(turns)
    for choice, reason in zip(keys_of(key, 3), [common_pb2.OVERLOADED, common_pb2.DRAINING, common_pb2.INVALID], strict=True):
        assert rig.events() == []
        refuse(rig, choice, reason)
        rig.turn()
    assert rig.events() == [RunFailed(key, common_pb2.INVALID, "not here")] and rig.kv.pool.num_available == 16
    assert len(rig.forward.batches) == turns + 2, "no chunk after the last reader was gone"


def test_one_reader_that_dies_costs_its_own_lease_alone(rig: Rig):
    dead = rig.add_reader()
    key = rig.run(num_tokens=200, n=2, readers=[rig.reader_kv, dead])
    rig.turn(2)
    with rig.reader_kv.lock:
        rig.reader_kv.pulls.claim(key, rig.kv.instance_id)  # waits for pages of its own
    for _ in range(11):
        rig.now += 3
        rig.turn()
        rig.reader_kv.exchange.tick()  # renews; the other does not
    [done, over] = rig.events()
    assert isinstance(over, LeaseOver) and (over.key, over.reason) == (keys_of(key, 2)[1], common_pb2.LEASE_EXPIRED)
    assert rig.kv.pool.num_available == 16 - 4, "what the living reader needs, and no copy"
    assert isinstance(done, RunDone)
    rig.cancel(key)


def test_a_key_that_is_here_already_is_refused_and_left_alone(rig: Rig):
    """Two routers would have to draw the same id; the pool must not mix their requests up for that (B43)."""
    key = rig.run(num_tokens=300, n=2)
    rig.turn()
    rig.run(num_tokens=10, first_choice=1, n=2)
    rig.run(num_tokens=10, n=2)
    rig.turn(2)
    refused, again, done = rig.events()
    assert isinstance(refused, RunFailed) and (refused.key.choice, refused.reason) == (1, common_pb2.STALE_ATTEMPT)
    assert isinstance(again, RunFailed) and (again.key.choice, again.reason) == (0, common_pb2.STALE_ATTEMPT)
    assert told(rig) == [(common_pb2.STALE_ATTEMPT, 2)], "choices 0 and 1 are another's"
    assert isinstance(done, RunDone) and done.key == key and all(choice.leased for choice in done.choices)
    for choice in keys_of(key, 2):
        rig.cancel(choice)


def test_a_refusal_that_crosses_the_admission_leaves_no_lease(rig: Rig):
    key = rig.run(num_tokens=100)
    heard = rig.engine.handoffs.take_ended

    def cross() -> list[object]:
        ended = heard()
        refuse(rig, key)
        rig.engine.handoffs.tick()
        return ended  # pyright: ignore[reportReturnType]

    rig.engine.handoffs.take_ended = cross  # pyright: ignore[reportAttributeAccessIssue]
    rig.turn()
    rig.engine.handoffs.take_ended = heard
    rig.turn()
    assert rig.events() == [RunFailed(key, common_pb2.OVERLOADED, "not here")] and len(rig.kv.leases) == 0


@pytest.mark.parametrize(("state", "turns"), [("queued", 1), ("computing", 1), ("leased", 4)])
def test_a_renewed_agent_voids_what_hangs_on_the_old_one(rig: Rig, state: str, turns: int):
    other = Holder(HolderKind.REQUEST, "other")
    with rig.kv.lock:
        rig.kv.pool.take(16 if state == "queued" else 0, other)
    key = rig.run(num_tokens=512, n=2)
    rig.turn(turns)
    unread = rig.run(num_tokens=400, first=9, name="unread", read=False)
    rig.events()
    former = rig.kv.instance_id
    assert rig.kv.renew_agent() == former != rig.kv.instance_id
    with rig.kv.lock:
        rig.kv.pool.release(other)
    num_told = len(rig.sent)
    rig.turn(8)
    *ended, done = rig.events()
    if state == "leased":
        assert [(type(event), event.key, event.reason) for event in ended] == [(LeaseOver, c, common_pb2.FENCED) for c in keys_of(key, 2)]  # pyright: ignore[reportAttributeAccessIssue]
    else:
        [failed] = ended
        assert isinstance(failed, RunFailed) and (failed.key, failed.reason) == (key, common_pb2.FENCED) and former in failed.message
    assert told(rig) == [(common_pb2.FENCED, choice) for choice in range(2)]
    assert len(rig.sent) == num_told, "nobody hears anything of what hung on the old agent"
    assert isinstance(done, RunDone) and done.key == unread, "what nobody reads goes on"
    again = rig.run(num_tokens=100, attempt=1)
    rig.turn()
    rig.reader_kv.transport.add_peer(rig.kv.transport.metadata())
    rig.claim(again, 100)
    assert rig.pull().state is PullState.READY, "the new agent serves"


@pytest.mark.parametrize("chunk", [1, 4])
def test_an_agent_renewed_during_a_forward(rig: Rig, chunk: int):
    """The chunk, perhaps the last, is computed for readers that are void: it is announced to nobody and fails as free to try again."""
    key = rig.run(num_tokens=512, n=2)
    rig.turn(chunk - 1)
    rig.forward.during = lambda: rig.kv.renew_agent() and None
    num_told = len(rig.sent)
    assert rig.engine.turn() and rig.events() == []
    rig.forward.during = lambda: None
    assert [decode(payload).key for payload in rig.sent[num_told:] if not isinstance(decode(payload), Ended)] == []
    rig.turn(2)
    [failed] = rig.events()
    assert isinstance(failed, RunFailed) and failed.reason == common_pb2.FENCED
    assert told(rig) == [(common_pb2.FENCED, choice) for choice in range(2)]
    assert rig.kv.pool.num_available == 16 and key == failed.key


def test_a_run_for_the_agent_before_is_refused_at_no_cost(rig: Rig):
    rig.run(num_tokens=10)
    run = rig.channel.commands.pop()
    rig.channel.commands.append(type(run)(**{field: getattr(run, field) for field in run.__struct_fields__} | {"instance_id": "before"}))
    rig.turn()
    [failed] = rig.events()
    assert isinstance(failed, RunFailed) and failed.reason == common_pb2.FENCED
    assert "before" in failed.message and rig.kv.instance_id in failed.message
