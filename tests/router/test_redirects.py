"""A decode rank is lost before it had the pages: another one pulls them, or, when they are not to be had, the prompt runs again."""

import asyncio
import contextlib
import time
from pathlib import Path

import grpc
import pytest

from proto.baton.v1 import common_pb2, decode_pb2, generation_pb2, prefill_pb2
from services.router import legs
from services.router.metrics import RECOVERIES
from services.runtime.telemetry import INCIDENTS
from tests.router.byte_model import ids_of
from tests.router.fakes import DecodeSession, FakeDecode, ScriptEnds, redirect_refusal, refusal, until
from tests.router.rig import Answer, World, failing, running

Path_ = generation_pb2.Recovery
TEXT = "abcdefghijklmnopqrstuvwxyz" * 2


def loses(decode: FakeDecode, phase: str, reason: common_pb2.Reason | None, world: World) -> None:
    """A first attempt at `decode` is lost at `phase`: its session breaks, or it fails with `reason`."""
    async def lose(session: DecodeSession, submit: decode_pb2.Submit) -> None:
        if submit.key.attempt == 0:
            await until(lambda: any(prefill.runs for prefill in world.prefills), "prefill is called")
            if reason is None:
                session.end()
            else:
                session.failed(submit, reason)
            raise ScriptEnds

    decode.hooks[phase] = lose


