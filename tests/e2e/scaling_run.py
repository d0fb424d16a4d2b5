"""Streams through two routers while pools scale: decode 1 -> 3 -> 1, prefill 2 -> 1 -> 2, through the command a user gives."""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from proto.baton.v1 import generation_pb2, generation_pb2_grpc
from tests.clear import CLEAR
from tests.e2e.rig import Answer, generate
from tests.e2e.up_rig import Up, until_true, up

SETTINGS = ("--prefill", "2", "--decode", "1", "--routers", "2")
NUM_CLIENTS = 6
_NUM_DISTINCT = 24
_EDGES = (1, 63, 64, 65, 130, 300)


def make_requests(seed: int) -> list[dict[str, Any]]:
    """Few distinct ones, so that the oracle is asked but once for each; half greedy, half seeded with filters and penalties."""
    draw = random.Random(seed)
    requests: list[dict[str, Any]] = []
    for index in range(_NUM_DISTINCT):
        ids = [0, *(draw.randrange(3, 4000) for _ in range(_EDGES[index % len(_EDGES)] - 1))]
        fields: dict[str, Any] = {"prompt": ids, "max_tokens": draw.randrange(40, 160), "ignore_eos": True, "temperature": 0.0,
                                  "seed": draw.randrange(2**63)}
        if index % 2:
            fields |= {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.3}
        requests.append(fields)
    return requests


@dataclass
class Load:
    """Clients in a closed loop, each at the next router for each request. A stream that fails is noted, and the loop goes on."""

    routers: Sequence[str]
    requests: Sequence[dict[str, Any]]
    done: list[tuple[dict[str, Any], Answer]] = field(default_factory=list[tuple[dict[str, Any], Answer]])
    failed: list[str] = field(default_factory=list[str])
    stopping: bool = False

    async def run(self) -> None:
        """Until `stopping`, and what runs then has ended."""
        turn = itertools.count()
        channels = [CLEAR.open_channel(address) for address in self.routers]
        stubs = [generation_pb2_grpc.GenerationStub(channel) for channel in channels]
        try:
            await asyncio.gather(*(self._client(turn, stubs) for _ in range(NUM_CLIENTS)))
        finally:
            for channel in channels:
                await channel.close()

    async def _client(self, turn: "itertools.count[int]", stubs: Sequence[Any]) -> None:
        while not self.stopping:
            number = next(turn)
            fields = self.requests[number % len(self.requests)]
            try:
                self.done.append((fields, await generate(stubs[number % len(stubs)], **fields)))
            except grpc.aio.AioRpcError as error:
                self.failed.append(f"{error.code().name}: {error.details()}")

    def served(self, role: str, since: int = 0) -> Counter[str]:
        """Streams by the rank that their timeline names, those that ended after the first `since`."""
        return Counter(getattr(answer.end.timeline, f"{role}_rank") for _, answer in self.done[since:])

    def recoveries(self) -> Counter[str]:
        """Of all streams, by path."""
        name = generation_pb2.Recovery.Path.Name
        return Counter(name(recovery.path) for _, answer in self.done for recovery in answer.end.timeline.recoveries)


@dataclass
class Report:
    """What became of it."""

    load: Load
    steps: dict[str, float] = field(default_factory=dict[str, float])  # seconds that each scale command took


async def run_scaling(folder: Path, seed: int) -> Report:
    """The whole run; that new nodes are used is waited for. `folder` holds its log."""
    async with up(folder, *SETTINGS, UCX_TLS="tcp", UCX_NET_DEVICES="lo") as rig:
        load = Load(rig.routers, make_requests(seed))
        report = Report(load)
        work = asyncio.ensure_future(load.run())
        try:
            await _more_streams(load, work)
            for target in ("decode=3", "decode=1", "prefill=1", "prefill=2"):
                before = rig.serving("prefill") | rig.serving("decode")
                began = time.monotonic()
                await rig.scale(target)
                report.steps[target] = time.monotonic() - began
                assert not work.done(), "the load ended early"
                await _new_are_used(rig, load, work, before)
                await _more_streams(load, work)
        finally:
            load.stopping = True
            await asyncio.wait([work], timeout=120.0)
        work.result()
        await rig.settled()
    return report


async def _more_streams(load: Load, work: "asyncio.Future[None]") -> None:
    wanted = len(load.done) + 2 * NUM_CLIENTS
    await until_true(lambda: len(load.done) >= wanted, "streams end", work)


async def _new_are_used(rig: Up, load: Load, work: "asyncio.Future[None]", before: set[str]) -> None:
    since = len(load.done)
    for role in ("prefill", "decode"):
        new = rig.serving(role) - before
        await until_true(lambda role=role, new=new: new <= load.served(role, since).keys(), f"{new} serve", work)
