"""Steps: who takes part, what is told, how requests end, and that nobody's fault is another's."""
import math
from collections.abc import Callable

import pytest
import torch

from proto.baton.v1 import common_pb2
from services.decode.messages import Failed, Finished, Ready, RequestEvent, StepOut
from services.kv.messages import RequestKey
from services.runtime.errors import EngineError
from tests.decode.rig import EOS, VOCAB, Rig, greedy, mono, next_token

PROMPT = [3 + 7 * i % 240 for i in range(150)]
MakeRig = Callable[..., Rig]


def test_forward_sees_output_tokens_only(rig: Rig) -> None:
    rig.start(PROMPT, greedy(5), handle=1)
    rig.run()
    expected = mono(PROMPT, 5)
    assert [(list(batch.token_ids), list(batch.positions)) for batch in rig.forward.batches] == [
        ([token], [150 + i]) for i, token in enumerate(expected[:4])
    ]
    assert rig.loop.num_forwards == 4 and rig.loop.num_query_tokens == 4


def test_new_request_joins_at_the_next_step(rig: Rig) -> None:
    rig.start(PROMPT, greedy(20), handle=1)
    rig.exchange()
    rig.step()
    rig.start(PROMPT[:70], greedy(20), handle=2)
    rig.exchange()
    rig.step()
    assert [len(batch.token_ids) for batch in rig.forward.batches] == [1, 2]
    assert rig.of(StepOut)[-1].handles == [1, 2]
    rig.run()
    assert rig.tokens(1) == mono(PROMPT, 20) and rig.tokens(2) == mono(PROMPT[:70], 20)


def test_batch_gives_what_single_requests_give(rig: Rig) -> None:
    prompts = [PROMPT[:length] for length in (1, 2, 63, 64, 65, 127, 128, 129)]
    for handle, prompt in enumerate(prompts, 1):
        rig.start(prompt, greedy(70), handle=handle)
    rig.run()
    assert max(len(batch.token_ids) for batch in rig.forward.batches) == 8
    for handle, prompt in enumerate(prompts, 1):
        assert rig.tokens(handle) == mono(prompt, 70), f"prompt of {len(prompt)} tokens"


def test_max_running_is_kept(make_rig: MakeRig) -> None:
    rig = make_rig(max_running=2)
    for handle in (1, 2, 3):
        rig.start(PROMPT[: 10 * handle], greedy(6), handle=handle)
    rig.run()
    assert max(len(batch.token_ids) for batch in rig.forward.batches) == 2
    assert [rig.tokens(handle) for handle in (1, 2, 3)] == [mono(PROMPT[: 10 * handle], 6) for handle in (1, 2, 3)]


def test_one_message_a_step_and_session(rig: Rig) -> None:
    for handle, session in ((1, 1), (2, 2), (3, 1)):
        rig.start(PROMPT[:20], greedy(3), handle=handle, session=session)
    rig.exchange()
    rig.step()
    assert [(event.session, event.handles) for event in rig.of(StepOut)] == [(1, [1, 3]), (2, [2])]
    rig.run()


@pytest.mark.parametrize(("fields", "reason", "expected"), [
    ({"max_tokens": 2}, common_pb2.LENGTH, 2),
    ({"max_tokens": 9, "stop_token_ids": (mono(PROMPT, 1)[0],)}, common_pb2.STOP, 1),
    ({"max_tokens": 9, "stop_token_ids": (mono(PROMPT, 2)[1],)}, common_pb2.STOP, 2),
    ({"max_tokens": 9, "stop_token_ids": (mono(PROMPT, 4)[3],)}, common_pb2.STOP, 4),
])
def test_limits_count_the_first_token(rig: Rig, fields: dict[str, int], reason: int, expected: int) -> None:
    """B07."""
    rig.start(PROMPT, greedy(**fields), handle=1)
    rig.run()
    end = rig.end(1)
    assert isinstance(end, Finished) and (end.reason, end.num_output_tokens) == (reason, expected)
    assert rig.tokens(1) == mono(PROMPT, expected)
    assert rig.loop.num_forwards == expected - 1
    assert rig.events[-1] is end, "no token follows the end"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_ends_unless_ignored(rig: Rig, ignore_eos: bool) -> None:
    rig.forward.row = torch.nn.functional.one_hot(torch.tensor(EOS), VOCAB).float()
    rig.start(PROMPT, greedy(4, ignore_eos=ignore_eos), handle=1)
    rig.run()
    end = rig.end(1)
    assert isinstance(end, Finished)
    expected = (common_pb2.LENGTH, 4, 0) if ignore_eos else (common_pb2.STOP, 2, EOS)
    assert (end.reason, end.num_output_tokens, end.stop_token_id) == expected


def test_first_token_may_be_the_last_even_here(rig: Rig) -> None:
    rig.start(PROMPT, greedy(5), handle=1, source=rig.holder.rank())
    rig.exchange()
    rig.cancel(1)
    spec = rig.spec(PROMPT, greedy(5))
    rig.submit(spec, 2)
    rig.holder.hand_off(spec, rig.kv, first_token=EOS)
    rig.run()
    end = rig.end(2)
    assert isinstance(end, Finished) and (end.reason, end.num_output_tokens) == (common_pb2.STOP, 1)
    assert not rig.forward.batches