def held(world: World, answered: asyncio.Event) -> None:
    """Prefill computes until `answered`."""
    prefill = world.prefills[0]

    async def serve(request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillReply:
        await answered.wait()
        return await prefill.reply(request, cached=2)

    prefill.serve = serve


@pytest.mark.parametrize("reason", [common_pb2.ENGINE_DIED, common_pb2.OVERLOADED, common_pb2.DRAINING, common_pb2.FENCED, None])
@pytest.mark.parametrize("is_computing", [True, False])
async def test_another_rank_pulls(tmp_path: Path, reason: common_pb2.Reason | None, is_computing: bool) -> None:
    """Run goes on and answers as ever, whether it has computed the prompt or not; one call of prefill in all."""
    async with running(tmp_path, decodes=2) as world:
        answered = asyncio.Event()
        held(world, answered)
        for decode in world.decodes:
            loses(decode, "claimed", reason, world)
            if not is_computing:
                answered.set()
        counted = RECOVERIES.labels("redirect", common_pb2.Reason.Name(reason or common_pb2.SESSION_LOST))._value.get()
        task = asyncio.create_task(world.generate(max_tokens=20, logprobs=0))
        await until(lambda: len(world.prefills[0].redirects) == 1, "the redirect")
        answered.set()
        answer = await task
        assert answer.token_ids == ids_of(TEXT[:20]) and [token.logprob for token in answer.tokens] == [-0.25 * (i + 1) for i in range(20)]
        (run,), (redirect,) = world.prefills[0].runs, world.prefills[0].redirects
        (submit,) = next(decode.submits for decode in world.decodes if decode.submits[0].key.attempt == 1)
        assert redirect.key == submit.key and redirect.key.request_id == run.request_id and redirect.reader != run.readers[0]
        assert submit.prompt == run.prompt and submit.holder == world.prefills[0].rank and not submit.is_move
        (recovery,) = answer.recoveries
        is_free = reason in (common_pb2.DRAINING, common_pb2.FENCED)
        assert (recovery.path, recovery.reason, recovery.role) == (Path_.REDIRECT, reason or common_pb2.SESSION_LOST, "decode")
        assert recovery.is_free == is_free and recovery.us and answer.finished is not None
        assert answer.finished.timeline.num_retries == (not is_free) and answer.finished.usage.cached_tokens == 2
        after = RECOVERIES.labels("redirect", common_pb2.Reason.Name(recovery.reason))._value.get()
        assert after == counted + 1 and world.prefills[0].num_cancelled == 0


@pytest.mark.parametrize("reason", [common_pb2.UNKNOWN_REQUEST, common_pb2.STALE_INSTANCE, None])
@pytest.mark.parametrize("has_token", [True, False])
async def test_refused_redirect_is_a_retry_or_a_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: common_pb2.Reason | None, has_token: bool
) -> None:
    """`None`: prefill does not answer. The redirected claim goes out within 1 s, the next pair's as soon as the answer is given up.
    It costs what one failure costs, and a holder that was too busy to answer is left alone by this choice only."""
    monkeypatch.setattr(legs, "_REDIRECT_S", 0.4)
    async with running(tmp_path, decodes=2, retries=1) as world:
        answered, shown = asyncio.Event(), asyncio.Event()
        prefill = world.prefills[0]
        if has_token:
            answered.set()

        async def serve(request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillReply:
            if request.attempt == 0:
                await answered.wait()
            return await prefill.reply(request)

        async def refuse(request: prefill_pb2.RedirectRequest) -> prefill_pb2.RedirectReply:
            if reason is None:
                await asyncio.Event().wait()
            return redirect_refusal(reason or common_pb2.INTERNAL)

        failed_at: list[float] = []

        async def lose(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            if submit.key.attempt == 0:
                await (shown.wait() if has_token else until(lambda: bool(prefill.runs), "prefill is called"))
                failed_at.append(time.monotonic())
                session.failed(submit, common_pb2.ENGINE_DIED)
                raise ScriptEnds
            failed_at.append(time.monotonic())
            if submit.key.attempt == 1:
                raise ScriptEnds

        prefill.serve, prefill.serve_redirect = serve, refuse
        for decode in world.decodes:
            decode.hooks["claimed"] = lose
        answer = Answer()
        async with contextlib.aclosing(world.stream(max_tokens=9)) as replies:
            async for reply in replies:
                answer.take(reply)
                if answer.token_ids:
                    shown.set()
        assert answer.token_ids == ids_of(TEXT[:9]) and answer.finished is not None and answer.finished.timeline.num_retries == 1
        redirect, again = answer.recoveries
        assert (redirect.path, redirect.reason, redirect.us, redirect.num_tokens) == (Path_.REDIRECT, common_pb2.ENGINE_DIED, 0, has_token)
        assert (again.path, again.is_free) == (Path_.REPLAY if has_token else Path_.RETRY, True) and again.us
        assert again.reason == (reason or common_pb2.OVERLOADED) and again.role == "prefill"
        assert failed_at[1] - failed_at[0] < 1.0 and failed_at[2] - failed_at[1] < 1.4
        assert prefill.num_cancelled == (not has_token), "the first Run"


async def test_redirects_cost_what_retries_cost(tmp_path: Path) -> None:
    """Every rank is lost in turn: as many tries as retries allow, then the error, at once."""
    async with running(tmp_path, decodes=4, retries=2) as world:
        failed_at = 0.0

        async def lose(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            nonlocal failed_at
            prefill = world.prefills[0]
            await until(lambda: bool(prefill.runs) and len(prefill.redirects) >= submit.key.attempt, "prefill is called")
            failed_at = time.monotonic()
            session.failed(submit, common_pb2.ENGINE_DIED)
            raise ScriptEnds

        for decode in world.decodes:
            decode.hooks["claimed"] = lose
        held(world, asyncio.Event())
        with failing(grpc.StatusCode.UNAVAILABLE) as details:
            await world.generate(max_tokens=9)
        assert "ENGINE_DIED" in details[0] and time.monotonic() - failed_at < 1.0
        assert sum(len(decode.submits) for decode in world.decodes) == 3 and len(world.prefills[0].redirects) == 2
        await until(lambda: world.prefills[0].num_cancelled == 1, "prefill is told")


async def test_nothing_is_redirected_once_decode_has_the_pages(tmp_path: Path) -> None:
    async with running(tmp_path, decodes=2) as world:
        for decode in world.decodes:
            loses(decode, "ready", common_pb2.ENGINE_DIED, world)
        answer = await world.generate(max_tokens=9)
        assert answer.token_ids == ids_of(TEXT[:9])
        assert [recovery.path for recovery in answer.recoveries] in ([Path_.REPLAY], [Path_.RETRY])
        assert world.prefills[0].redirects == [] and len(world.prefills[0].runs) == 2


@pytest.mark.parametrize("is_back", [False, True])
async def test_nothing_is_asked_of_a_prefill_rank_that_left(tmp_path: Path, is_back: bool) -> None:
    """A front that was silent for too long is a new member when it is back: what was called before hangs on a channel that is closed."""
    async with running(tmp_path, prefills=2, decodes=2) as world:
        async def lose(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            if submit.key.attempt == 0:
                holder = next(prefill for prefill in world.prefills if prefill.instance_id == submit.holder.instance_id)
                await until(lambda: bool(holder.runs), "prefill is called")
                await shown.wait()
                world.router.pool.lose(f"front-{holder.instance_id}")
                if is_back:
                    await until(lambda: not world.router.pool._closing, "its channel is closed")
                    world.router.pool.join(holder.member())
                session.failed(submit, common_pb2.ENGINE_DIED)
                raise ScriptEnds

        shown = asyncio.Event()
        for decode in world.decodes:
            decode.hooks["claimed"] = lose
        answer = Answer()
        async with contextlib.aclosing(world.stream(max_tokens=9)) as replies:
            async for reply in replies:
                answer.take(reply)
                if answer.token_ids:
                    shown.set()
        assert answer.token_ids == ids_of(TEXT[:9]) and [recovery.path for recovery in answer.recoveries] == [Path_.REPLAY]
        assert all(prefill.redirects == [] for prefill in world.prefills)


async def test_prefill_that_fails_after_a_redirect_is_retried(tmp_path: Path) -> None:
    async with running(tmp_path, decodes=2) as world:
        prefill = world.prefills[0]

        async def serve(request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillReply:
            if request.attempt == 0:
                await until(lambda: bool(prefill.redirects), "the redirect")
                return refusal(common_pb2.ENGINE_DIED)
            return await prefill.reply(request)

        prefill.serve = serve
        for decode in world.decodes:
            loses(decode, "claimed", common_pb2.ENGINE_DIED, world)
        answer = await world.generate(max_tokens=9)
        assert answer.token_ids == ids_of(TEXT[:9])
        assert [(recovery.path, recovery.role) for recovery in answer.recoveries] == [(Path_.REDIRECT, "decode"), (Path_.RETRY, "prefill")]


async def test_words_of_the_lost_rank_are_counted_and_ignored(tmp_path: Path) -> None:
    """They name attempt 0; the request is at attempt 1."""
    async with running(tmp_path, decodes=2) as world:
        async def lose(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            if submit.key.attempt == 0:
                session.failed(submit, common_pb2.OVERLOADED)
                raise ScriptEnds
            state = decode_pb2.Submit()
            state.CopyFrom(submit)
            state.key.attempt = 0
            session.step(state, 0, [world.token(30)])
            session.ready(state, world.token(31))

        for decode in world.decodes:
            decode.hooks["claimed"] = lose
        ignored = INCIDENTS.labels("message of an old attempt ignored", "")._value.get()
        assert (await world.generate(max_tokens=9)).token_ids == ids_of(TEXT[:9])
        assert INCIDENTS.labels("message of an old attempt ignored", "")._value.get() == ignored + 2


@pytest.mark.parametrize("phase", ["redirect", "claimed", "ready"])
async def test_client_leaves_around_a_redirect(tmp_path: Path, phase: str) -> None:
    async with running(tmp_path, decodes=2) as world:
        reached = asyncio.Event()

        async def stay(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            if submit.key.attempt:
                reached.set()
                await asyncio.Event().wait()

        async def redirect(request: prefill_pb2.RedirectRequest) -> prefill_pb2.RedirectReply:
            reached.set()
            return await asyncio.Event().wait()  # type: ignore[return-value]

        for decode in world.decodes:
            decode.hooks["ready"] = stay
            loses(decode, "claimed", common_pb2.ENGINE_DIED, world)
        if phase == "redirect":
            held(world, asyncio.Event())
            world.prefills[0].serve_redirect = redirect
        elif phase == "claimed":
            held(world, asyncio.Event())
            world.prefills[0].serve_redirect = lambda request: asyncio.sleep(0, (reached.set(), world.redirect(request))[1])
        task = asyncio.create_task(world.generate(max_tokens=9))
        await asyncio.wait_for(reached.wait(), 10)
        task.cancel()
        await asyncio.wait([task])
        await world.settle()
        second = next(decode for decode in world.decodes if decode.submits and decode.submits[0].key.attempt == 1)
        await until(lambda: len(second.cancels) == 1, "the second rank is told")
        await until(lambda: world.prefills[0].num_cancelled == (phase != "ready"), "and prefill")
