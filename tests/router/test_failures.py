"""What fails is tried elsewhere; what was sent is never sent again; nobody waits for somebody who is gone."""

import asyncio
import functools
import time
from pathlib import Path

import grpc
import pytest

from proto.baton.v1 import common_pb2, decode_pb2, generation_pb2, prefill_pb2
from services.router import policy
from tests.router.byte_model import BOS, ids_of
from tests.router.fakes import DecodeSession, FakeDecode, FakePrefill, redirect_refusal, refusal, until
from tests.router.rig import World, failing, running

Recovery = generation_pb2.Recovery
PROMPT = [BOS, *ids_of("hello")]
PATIENCE = 30.0


def dies_after(decode: FakeDecode, num_tokens: int, reason: common_pb2.Reason | None = None) -> None:
    """`decode` serves a first attempt up to `num_tokens` output tokens, then breaks its session (or fails the request with `reason`)."""

    async def serve(session: DecodeSession, submit: decode_pb2.Submit) -> None:
        if submit.key.attempt:
            await decode.decode(session, submit)
            return
        await decode.decode(session, submit, stop_after=num_tokens)
        if reason is None:
            session.end()
        else:
            session.failed(submit, reason)

    decode.serve = serve


def serving_first(world: World) -> tuple[FakeDecode, FakeDecode]:
    """The decode rank that got the first attempt, then the other one."""
    first, second = world.decodes
    return (first, second) if first.submits and first.submits[0].key.attempt == 0 else (second, first)


async def test_replay_after_the_session_broke(tmp_path: Path) -> None:
    """B45: max_tokens 10, decode dies after 4 tokens: 10 tokens in all, no repeat, usage of the original prompt."""
    async with running(tmp_path, decodes=2) as world:
        for decode in world.decodes:
            dies_after(decode, 4)
        world.prefills[0].serve = lambda request: world.prefills[0].reply(request, cached=1 + request.prompt.num_output_tokens)
        answer = await world.generate(max_tokens=10, min_tokens=6, frequency_penalty=0.5, seed=3)
        assert answer.token_ids == ids_of("abcdefghij") and answer.text == "abcdefghij"
        assert answer.finished is not None and answer.finished.reason == common_pb2.LENGTH
        usage = answer.finished.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (6, 10, 1)
        assert answer.finished.timeline.num_retries == 1
        first, second = world.prefills[0].runs
        assert (first.attempt, second.attempt) == (0, 1) and first.request_id == second.request_id
        assert list(second.prompt.token_ids) == PROMPT + ids_of("abcd") and second.prompt.num_output_tokens == 4
        assert second.sampling == first.sampling and second.sampling.max_tokens == 10 and second.sampling.seed == 3
        assert {submit.holder.instance_id for decode in world.decodes for submit in decode.submits} == {"prefill-0"}
        assert [len(decode.submits) for decode in world.decodes] == [1, 1], "the rank that failed is avoided"


@pytest.mark.parametrize("stop", ["DEFG", "DE"])
async def test_stop_buffer_survives_the_replay(tmp_path: Path, stop: str) -> None:
    """B45: "DE" is held back at the moment of death."""
    async with running(tmp_path, decodes=2) as world:
        world.script = ids_of("abcDEFGhij" * 5)
        for decode in world.decodes:
            dies_after(decode, 5, common_pb2.ENGINE_DIED)
        answer = await world.generate(max_tokens=20, stop=[stop])
        assert answer.text == "abc" and answer.token_ids == ids_of("abc" + stop)
        assert answer.finished is not None and answer.finished.stop_string == stop


