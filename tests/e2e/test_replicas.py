"""Two routers in front of the same pools: both know all ranks and how loaded each is, whoever put the load there."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from proto.baton.v1 import generation_pb2, generation_pb2_grpc
from tests.clear import CLEAR
from tests.e2e.rig import Answer, Rig, generate, generate_all
from tests.e2e.test_equality import assert_equal_mono, make_requests
from tests.runtime.waiting import until

LONG = {"prompt": [0, 77, 78, 79], "max_tokens": 1500, "ignore_eos": True, "temperature": 0.0}


@pytest.mark.slow
def test_two_routers_share_pools(tmp_path: Path) -> None:
    rig = Rig(2, 2, [], tmp_path, routers=2)
    try:
        first, second = rig.cluster.routers.values()
        assert _pools(first) == _pools(second)
        answers = _through_both(first, second)
        ranks = set(rig.watcher.serving("decode"))
        served = Counter(answer.end.timeline.decode_rank for answer in answers)
        assert served.keys() == ranks and served.total() == len(answers), served
        assert min(served.values()) >= len(answers) // 4, f"one rank was herded to: {served}"
        asyncio.run(_second_sees_what_first_sent(rig, first, second))
        rig.settle()
    finally:
        rig.close()


def _pools(address: str) -> list[tuple[str, int, str]]:
    async def ask() -> generation_pb2.GetInfoReply:
        async with CLEAR.open_channel(address) as channel:
            return await generation_pb2_grpc.GenerationStub(channel).GetInfo(generation_pb2.GetInfoRequest())

    return [(pool.role, pool.num_ranks, pool.fingerprint) for pool in asyncio.run(ask()).pools]


def _through_both(first: str, second: str) -> list[Answer]:
    """The same number of requests through each at once; each answer equals Mono."""
    async def run() -> list[list[Answer]]:
        work = zip((first, second), requests, strict=True)
        return await asyncio.gather(*(asyncio.to_thread(generate_all, address, some, at_once=8) for address, some in work))

    requests = [make_requests(16, seed) for seed in (31, 32)]
    answers = asyncio.run(run())
    for some, found in zip(requests, answers, strict=True):
        assert_equal_mono(some, found)
    return [answer for found in answers for answer in found]


async def _second_sees_what_first_sent(rig: Rig, first: str, second: str) -> None:
    """Requests through one router keep away from the rank that a stream through the other one runs on."""
    async with CLEAR.open_channel(first) as one, CLEAR.open_channel(second) as other:
        stubs = [generation_pb2_grpc.GenerationStub(channel) for channel in (one, other)]
        long = asyncio.ensure_future(generate(stubs[0], **LONG))

        def busy() -> list[str]:
            return [each for each, load in rig.watcher.loads.items() if load.num_running and rig.watcher.ranks[each].role == "decode"]

        try:
            await until(lambda: len(busy()) == 1, "the long one runs, and is reported")
            short = [await generate(stubs[1], prompt=[0, 80 + i], max_tokens=4, ignore_eos=True, temperature=0.0) for i in range(4)]
            await until(lambda: len(busy()) == 1, "the end of the last short one is reported")
            assert not long.done(), "the long stream was to run all the while"
            rank = rig.watcher.ranks[busy()[0]]
            used = [answer.end.timeline.decode_rank for answer in short]
            # The first may have been sent before the report had come to that router too.
            assert f"{rank.pool_address}/{rank.rank}" not in used[1:], used
        finally:
            long.cancel()
            await asyncio.wait([long])