def test_longest_sequence_ends_it(make_rig: MakeRig) -> None:
    rig = make_rig(max_model_len=153)
    rig.start(PROMPT, greedy(50), handle=1)
    rig.run()
    end = rig.end(1)
    assert isinstance(end, Finished) and (end.reason, end.num_output_tokens) == (common_pb2.LENGTH, 3)


def test_replay_counts_what_was_sent(rig: Rig) -> None:
    sent = mono(PROMPT, 5)
    rig.start(PROMPT + sent, greedy(9), handle=1, num_output_tokens=5)
    rig.run()
    assert rig.of(Ready, 1)[0].position == 5
    assert rig.tokens(1) == mono(PROMPT, 9)[5:]
    end = rig.end(1)
    assert isinstance(end, Finished) and end.num_output_tokens == 9


STATES = ["claimed", "waiting for pages", "fetching", "verifying", "ready", "running", "finished"]


@pytest.mark.parametrize("by", ["cancel", "session"])
@pytest.mark.parametrize("state", STATES)
def test_cancel_in_every_state_frees_all(make_rig: MakeRig, state: str, by: str) -> None:
    """B03, B27: and the next request starts at the next step."""
    rig = make_rig(num_pages=8, max_running=2)
    if state == "waiting for pages":
        rig.start([4] * 300, greedy(100), handle=9, session=2)
        rig.exchange()
    rig.fabric.hold_reads = state in ("fetching", "verifying")
    spec = rig.spec(PROMPT, greedy(3 if state == "finished" else 50))
    rig.submit(spec, 1)
    if state != "claimed":
        rig.holder.hand_off(spec, rig.kv)
        rig.exchange()
    if state == "verifying":
        rig.fabric.reads[0].complete()
        rig.exchange()
        assert rig.fabric.reads[-1].of_epochs
    if state == "running":
        rig.step()
        rig.step()
    if state == "finished":
        rig.run()
    if by == "cancel":
        rig.cancel(1)
    else:
        rig.lose_session(1)
    rig.step()
    for read in list(rig.fabric.reads):  # the read in flight keeps its pages until it ends
        assert rig.kv.pool.num_available < rig.kv.pool.num_pages
        read.complete()
    rig.fabric.hold_reads = False
    if state == "waiting for pages":
        rig.cancel(9, session=2)
    rig.exchange()
    rig.step()
    assert rig.kv.pool.num_available == 8
    assert not any(isinstance(event, Failed) for event in rig.events), "nobody asked to hear of it"
    num_batches = len(rig.forward.batches)
    rig.start([6] * 10, greedy(2), handle=5, session=3)
    rig.exchange()
    rig.step()
    assert len(rig.forward.batches) == num_batches + 1
    assert rig.tokens(5, session=3) == mono([6] * 10, 2)
    rig.holder.kv.leases.abort(spec.key, common_pb2.CANCELLED, "")
    if state == "claimed":
        rig.exchange()


def test_preempted_is_the_most_recently_admitted_and_replays(make_rig: MakeRig) -> None:
    """B22."""
    rig = make_rig(num_pages=5)
    first, second = PROMPT[:120], [11] * 120
    rig.start(first, greedy(100), handle=1)  # 2 pages and 1; will need 4 in all
    rig.start(second, greedy(20), handle=2)  # 2 pages and 0 left: waits
    rig.exchange()
    assert not rig.of(Ready, 2)
    rig.cancel(2)
    rig.start(second[:60], greedy(100), handle=3)  # 1 page and 1
    for _ in range(80):
        rig.exchange()
        rig.step()
        if rig.of(Failed):
            break
    end = rig.end(3)
    assert isinstance(end, Failed) and end.reason == common_pb2.PREEMPTED
    told = rig.tokens(3)
    assert told == mono(second[:60], len(told))
    rig.start(second[:60] + told, greedy(100), handle=4, num_output_tokens=len(told), num_preemptions=1, key=RequestKey("r3", 0, 1))
    rig.run()
    assert rig.tokens(1) == mono(first, 100)
    assert told + rig.tokens(4) == mono(second[:60], 100)
    assert rig.of(Ready, 4)[0].transfer.num_cached_pages == 1, "of its two final pages one was needed at once, the other stayed cached"


def test_preempted_before_its_first_step(make_rig: MakeRig) -> None:
    rig = make_rig(num_pages=6, max_running=1)
    rig.start(PROMPT[:60], greedy(200), handle=1)
    rig.start([12] * 100, greedy(100), handle=3)
    rig.exchange()
    assert [event.handle for event in rig.of(Ready)] == [1, 3]
    rig.run()
    end = rig.end(3)
    assert isinstance(end, Failed) and end.reason == common_pb2.PREEMPTED and "1 output tokens" in end.message
    assert rig.tokens(1) == mono(PROMPT[:60], 200)