async def test_death_after_the_last_token_runs_nothing_again(tmp_path: Path) -> None:
    async with running(tmp_path, decodes=2) as world:
        async def serve(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            await world.announced(submit.key.request_id, 0)
            session.ready(submit, world.token(0))
            session.step(submit, 1, [world.token(1), world.token(2)])
            session.end()  # before `finished`

        for decode in world.decodes:
            decode.serve = serve
        answer = await world.generate(max_tokens=3)
        assert answer.token_ids == ids_of("abc") and answer.finished is not None and answer.finished.timeline.num_retries == 0
        assert len(world.prefills[0].runs) == 1


async def test_decode_lost_before_any_token_starts_over(tmp_path: Path) -> None:
    async with running(tmp_path, decodes=2) as world:
        async def silent_prefill(request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillReply:
            if request.attempt == 0:
                await asyncio.Event().wait()
            return await world.prefills[0].reply(request)

        async def serve(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            await until(lambda: bool(world.prefills[0].runs), "prefill is called")
            if submit.key.attempt == 0:
                session.failed(submit, common_pb2.OVERLOADED)
            else:
                await serving_first(world)[1].decode(session, submit)

        world.prefills[0].serve = silent_prefill
        world.prefills[0].serve_redirect = lambda _: asyncio.sleep(0, redirect_refusal(common_pb2.UNKNOWN_REQUEST))
        for decode in world.decodes:
            decode.serve = serve
        answer = await world.generate(max_tokens=4)
        assert answer.token_ids == ids_of("abcd")
        assert world.prefills[0].num_cancelled == 1  # B26, B46: prefill hears of the refusal at once
        assert list(world.prefills[0].runs[1].prompt.token_ids) == PROMPT and world.prefills[0].runs[1].prompt.num_output_tokens == 0
        assert answer.finished is not None and answer.finished.usage.completion_tokens == 4
        first, second = answer.recoveries  # the refused redirect has been paid for: one retry in all
        assert (first.path, first.reason, first.is_free, first.us) == (Recovery.REDIRECT, common_pb2.OVERLOADED, False, 0)
        assert (second.path, second.reason, second.is_free) == (Recovery.RETRY, common_pb2.UNKNOWN_REQUEST, True) and second.us
        assert answer.finished.timeline.num_retries == 1


@pytest.mark.parametrize("how", ["refusal", "status"])
async def test_prefill_failure_is_told_to_decode_and_retried(tmp_path: Path, how: str) -> None:
    """B05."""
    async with running(tmp_path, prefills=2) as world:
        async def fail(request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillReply:
            if request.attempt:
                return await world.prefills[0].reply(request)
            await until(lambda: bool(world.decodes[0].submits), "decode has the claim")
            if how == "status":
                raise RuntimeError("scripted")
            return refusal(common_pb2.ENGINE_DIED)

        for prefill in world.prefills:
            prefill.serve = fail
        answer = await world.generate(max_tokens=4)
        assert answer.token_ids == ids_of("abcd")
        assert [len(prefill.runs) for prefill in world.prefills] == [1, 1]
        cancel = world.decodes[0].cancels[0]
        assert cancel.handle == world.decodes[0].submits[0].handle
        assert cancel.reason == (common_pb2.INTERNAL if how == "status" else common_pb2.ENGINE_DIED)


async def test_prefill_failing_after_ready_is_no_failure(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        async def fail_late(request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillReply:
            world.announce(request)
            await until(lambda: bool(world.decodes[0].submits), "decode has the claim")
            await shown.wait()
            raise RuntimeError("scripted")

        shown = asyncio.Event()
        world.prefills[0].serve = fail_late
        ids: list[int] = []
        async for reply in world.stream(max_tokens=8):
            if reply.HasField("delta"):
                ids += reply.delta.token_ids
                shown.set()
            elif reply.HasField("finished"):
                assert reply.finished.timeline.num_retries == 0
        assert ids == ids_of("abcdefgh") and len(world.prefills[0].runs) == 1


@pytest.mark.parametrize(("reason", "code"), [
    (common_pb2.OVERLOADED, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (common_pb2.INTERNAL, grpc.StatusCode.INTERNAL),
    (common_pb2.READ_FAILED, grpc.StatusCode.UNAVAILABLE),
    (common_pb2.INVALID, grpc.StatusCode.INVALID_ARGUMENT),
])
async def test_retries_end(tmp_path: Path, reason: common_pb2.Reason, code: grpc.StatusCode) -> None:
    """B45: an error, not a clean end; as many attempts as allowed."""
    async with running(tmp_path, retries=2) as world:
        async def serve(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            session.failed(submit, reason)

        world.decodes[0].serve = serve
        world.prefills[0].serve = lambda request: asyncio.sleep(PATIENCE, refusal(common_pb2.INTERNAL))
        with failing(code) as details:
            await world.generate(max_tokens=4)
        assert "scripted" in details[0] and "decode" in details[0]
        assert len(world.decodes[0].submits) == (1 if reason == common_pb2.INVALID else 3)


async def test_preemption_replays_at_no_cost(tmp_path: Path) -> None:
    async with running(tmp_path, retries=0) as world:
        async def serve(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            if submit.num_preemptions < 2:
                await world.decodes[0].decode(session, submit, stop_after=3 + 3 * submit.num_preemptions)
                session.failed(submit, common_pb2.PREEMPTED)
            else:
                await world.decodes[0].decode(session, submit)

        world.decodes[0].serve = serve
        answer = await world.generate(max_tokens=10)
        assert answer.token_ids == ids_of("abcdefghij")
        assert [submit.num_preemptions for submit in world.decodes[0].submits] == [0, 1, 2]
        assert [submit.prompt.num_output_tokens for submit in world.decodes[0].submits] == [0, 3, 6]
        assert answer.finished is not None and answer.finished.timeline.num_retries == 0


async def test_replay_of_the_last_token_needs_no_decode(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        dies_after(world.decodes[0], 9, common_pb2.ENGINE_DIED)
        answer = await world.generate(max_tokens=10)
        assert answer.token_ids == ids_of("abcdefghij") and len(world.decodes[0].submits) == 1
        assert list(world.prefills[0].runs[1].readers) == []


async def test_old_attempt_is_not_heard(tmp_path: Path) -> None:
    """Late words of a failed attempt, under its handle, change nothing."""
    async with running(tmp_path) as world:
        async def serve(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            if submit.key.attempt == 0:
                await world.decodes[0].decode(session, submit, stop_after=3)
                session.failed(submit, common_pb2.READ_FAILED)
                session.step(submit, 3, [world.token(7), world.token(7)])
                session.finished(submit, 5, common_pb2.STOP, 7)
            else:
                await world.decodes[0].decode(session, submit)

        world.decodes[0].serve = serve
        assert (await world.generate(max_tokens=8)).token_ids == ids_of("abcdefgh")
        session = world.router.pool.usable("decode")[0].session
        assert session is not None and session.num_ignored == 2


async def test_gap_in_the_tokens_is_replayed(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        async def serve(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            if submit.key.attempt == 0:
                await world.decodes[0].decode(session, submit, stop_after=3)
                session.step(submit, 4, [world.token(4)])  # token 3 is missing
            else:
                await world.decodes[0].decode(session, submit)

        world.decodes[0].serve = serve
        assert (await world.generate(max_tokens=8)).token_ids == ids_of("abcdefgh")


async def test_gap_in_the_sequence_breaks_the_session(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        async def serve(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            if submit.key.attempt == 0:
                await world.decodes[0].decode(session, submit, stop_after=3)
                session.replies.put_nowait(decode_pb2.SessionReply(sequence=99))
            else:
                await world.decodes[0].decode(session, submit)

        world.decodes[0].serve = serve
        assert (await world.generate(max_tokens=8)).token_ids == ids_of("abcdefgh")
        assert len(world.decodes[0].sessions) == 2


def cooling(world: World) -> set[str]:
    now = time.monotonic()
    states = [*world.router.pool.usable("prefill"), *world.router.pool.usable("decode")]
    return {state.instance_id for state in states if state.cool_down.is_on(now)}


async def test_undialable_prefill_rank_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has joined but nobody listens there: it costs retries once, and not every request; a success ends that."""
    monkeypatch.setattr(policy, "COOL_DOWN_S", 1000.0)
    monkeypatch.setattr(policy, "MAX_COOL_DOWN_S", 1000.0)
    async with running(tmp_path, prefills=2) as world:
        lost, good = world.prefills
        await lost.server.stop(0)
        for _ in range(60):
            assert (await world.generate(max_tokens=3)).text == "abc"
            if cooling(world):
                break
        assert cooling(world) == {lost.instance_id}
        answers = [await world.generate(max_tokens=3) for _ in range(10)]
        assert [answer.finished.timeline.num_retries for answer in answers if answer.finished] == [0] * 10
        await good.leave()
        await until(lambda: world.usable("prefill") == {lost.instance_id}, "the good one leaves")
        with failing(grpc.StatusCode.UNAVAILABLE):  # the only one there: it is tried
            await world.generate(max_tokens=3)
        next(iter(world.router.pool.usable("prefill"))).cool_down.succeeded()
        assert not cooling(world)


@pytest.mark.parametrize("teller", ["prefill", "decode"])
async def test_rank_that_its_peers_cannot_read_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teller: str) -> None:
    """PEER_GONE from one side: the request gets another pair, the other side cools down until it serves again."""
    monkeypatch.setattr(policy, "COOL_DOWN_S", 1000.0)
    monkeypatch.setattr(policy, "MAX_COOL_DOWN_S", 1000.0)
    async with running(tmp_path, prefills=2, decodes=2) as world:
        bad_prefill, bad_decode = world.prefills[0], world.decodes[0]

        async def serve(session: DecodeSession, submit: decode_pb2.Submit, decode: FakeDecode) -> None:
            if teller == "decode" and submit.holder.instance_id == bad_prefill.instance_id:
                session.failed(submit, common_pb2.PEER_GONE)
            else:
                await decode.decode(session, submit)

        async def run(request: prefill_pb2.PrefillRequest, prefill: FakePrefill) -> prefill_pb2.PrefillReply:
            if teller == "prefill" and request.readers[0].instance_id == bad_decode.instance_id:
                return refusal(common_pb2.PEER_GONE)
            return await prefill.reply(request)

        for decode in world.decodes:
            decode.serve = functools.partial(serve, decode=decode)
        for prefill in world.prefills:
            prefill.serve = functools.partial(run, prefill=prefill)
        answers = [await world.generate(max_tokens=3) for _ in range(20)]
        assert {answer.text for answer in answers} == {"abc"}
        assert [answer.finished.timeline.num_retries for answer in answers if answer.finished].count(1) == 1
        assert cooling(world) == {bad_decode.instance_id if teller == "prefill" else bad_prefill.instance_id}


async def test_a_hundred_aborts_cool_nobody_down(tmp_path: Path) -> None:
    """B46."""
    async with running(tmp_path) as world:
        world.prefills[0].serve = lambda request: asyncio.Event().wait()  # type: ignore[assignment,return-value]
        tasks = [asyncio.create_task(world.generate(max_tokens=3)) for _ in range(100)]
        await until(lambda: len(world.prefills[0].runs) == 100, "all are at prefill")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await world.settle()
        assert cooling(world) == set()
        world.prefills[0].serve = world.prefills[0].reply
        assert (await world.generate(max_tokens=3)).text == "abc"
