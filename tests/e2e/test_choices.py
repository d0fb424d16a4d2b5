"""Several choices through the cluster: one prefill for all, each equal to Mono's stream of that choice."""

import asyncio
import random
from collections import defaultdict

import pytest

from proto.baton.v1 import generation_pb2, generation_pb2_grpc
from services.doctor.oracle import Tally, check_stream, demo_reference
from services.model.params import SamplingParams
from tests.clear import CLEAR
from tests.e2e.rig import Rig

N = 4
NUM_OUTPUT = 24


async def choices(address: str, prompt: list[int], **fields: object) -> tuple[dict[int, list[int]], dict[int, generation_pb2.Finished]]:
    """Token ids and the end of each choice."""
    tokens: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, generation_pb2.Finished] = {}
    async with CLEAR.open_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        source = generation_pb2.TokenIds(ids=prompt)
        async for reply in stub.Generate(generation_pb2.GenerateRequest(token_ids=source, n=N, **fields)):  # pyright: ignore[reportArgumentType]
            if reply.HasField("delta"):
                tokens[reply.delta.choice] += reply.delta.token_ids
            elif reply.HasField("finished"):
                ends[reply.finished.choice] = reply.finished
    return tokens, ends


@pytest.mark.parametrize("length", [1, 64, 130])
def test_each_choice_equals_mono(rig: Rig, length: int) -> None:
    """At page edges, so that the last page is private whether the prompt fills it or not."""
    draw = random.Random(length)
    prompt = [0, *(draw.randrange(3, 4000) for _ in range(length - 1))]
    sampling = {"max_tokens": NUM_OUTPUT, "ignore_eos": True, "seed": draw.randrange(2**64), "temperature": 1.0, "frequency_penalty": 0.3}
    print(f"seed {sampling['seed']}")
    tokens, ends = asyncio.run(choices(rig.address, prompt, **sampling))
    assert sorted(tokens) == sorted(ends) == list(range(N)) and len({tuple(ids) for ids in tokens.values()}) > 1
    tally = Tally()
    for choice, ids in tokens.items():
        assert len(ids) == NUM_OUTPUT
        check_stream(demo_reference(), prompt, SamplingParams(**sampling), ids, tally, choice=choice)  # pyright: ignore[reportArgumentType]
    tally.assert_equal()
    assert {len(end.timeline.recoveries) for end in ends.values()} == {0}, "computed once, by one Run for all"
