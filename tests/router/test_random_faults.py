"""Many requests at once while ranks fail at random: every client gets every token exactly once."""

import asyncio
import random
from pathlib import Path

from proto.baton.v1 import common_pb2, decode_pb2, prefill_pb2
from tests.router.byte_model import ids_of
from tests.router.fakes import DecodeSession, FakeDecode, FakePrefill, refusal
from tests.router.rig import running

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
