"""Many requests at once while ranks fail at random: every client gets every token exactly once."""

import asyncio
import functools
import random
from collections import Counter
from pathlib import Path

import pytest

from proto.baton.v1 import common_pb2, decode_pb2, generation_pb2, prefill_pb2
from tests.router.byte_model import ids_of
from tests.router.fakes import DecodeSession, FakeDecode, FakePrefill, ScriptEnds, redirect_refusal, refusal, until
from tests.router.rig import Answer, World, running

SEED = 11
NUM_REQUESTS = 60
FAULTS = (common_pb2.PREEMPTED, common_pb2.ENGINE_DIED, common_pb2.READ_FAILED, common_pb2.EPOCH_MISMATCH, common_pb2.DRAINING)


async def test_random_faults(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    async with running(tmp_path, prefills=2, decodes=3, retries=50) as world:

        def misbehave(decode: FakeDecode) -> None:
            async def serve(session: DecodeSession, submit: decode_pb2.Submit) -> None:
                draw = rng.random()
                if submit.key.attempt >= 4 or draw < 0.3:
                    await decode.decode(session, submit)
                elif draw < 0.4:
                    session.failed(submit, common_pb2.OVERLOADED)
                elif draw < 0.43 and decode is not world.decodes[2]:  # a request without tokens does not wait for an empty pool
                    session.end()
                else:
                    await decode.decode(session, submit, stop_after=submit.prompt.num_output_tokens + rng.randint(1, 12))
                    session.failed(submit, rng.choice(FAULTS))

            decode.serve = serve
            decode.tokens_a_step = rng.randint(1, 3)

        def stumble(prefill: FakePrefill) -> None:
            async def serve(request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillReply:
                if request.attempt < 4 and rng.random() < 0.2:
                    return refusal(common_pb2.INTERNAL)
                return await prefill.reply(request)

            prefill.serve = serve

        for decode in world.decodes:
            misbehave(decode)
        for prefill in world.prefills:
            stumble(prefill)
        lengths = [rng.randint(1, 50) for _ in range(NUM_REQUESTS)]
        stops = [["mno"] if rng.random() < 0.3 else [] for _ in range(NUM_REQUESTS)]
        answers = await asyncio.gather(*(
            world.generate(max_tokens=length, stop=stop, logprobs=0) for length, stop in zip(lengths, stops, strict=True)
        ))
        for answer, length, stop in zip(answers, lengths, stops, strict=True):
            text = ("abcdefghijklmnopqrstuvwxyz" * 4)[:length]
            if stop and "mno" in text:
                assert answer.text == "abcdefghijkl" and answer.token_ids == ids_of("abcdefghijklmno")
            else:
                assert answer.text == text and answer.token_ids == ids_of(text)
            assert [token.logprob for token in answer.tokens] == [-0.25 * (i + 1) for i in range(len(answer.token_ids))]
            assert answer.finished is not None and answer.finished.usage.completion_tokens == len(answer.token_ids)
        num_attempts = sum(len(prefill.runs) for prefill in world.prefills)
        assert num_attempts > NUM_REQUESTS, "nothing failed: this test proved nothing"


class Chaos:
    """Ranks that fail, refuse, drain and come back as a seed says, from the fifth attempt of a choice on only by session."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._rng = world, random.Random(seed)
        self._draining: set[str] = set()
        for decode in world.decodes:
            decode.tokens_a_step, decode.step_s = self._rng.randint(1, 2), 0.01
            decode.serve = functools.partial(self._decode, decode)
            for phase in ("claimed", "granted", "caught_up", "pulled", "moved"):
                decode.hooks[phase] = self._stumble
            decode.hooks["paused"] = functools.partial(self._resume, decode)
        for prefill in world.prefills:
            prefill.serve = functools.partial(self._prefill, prefill)
            prefill.serve_redirect = functools.partial(self._redirect, prefill)

    async def _decode(self, decode: FakeDecode, session: DecodeSession, submit: decode_pb2.Submit) -> None:
        if decode.instance_id in self._draining:
            session.failed(submit, common_pb2.DRAINING)
        elif submit.key.attempt >= 5 or submit.is_move or self._rng.random() < 0.75:
            await decode.decode(session, submit)
        else:
            await decode.decode(session, submit, stop_after=submit.prompt.num_output_tokens + self._rng.randint(1, 12))
            if submit.handle in session.live:
                session.failed(submit, self._rng.choice(FAULTS))

    async def _stumble(self, session: DecodeSession, submit: decode_pb2.Submit) -> None:
        if submit.key.attempt < 5 and self._rng.random() < 0.08:
            session.failed(submit, self._rng.choice((*FAULTS, common_pb2.OVERLOADED, common_pb2.FENCED)))
            raise ScriptEnds
        await asyncio.sleep(self._rng.choice((0.0, 0.0, 0.003)))

    async def _resume(self, decode: FakeDecode, session: DecodeSession, submit: decode_pb2.Submit) -> None:
        if self._rng.random() < 0.2:
            decode.sources[submit.handle].resume(common_pb2.DEADLINE)

    async def _prefill(self, prefill: FakePrefill, request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillReply:
        await asyncio.sleep(self._rng.choice((0.0, 0.005)))
        if request.attempt < 5 and self._rng.random() < 0.15:
            return refusal(self._rng.choice((common_pb2.INTERNAL, common_pb2.ENGINE_DIED)))
        return await prefill.reply(request)

    async def _redirect(self, prefill: FakePrefill, request: prefill_pb2.RedirectRequest) -> prefill_pb2.RedirectReply:
        return redirect_refusal(common_pb2.UNKNOWN_REQUEST) if self._rng.random() < 0.2 else self._world.redirect(request)

    async def drain(self) -> None:
        """One rank after another drains, then its engine starts anew; until cancelled."""
        while True:
            await asyncio.sleep(0.01)
            decode = self._rng.choice(self._world.decodes)
            if not decode.sessions or decode.instance_id not in self._world.usable("decode"):
                continue
            self._draining.add(decode.instance_id)
            decode.drain()
            give_up_at = asyncio.get_running_loop().time() + self._rng.choice((0.02, 2.0, 2.0))
            while decode.sessions[-1].live and asyncio.get_running_loop().time() < give_up_at:
                await asyncio.sleep(0.005)
            self._draining.discard(decode.instance_id)
            decode.sessions[-1].end()
            await until(lambda decode=decode: decode.instance_id in self._world.usable("decode"), "it is back")  # type: ignore[misc]


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_every_path_at_random(tmp_path: Path, seed: int) -> None:
    """Each client has each token once, in order, whatever failed, moved or was redirected on the way; nothing is left anywhere."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with running(tmp_path, prefills=2, decodes=4, retries=50) as world:
        chaos = Chaos(world, seed)
        draining = asyncio.create_task(chaos.drain())
        requests = [(rng.choice((1, 1, 3)), rng.randint(1, 54), ["mno"] if rng.random() < 0.2 else []) for _ in range(40)]
        answers: list[Answer] = []
        try:
            for start in range(0, len(requests), 20):
                answers += await asyncio.gather(*(
                    world.generate(n=n, max_tokens=length, stop=stop, logprobs=0) for n, length, stop in requests[start : start + 20]
                ))
        finally:
            draining.cancel()
        paths: Counter[str] = Counter()
        for answer, (n, length, stop) in zip(answers, requests, strict=True):
            assert len(answer.choices) == n
            for number, choice in enumerate(answer.choices):
                text = ("abcdefghijklmnopqrstuvwxyz" * 4)[number : number + length]
                is_cut = bool(stop) and "mno" in text
                ids = ids_of(text[: text.index("mno") + 3] if is_cut else text)
                assert choice.text == (text[: text.index("mno")] if is_cut else text) and choice.token_ids == ids
                assert [token.logprob for token in choice.tokens] == [-0.25 * (i + 1) for i in range(len(ids))]
                assert choice.finished is not None and choice.finished.usage.completion_tokens == len(ids)
                assert choice.finished.timeline.num_retries == sum(not recovery.is_free for recovery in choice.recoveries)
                paths.update(generation_pb2.Recovery.Path.Name(recovery.path) for recovery in choice.recoveries if recovery.us)
        print(paths)
        assert set(paths) == {"RETRY", "REDIRECT", "REPLAY", "MOVE"}, "a path that never ran proves nothing"


async def test_nothing_grows_over_many_requests(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        async def batch() -> None:
            await asyncio.gather(*(world.generate(max_tokens=3) for _ in range(50)))

        await batch()
        await world.settle()
        num_tasks = len(asyncio.all_tasks())
        for _ in range(6):
            await batch()
        await world.settle()
        for _ in range(200):  # finished tasks leave within a few turns of the loop
            if len(asyncio.all_tasks()) <= num_tasks:
                break
            await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks()) <= num_tasks
        session = world.router.pool.usable("decode")[0].session
        assert session is not None and session.num_ignored == 0
