"""A process that stands still is as good as gone, and when it wakes nothing of what it owned is lost."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from proto.baton.v1 import generation_pb2_grpc
from tests.clear import CLEAR
from tests.e2e.rig import Answer, Rig, generate, generate_all, wait_until

STREAMS = 6


@pytest.fixture
def two_decode_fronts(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(1, 1, [], tmp_path)
    try:
        rig.cluster.add_front("decode", 1)
        rig.wait_for_ranks("decode", 2)
        yield rig
    finally:
        rig.close()


@pytest.mark.slow
def test_streams_leave_a_frozen_front_and_its_engine_survives(two_decode_fronts: Rig) -> None:
    rig = two_decode_fronts
    requests = [{"prompt": [0, *range(50 + 7 * i, 120 + 7 * i)], "max_tokens": 400, "seed": i, "ignore_eos": True} for i in range(STREAMS)]
    expected = generate_all(rig.address, requests, at_once=STREAMS)
    rig.settle()  # so that the router knows both ranks as idle
    front, engines = rig.cluster.processes["decode"].pid, rig.cluster.engine_pids("decode")
    frozen: list[int] = []

    def freeze(answer: Answer) -> None:
        if len(answer.token_ids) >= 20 and not frozen:
            os.kill(front, signal.SIGSTOP)
            frozen.append(front)

    async def run() -> list[Answer]:
        async with CLEAR.open_channel(rig.address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            return list(await asyncio.gather(*(generate(stub, freeze, **fields) for fields in requests)))

    try:
        answers = asyncio.run(asyncio.wait_for(run(), 60))  # while the front stands still
    finally:
        os.kill(front, signal.SIGCONT)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert any(answer.end.timeline.num_retries for answer in answers), "nobody was on the frozen front"
    rig.wait_for_ranks("decode", 2)
    rig.settle()
    wait_until(lambda: rig.cluster.engine_pids("decode") == engines, 5, lambda: "a healthy engine was killed when its front woke")
