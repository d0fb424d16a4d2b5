"""Clients that leave, run out of time, stop reading, or are too many."""

import asyncio
import contextlib
from pathlib import Path

import grpc
import pytest

from proto.baton.v1 import common_pb2, decode_pb2
from tests.router.byte_model import BOS, MAX_MODEL_LEN, ids_of
from tests.router.fakes import DecodeSession, refusal, until
from tests.router.rig import failing, running

PROMPT = [BOS, *ids_of("hello")]
PATIENCE = 30.0
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535))  # a client that buffers little, so that writes to it wait


@pytest.mark.parametrize("phase", ["before prefill answers", "after some tokens", "while silent"])
async def test_client_gone_frees_both_sides(tmp_path: Path, phase: str) -> None:
    """B27."""
    async with running(tmp_path) as world:
        prefill, decode = world.prefills[0], world.decodes[0]
        if phase == "before prefill answers":
            prefill.serve = lambda request: asyncio.sleep(PATIENCE, refusal(common_pb2.INTERNAL))

        async def silent(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            await decode.decode(session, submit, stop_after=4)
            await asyncio.Event().wait()

        decode.serve = silent
        async with contextlib.aclosing(world.stream(max_tokens=30)) as replies:
            num_tokens = 0
            async for reply in replies:
                num_tokens += len(reply.delta.token_ids)
                if phase == "before prefill answers" and prefill.runs and decode.submits:
                    break
                if reply.HasField("started") and phase == "before prefill answers":
                    await until(lambda: bool(prefill.runs and decode.submits), "both sides have it")
                    break
                if num_tokens == 4:
                    break
        await until(lambda: bool(decode.cancels), "decode is cancelled")
        assert decode.cancels[0].reason == common_pb2.CANCELLED
        if phase == "before prefill answers":
            await until(lambda: prefill.num_cancelled == 1, "prefill is cancelled")
        decode.serve, prefill.serve = decode.decode, prefill.reply
        assert (await world.generate(max_tokens=3)).text == "abc"  # nothing was learnt against anybody


async def test_deadline(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        world.prefills[0].serve = lambda request: asyncio.sleep(PATIENCE, refusal(common_pb2.INTERNAL))
        with failing(grpc.StatusCode.DEADLINE_EXCEEDED):
            await world.generate(timeout_s=0.5, max_tokens=4)
        at_most_us = 510_000  # half a second, which gRPC rounds up on its way
        assert 0 < world.prefills[0].runs[0].deadline_us <= at_most_us
        assert 0 < world.decodes[0].submits[0].deadline_us <= at_most_us
        await until(lambda: bool(world.decodes[0].cancels) and world.prefills[0].num_cancelled == 1, "both are cancelled")


async def test_no_deadline_is_zero(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await world.generate(max_tokens=2)
        assert world.prefills[0].runs[0].deadline_us == 0


async def test_too_many_requests_get_a_retry_hint(tmp_path: Path) -> None:
    async with running(tmp_path, max_requests=1, max_queued=0) as world:
        world.prefills[0].serve = lambda request: asyncio.sleep(PATIENCE, refusal(common_pb2.INTERNAL))
        async with contextlib.aclosing(world.stream(max_tokens=4)) as replies:
            await anext(replies)
            with failing(grpc.StatusCode.RESOURCE_EXHAUSTED) as details:
                await world.generate(max_tokens=4)
            assert "max_requests" in details[0] and "try again in" in details[0]


async def test_slow_client_is_cancelled_alone(tmp_path: Path) -> None:
    """One client stops reading for good; another one on the same session goes on."""
    async with running(tmp_path, max_model_len=200_000, max_backlog_tokens=50) as world:
        decode = world.decodes[0]

        async def endless(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            if len(submit.prompt.token_ids) == 1:
                await decode.decode(session, submit)
                return
            await world.announced(submit.key.request_id, 0)
            session.ready(submit, world.token(0))
            for index in range(1, 100_000, 20):
                session.step(submit, index, [world.token(1)] * 20)
                await asyncio.sleep(0)

        decode.serve = endless
        async with contextlib.aclosing(world.stream(options=NARROW, prompt=PROMPT, logprobs=1, ignore_eos=True)) as replies:
            await anext(replies)
            await until(lambda: bool(decode.cancels), "the slow client's request is cancelled")
            assert decode.cancels[0].reason == common_pb2.SLOW_CLIENT
            assert (await world.generate(prompt=[BOS], max_tokens=20)).text == "abcdefghijklmnopqrst"
            with failing(grpc.StatusCode.RESOURCE_EXHAUSTED) as details:
                async for _ in replies:
                    pass
            assert "pile up" in details[0]


async def test_message_over_the_limit_is_one_clear_error(tmp_path: Path) -> None:
    """B53: refused before anything is parsed; the next request is fine. 163,840 ids are no such message: validation sees them."""
    async with running(tmp_path) as world:
        unbounded = (("grpc.max_send_message_length", -1),)
        bound = 2**20 + 16 * MAX_MODEL_LEN  # as services/router/server.py makes it
        with failing(grpc.StatusCode.RESOURCE_EXHAUSTED) as details:
            await world.generate(options=unbounded, text="x" * (bound + 1))
        assert str(bound) in details[0]
        with failing(grpc.StatusCode.INVALID_ARGUMENT) as details:
            await world.generate(prompt=[200] * 163_840)
        assert "163840 tokens" in details[0] and "max_model_len 64" in details[0]
        with failing(grpc.StatusCode.INVALID_ARGUMENT):
            await world.generate(stop=["x"] * 100_000)
        assert world.prefills[0].runs == [] and (await world.generate(max_tokens=2)).text == "ab"
