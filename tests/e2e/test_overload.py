"""One tenant floods a small cluster while another one sends a few requests."""

import asyncio
from collections.abc import Callable

import grpc.aio
import pytest

from proto.baton.v1 import generation_pb2, generation_pb2_grpc
from services.runtime.config import SecuritySection
from services.runtime.security import Security
from tests.e2e.rig import Rig

MAX_RUNNING, MAX_QUEUED = 4, 8
NUM_FLOOD, NUM_FEW = 24, 4  # a few = half the queue, a share of two tenants
NUM_OUTPUT = 24


class Crowd:
    """Clients that try again when they are told to."""

    def __init__(self, stub: generation_pb2_grpc.GenerationStub) -> None:
        self._stub = stub
        self.starts: list[str] = []  # tenants, in the order in which the router let them in
        self.hints_ms: dict[str, list[int]] = {"flood": [], "few": []}
        self.details: set[str] = set()
        self.may_retry = asyncio.Event()

    async def one(self, tenant: str, number: int) -> generation_pb2.Finished:
        prompt = generation_pb2.TokenIds(ids=[0, *(3 + (number * 31 + i * 7) % 4000 for i in range(40))])
        while True:
            try:
                return await self._once(generation_pb2.GenerateRequest(
                    token_ids=prompt, max_tokens=NUM_OUTPUT, ignore_eos=True, tenant=tenant, seed=number
                ))
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, error
                hint_ms = int(dict(error.trailing_metadata() or ())["retry-after-ms"])
                self.hints_ms[tenant].append(hint_ms)
                self.details.add(error.details() or "")
            await self.may_retry.wait()
            await asyncio.sleep(min(hint_ms, 500) / 1000)

    async def _once(self, request: generation_pb2.GenerateRequest) -> generation_pb2.Finished:
        num_tokens = 0
        async for reply in self._stub.Generate(request):
            if reply.HasField("started"):
                self.starts.append(request.tenant)
            elif reply.HasField("delta"):
                num_tokens += len(reply.delta.token_ids)
            else:
                assert num_tokens == NUM_OUTPUT
                return reply.finished
        raise AssertionError("the stream had no end")


async def overload(address: str) -> tuple[Crowd, list[str], list[generation_pb2.Finished]]:
    """Everybody to the end; what was let in from the moment on that the few arrived, until they were all in."""
    async with Security.of(SecuritySection()).open_channel(address) as channel, asyncio.timeout(120.0):
        crowd = Crowd(generation_pb2_grpc.GenerationStub(channel))
        flood = [asyncio.create_task(crowd.one("flood", i)) for i in range(NUM_FLOOD)]
        while len(crowd.hints_ms["flood"]) < NUM_FLOOD - MAX_QUEUED - 2 * MAX_RUNNING:  # the queue is full
            await asyncio.sleep(0.002)
        num_before = len(crowd.starts)
        few = await asyncio.gather(*(crowd.one("few", 1000 + i) for i in range(NUM_FEW)))
        since = crowd.starts[num_before:]
        crowd.may_retry.set()
        return crowd, since, [*few, *await asyncio.gather(*flood)]


@pytest.mark.slow
def test_a_flood_does_not_keep_the_few_waiting(rigs: Callable[..., Rig]) -> None:
    rig = rigs(1, 1, f"decode.max_running={MAX_RUNNING}", f"router.max_queued={MAX_QUEUED}")
    crowd, since, ends = asyncio.run(overload(rig.address))
    assert len(ends) == NUM_FLOOD + NUM_FEW and crowd.starts.count("flood") == NUM_FLOOD
    hints = crowd.hints_ms["flood"]
    assert len(hints) >= NUM_FLOOD - MAX_QUEUED - 2 * MAX_RUNNING and all(100 <= hint <= 60_000 for hint in hints), hints
    assert crowd.hints_ms["few"] == [], "they had less than their share of the queue"
    assert all(f"max_queued {MAX_QUEUED}" in text for text in crowd.details), crowd.details
    last = max(i for i, tenant in enumerate(since) if tenant == "few")
    num_flood = since[:last].count("flood")
    assert num_flood <= NUM_FEW + 2, f"let in by turns: {since}"
    waits_us = [end.timeline.queue_us for end in ends[:NUM_FEW]]
    assert max(waits_us) > 0
    rig.settle()
