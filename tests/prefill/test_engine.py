"""A request's way through the engine: what is computed, announced, told. The pool is proved after every turn and whole after every test."""

from collections.abc import Iterator

import pytest

from proto.baton.v1 import common_pb2
from services.kv.hash import page_digests
from services.kv.layout import PAGE_SIZE
from services.kv.messages import PenaltyCounts
from services.kv.pages import Holder, HolderKind
from services.kv.pull import PullState
from services.prefill.messages import ChoiceDone, LeaseOver, RunDone
from tests.prefill.rig import EOS, VOCAB, Rig, ScriptedForward, next_token


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(num_pages=16, chunk_tokens=128)
    yield made
    made.turn(2)
    made.assert_conserved()
    made.engine.close()


def only(done: RunDone) -> ChoiceDone:
    [choice] = done.choices
    return choice


def wanted(num_tokens: int) -> int:
    """The scripted forward's token for the rig's prompts."""
    return next_token((2 + num_tokens - 1) % VOCAB, num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 127, 128, 129, 300])
def test_without_a_reader_a_prompt_gives_a_token_and_no_lease(rig: Rig, num_tokens: int):
    key = rig.run(num_tokens=num_tokens, read=False, max_tokens=1)
    rig.turn(4)
    [done] = rig.events()
    assert isinstance(done, RunDone) and done.key == key and only(done).token_id == wanted(num_tokens)
    assert only(done).finish_reason == common_pb2.LENGTH and not only(done).leased and only(done).logprob is None
    assert rig.sent == [] and sum(len(chunk.token_ids) for batch in rig.forward.batches for chunk in batch) == num_tokens


def test_pages_are_announced_as_they_become_final(rig: Rig):
    key = rig.run(num_tokens=300)
    rig.turn()
    assert [[page.index for page in each.pages] for each in rig.announcements()] == [[0, 1]]
    rig.turn(2)
    [done] = rig.events()
    assert isinstance(done, RunDone) and only(done).leased and only(done).finish_reason == common_pb2.FINISH_UNSPECIFIED
    announced = rig.announcements()
    assert [each.sequence for each in announced] == [0, 1, 2] and {each.key for each in announced} == {key}
    assert [[page.index for page in each.pages] for each in announced] == [[0, 1], [2, 3], [4]]
    for page in (page for each in announced for page in each.pages):
        assert page.epoch == rig.kv.pool.pages.epoch(page.page) > 0
    assert [each.state is None for each in announced] == [True, True, False]
    state = announced[-1].state
    assert state is not None and state.first_token == only(done).token_id == wanted(300)
    assert (state.num_prompt_tokens, state.num_output_tokens, state.num_cached_tokens) == (300, 1, 0)
    rig.cancel(key)


def test_a_hand_off_frees_its_pages_at_once(rig: Rig):
    key = rig.run(num_tokens=200)
    rig.turn(3)
    assert rig.kv.pool.pages.num_holds(HolderKind.LEASE) == 4 and rig.kv.pool.pages.num_holds(HolderKind.REQUEST) == 0
    pages = rig.claim(key, 200)
    ended = rig.pull()
    assert ended.state is PullState.READY and ended.handoff is not None and ended.handoff.first_token == wanted(200)
    written = ScriptedForward.entries(rig.reader_kv.memory.pages, pages, 200)
    assert written.tolist() == [(2 + i) % VOCAB + 1 for i in range(200)]
    rig.engine.handoffs.tick()  # the thread alone frees: no turn of the main loop is waited for
    assert rig.kv.pool.num_available == 16
    rig.turn()
    done, over = rig.events()
    assert isinstance(done, RunDone) and over == LeaseOver(key, 0, "")


def test_a_reader_pulls_while_later_chunks_compute(rig: Rig):
    rig.kv.transport.add_peer(rig.reader_kv.transport.metadata())
    key = rig.run(num_tokens=512)
    rig.claim(key, 512)
    rig.turn()
    rig.reader_kv.exchange.tick()
    assert rig.reader_kv.transport.stats.num_pages == 2 and rig.engine.scheduler.num_computing == 1
    ended = rig.pull()
    assert ended.state is PullState.READY and ended.stats.num_pages == 8


def test_the_same_prompt_again_computes_what_is_not_cached(rig: Rig):
    for cached in (0, 960):
        key = rig.run(num_tokens=1000, name=f"after {cached}")
        rig.forward.batches.clear()
        rig.turn(10)
        [done] = rig.events()
        assert isinstance(done, RunDone) and done.num_cached_tokens == cached
        assert sum(len(chunk.token_ids) for batch in rig.forward.batches for chunk in batch) == 1000 - cached
        rig.claim(key, 1000)
        assert rig.pull().stats.num_pages == 16
        rig.turn(2)
        rig.events()
        with rig.reader_kv.lock:
            rig.reader_kv.pool.release(Holder(HolderKind.REQUEST, key))
    assert [page.index for page in rig.announcements()[-2].pages] == list(range(15))  # cached pages go out at admission


def test_a_page_that_the_prompt_fills_is_cached_under_the_first_token(rig: Rig):
    rig.run(num_tokens=128, read=False)
    rig.turn(2)
    [done] = rig.events()
    assert isinstance(done, RunDone)
    ids = [(2 + i) % VOCAB for i in range(128)]
    assert all(digest in rig.kv.pool.cache for digest in page_digests([*ids, only(done).token_id])) and len(rig.kv.pool.cache) == 2