def test_twice_preempted_gets_all_its_pages_and_is_spared(make_rig: MakeRig) -> None:
    rig = make_rig(num_pages=8)
    rig.start(PROMPT[:60], greedy(190), handle=1)  # 4 pages in all, 2 now
    rig.start([11] * 60, greedy(190), handle=2, num_preemptions=2)  # 4 pages at once
    rig.start([12] * 60, greedy(190), handle=3)  # 2 now
    rig.exchange()
    assert [len(request.pages) for request in rig.delivered] == [2, 4, 2]
    rig.run()
    assert rig.tokens(2) == mono([11] * 60, 190) and rig.tokens(1) == mono(PROMPT[:60], 190)
    assert [(event.handle, event.reason) for event in rig.of(Failed)] == [(3, common_pb2.PREEMPTED)]


def test_failed_forward_fails_its_requests_only(rig: Rig) -> None:
    rig.start(PROMPT, greedy(10), handle=1)
    rig.exchange()
    rig.step()
    rig.forward.fail_with = RuntimeError("out of memory")
    rig.step()
    end = rig.end(1)
    assert isinstance(end, Failed) and end.reason == common_pb2.INTERNAL and "out of memory" in end.message
    rig.start(PROMPT, greedy(10), handle=2)
    rig.run()
    assert rig.tokens(2) == mono(PROMPT, 10)


def test_nan_of_one_request_does_not_reach_another(rig: Rig) -> None:
    rig.start(PROMPT, greedy(10), handle=1)
    rig.start([9] * 30, greedy(10), handle=2)
    rig.forward.nan_for = {next_token(PROMPT)}
    rig.run()
    assert isinstance(rig.end(1), Failed) and rig.end(1).reason == common_pb2.INTERNAL
    assert rig.tokens(2) == mono([9] * 30, 10)


def test_deadline_of_a_running_request(rig: Rig) -> None:
    rig.start(PROMPT, greedy(10), handle=1, timeout_s=5.0)
    rig.exchange()
    rig.step()
    rig.clock.now += 6.0
    rig.step()
    assert isinstance(rig.end(1), Failed) and rig.end(1).reason == common_pb2.DEADLINE


def test_penalties_go_on_where_the_holder_stopped(rig: Rig) -> None:
    """B28: constant logits, token 5 = 1.0, token 6 = 0.9; lost state gives 5 5 6, doubled state 5 6 6."""
    rig.forward.row = torch.full((VOCAB,), -10.0)
    rig.forward.row[5], rig.forward.row[6] = 1.0, 0.9
    spec = rig.spec(PROMPT, greedy(4, frequency_penalty=0.2))
    rig.submit(spec, 1)
    rig.holder.hand_off(spec, rig.kv, first_token=5)
    rig.run()
    assert rig.tokens(1) == [5, 6, 5, 6]


def test_min_tokens_counts_the_first_token(rig: Rig) -> None:
    rig.forward.row = torch.zeros(VOCAB)
    rig.forward.row[EOS] = 9.0
    rig.start(PROMPT, greedy(9, min_tokens=3), handle=1)
    rig.run()
    end = rig.end(1)
    assert isinstance(end, Finished) and (end.reason, end.num_output_tokens) == (common_pb2.STOP, 4)


def test_logprobs_of_those_who_ask(rig: Rig) -> None:
    """B62: logits (0, ln 3) give -0.2877 and -1.3863."""
    rig.forward.row = torch.full((VOCAB,), -torch.inf)
    rig.forward.row[5], rig.forward.row[6] = 0.0, math.log(3)
    rig.start(PROMPT, greedy(3, logprobs=2), handle=1)
    rig.start(PROMPT[:5], greedy(3), handle=2)
    rig.start(PROMPT[:6], greedy(3, logprobs=0), handle=3)
    rig.run()
    assert rig.of(Ready, 1)[0].first_token.logprob == -0.5 and rig.of(Ready, 2)[0].first_token.logprob is None
    for event in rig.of(StepOut):
        assert event.logprobs[0] == pytest.approx(-0.2876820724) == event.logprobs[2] and math.isnan(event.logprobs[1])
        assert event.top_ids == [[6, 5], [], []] and event.top_logprobs[0] == pytest.approx([-0.2876820724, -1.3862943611])


def test_no_logprobs_no_columns(rig: Rig) -> None:
    rig.start(PROMPT, greedy(3), handle=1)
    rig.run()
    assert all(event.logprobs == event.top_ids == event.top_logprobs == [] for event in rig.of(StepOut))


def test_handoff_threads_end_is_the_loops_end(rig: Rig) -> None:
    rig.loop.inbox.put(ValueError("a bug"))
    with pytest.raises(EngineError, match="handoff thread"):
        rig.loop.take_waiting()


def test_events_of_a_request_are_in_order(rig: Rig) -> None:
    rig.start(PROMPT, greedy(3), handle=1)
    rig.run()
    kinds: list[type[RequestEvent]] = [type(event) for event in rig.events]
    assert [kind.__name__ for kind in kinds] == ["Claimed", "Ready", "StepOut", "StepOut", "Finished"]
