"""`cluster recommend` on a real cluster: one rank each is enough when idle, and too little for a load that saturates both."""

import argparse
import asyncio
import json
from typing import Any

import pytest

from proto.baton.v1 import generation_pb2_grpc
from services.runtime import recommend
from tests.clear import CLEAR
from tests.e2e.conftest import RigFactory
from tests.e2e.rig import Rig, generate

CLIENTS = 16


async def recommended(rig: Rig, said: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    recommend.add_arguments(parser)
    addresses = ",".join(address for _, address in rig.cluster.metrics_targets().values())
    await recommend.main(parser.parse_args(["--metrics", addresses, "--json", *words]))
    return json.loads(said.readouterr().out)


@pytest.mark.slow
def test_more_ranks_under_overload_and_one_each_when_idle(rigs: RigFactory, capsys: pytest.CaptureFixture[str]) -> None:
    rig = rigs(1, 1)
    rig.settle()

    async def under_load() -> dict[str, Any]:
        ended = asyncio.Event()

        async def client(number: int, stub: generation_pb2_grpc.GenerationStub) -> None:
            for turn in range(1000):
                prompt = [10 + (number * 7919 + turn * 104729 + place * place) % 900 for place in range(400)]
                await generate(stub, prompt=prompt, max_tokens=40, ignore_eos=True, seed=number)
                ended.set()

        async with CLEAR.open_channel(rig.address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            clients = [asyncio.create_task(client(number, stub)) for number in range(CLIENTS)]
            try:
                await ended.wait()  # both pools are at work
                return await recommended(rig, capsys, "--window", "4", "--ttft-ms", "200", "--itl-ms", "5")
            finally:
                for task in clients:
                    task.cancel()
                await asyncio.gather(*clients, return_exceptions=True)

    busy = asyncio.run(under_load())
    assert [busy["pools"][role]["ranks"] for role in ("prefill", "decode")] == [1, 1], busy
    assert busy["pools"]["prefill"]["wanted"] > 1 and busy["pools"]["decode"]["wanted"] > 1, busy
    assert busy["measured"]["prefill"]["token_s"] > 0 and busy["measured"]["decode"]["batch"] > 1, busy
    assert busy["command"].startswith("python -m services.runtime.cluster scale prefill=")
    rig.settle()
    idle = asyncio.run(recommended(rig, capsys, "--window", "1"))
    assert [(pool["wanted"], pool["binding"]) for pool in idle["pools"].values()] == [(1, "idle"), (1, "idle")], idle
    assert idle["command"] is None