def test_a_first_token_that_ends_the_request_leases_nothing(rig: Rig):
    rig.forward.tokens[100] = [9.0 if token == EOS else 0.0 for token in range(VOCAB)]
    key = rig.run(num_tokens=100)
    rig.turn()
    [done] = rig.events()
    assert isinstance(done, RunDone) and only(done).token_id == EOS
    assert only(done).finish_reason == common_pb2.STOP and not only(done).leased
    rig.claim(key, 100)
    ended = rig.pull()
    assert ended.state is PullState.ABORTED and ended.reason == 0  # finished: nothing to pull


@pytest.mark.parametrize(
    ("params", "token", "reason"),
    [
        ({"ignore_eos": True}, EOS, common_pb2.FINISH_UNSPECIFIED),
        ({"min_tokens": 1}, 0, common_pb2.FINISH_UNSPECIFIED),  # EOS is masked: the lowest of the equal rest
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, EOS, common_pb2.STOP),
        ({"max_tokens": 1, "ignore_eos": True}, EOS, common_pb2.LENGTH),
    ],
)
def test_ends_follow_the_requests_own_rules(rig: Rig, params: dict[str, object], token: int, reason: int):
    rig.forward.tokens[10] = [9.0 if token == EOS else 0.0 for token in range(VOCAB)]
    rig.run(num_tokens=10, read=False, **params)
    rig.turn()
    [done] = rig.events()
    assert isinstance(done, RunDone) and (only(done).token_id, only(done).finish_reason) == (token, reason)


def test_a_replay_goes_on_where_the_request_was(rig: Rig):
    """Ten tokens of which three are output: counted by max_tokens, by min_tokens and by the penalties."""
    # the ids are 2 ... 8 | 9, 10, 11: repetition takes the lead from 8
    rig.forward.tokens[10] = [5.0 if token in (8, 20) else 0.0 for token in range(VOCAB)]
    key = rig.run(num_tokens=10, num_output=3, max_tokens=5, repetition_penalty=2.0, logprobs=2)
    rig.turn()
    [done] = rig.events()
    assert isinstance(done, RunDone) and only(done).token_id == 20 and only(done).finish_reason == common_pb2.FINISH_UNSPECIFIED
    assert only(done).top_ids == (8, 20) and only(done).logprob == pytest.approx(only(done).top_logprobs[1])  # of the raw logits
    state = rig.announcements()[-1].state
    assert state is not None and state.num_output_tokens == 4
    assert state.penalties == PenaltyCounts(tuple(range(2, 9)), {9: 1, 10: 1, 11: 1, 20: 1})
    rig.cancel(key)
    rig.turn(2)
    rig.events()
    rig.run(num_tokens=10, name="last", num_output=4, max_tokens=5, read=False)
    rig.turn()
    [done] = rig.events()
    assert isinstance(done, RunDone) and only(done).finish_reason == common_pb2.LENGTH


def test_prompts_share_a_step(rig: Rig):
    for i in range(4):
        rig.run(num_tokens=20 + i, name=f"r{i}", first=i, read=False)
    rig.turn()
    assert [len(batch) for batch in rig.forward.batches] == [4]
    assert [event.key.request_id for event in rig.events()] == ["r0", "r1", "r2", "r3"]  # pyright: ignore[reportAttributeAccessIssue]


def test_load_tells_what_is_queued_and_free(rig: Rig):
    key = rig.run(num_tokens=300)
    rig.turn()
    load = rig.channel.loads[-1]
    assert (load.num_queued_tokens, load.num_running, load.num_running_tokens, load.num_free_pages) == (172, 1, 128, 11)
    rig.turn(2)
    assert len(rig.channel.loads) == 1  # a burst is one report
    rig.now += 1
    rig.turn()
    load = rig.channel.loads[-1]
    assert (load.num_queued_tokens, load.num_running, load.num_leased_pages, load.num_free_pages) == (0, 0, 5, 11)
    rig.cancel(key)


def test_pages_of_one_prompt_hold_its_tokens_in_order(rig: Rig):
    key = rig.run(num_tokens=130)
    rig.turn(2)
    pages = [page.page for each in rig.announcements() for page in each.pages]
    assert len(pages) == -(-130 // PAGE_SIZE)
    assert ScriptedForward.entries(rig.kv.memory.pages, pages, 130).tolist() == [(2 + i) % VOCAB + 1 for i in range(130)]
    rig.cancel(key)


def test_many_requests_leave_nothing_behind(rig: Rig):
    for i in range(200):
        key = rig.run(num_tokens=1 + 7 * i % 200, name=f"r{i}", first=i)
        rig.turn(2)
        if i % 3:
            rig.cancel(key)
        else:
            rig.claim(key, 1 + 7 * i % 200)
            assert rig.pull().state is PullState.READY
            with rig.reader_kv.lock:
                rig.reader_kv.pool.release(Holder(HolderKind.REQUEST, key))
    rig.turn(2)
    rig.assert_conserved()
    assert rig.reader_kv.pool.num_available == 16
