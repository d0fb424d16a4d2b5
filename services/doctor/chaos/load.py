"""Closed loop of clients: each sends a request to a router that serves, reads it to its end, sends the next.

When a router goes away its clients turn to another replica with the same request and the same seed. Whatever a client ever saw is
kept: the verifier wants all of it.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proto.baton.v1 import generation_pb2, generation_pb2_grpc
from services.doctor.chaos.requests import Deal, Draw
from services.runtime.security import Security
from services.runtime.serve import ERROR_KEY

SILENCE_S = 90.0  # a stream silent for longer hangs: 60 s for a member to come, the rest for finding out and computing
_MAX_FAILOVERS = 20
_HEALTH_S = 0.2
_AFTER_FAILURE_S = 0.5  # a client that was refused does not come back at once

Fate = Literal["running", "completed", "failed", "vanished", "hung"]


@dataclass
class Seen:
    """What one stream said of one choice."""

    choice: int = 0
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    text: str = ""
    finished: generation_pb2.Finished | None = None


@dataclass
class Outcome:
    """One request from its client's side; times are monotonic seconds."""

    number: int
    draw: Draw
    began: float
    fate: Fate = "running"
    ended: float = 0.0
    error: str = ""
    choices: list[Seen] = field(default_factory=list[Seen])
    cut_short: list[Seen] = field(default_factory=list[Seen])  # of streams that a router's death ended
    arrivals: list[float] = field(default_factory=list[float])  # when tokens came
    num_failovers: int = 0

    @property
    def num_tokens(self) -> int:
        """Of all choices."""
        return sum(len(seen.token_ids) for seen in self.choices)

    @property
    def timelines(self) -> list[generation_pb2.Timeline]:
        return [seen.finished.timeline for seen in self.choices if seen.finished is not None]


class Routers:
    """Replicas by address and whether each says SERVING, as a load balancer asks."""

    def __init__(self, addresses: Sequence[str], security: Security) -> None:
        self.security = security
        self._serving = dict.fromkeys(addresses, False)
        self._turn = itertools.count()

    async def watch(self) -> None:
        """Ask until cancelled."""
        await asyncio.gather(*(self._watch_one(address) for address in self._serving))

    async def _watch_one(self, address: str) -> None:
        while True:
            async with self.security.open_channel(address) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    while True:
                        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
                        self._serving[address] = reply.status == health_pb2.HealthCheckResponse.SERVING
                        await asyncio.sleep(_HEALTH_S)
            self._serving[address] = False
            await asyncio.sleep(_HEALTH_S)

    def all_serve(self) -> bool:
        return all(self._serving.values())

    def choose(self) -> str:
        """A serving replica in turn, "" when there is none."""
        usable = [address for address, serves in self._serving.items() if serves]
        return usable[next(self._turn) % len(usable)] if usable else ""


class Load:
    """`num_clients` closed loops; `outcomes` in the order of their starts; `on_end(outcome)` as each ends."""

    def __init__(self, routers: Routers, deal: Deal, num_clients: int, on_end: Callable[[Outcome], None]) -> None:
        self.outcomes: list[Outcome] = []
        self._routers, self._deal, self._num_clients, self._on_end = routers, deal, num_clients, on_end
        self._extra: set[asyncio.Task[Outcome]] = set()
        self._stopping = False

    async def run(self) -> None:
        """Until stop(), and then until everything sent has ended."""
        await asyncio.gather(*(self._loop() for _ in range(self._num_clients)))
        while self._extra:
            await asyncio.gather(*self._extra)

    def stop(self) -> None:
        """Send nothing new."""
        self._stopping = True

    def add(self, draws: Sequence[Draw]) -> None:
        """Requests besides the closed loop's, all at once."""
        for draw in draws:
            task = asyncio.create_task(self._one(draw))
            self._extra.add(task)
            task.add_done_callback(self._extra.discard)

    def running(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.fate == "running"]

    async def _loop(self) -> None:
        while not self._stopping:
            outcome = await self._one(self._deal.next())
            if outcome.fate == "failed":
                await asyncio.sleep(_AFTER_FAILURE_S)

    async def _one(self, draw: Draw) -> Outcome:
        outcome = Outcome(len(self.outcomes), draw, time.monotonic())
        self.outcomes.append(outcome)
        fate: Fate = "hung"
        try:
            fate = await self._serve(outcome)
        except asyncio.CancelledError:
            outcome.error = "it was still running when the run had to end"
            raise
        finally:
            outcome.fate, outcome.ended = fate, time.monotonic()
            self._on_end(outcome)
        return outcome

    async def _serve(self, outcome: Outcome) -> Fate:
        """Send and read, at another replica when one goes away."""
        while True:
            while not (address := self._routers.choose()):
                await asyncio.sleep(0.05)
                if time.monotonic() - outcome.began > SILENCE_S:
                    outcome.error = "no router was serving"
                    return "failed"
            outcome.choices = [Seen(choice) for choice in range(outcome.draw.template.num_choices)]
            try:
                return await self._stream(address, outcome)
            except TimeoutError:
                outcome.error = f"silent for {SILENCE_S:g} s after {outcome.num_tokens} tokens at {address}"
                return "hung"
            except grpc.aio.AioRpcError as error:
                outcome.error = f"{error.code().name}: {error.details()}"
                is_routers = any(key == ERROR_KEY for key, _ in error.trailing_metadata() or ())
                if is_routers or outcome.num_failovers >= _MAX_FAILOVERS:
                    return "failed"
            outcome.num_failovers += 1
            outcome.cut_short += [seen for seen in outcome.choices if seen.token_ids]
            await asyncio.sleep(_HEALTH_S)

    async def _stream(self, address: str, outcome: Outcome) -> Fate:
        draw = outcome.draw
        async with self._routers.security.open_channel(address) as channel:
            call = generation_pb2_grpc.GenerationStub(channel).Generate(draw.template.message(draw.tenant))
            try:
                while True:
                    reply = await asyncio.wait_for(call.read(), SILENCE_S)
                    if not isinstance(reply, generation_pb2.GenerateReply):  # gRPC's word for the end
                        return self._at_end(outcome)
                    _take(outcome, reply)
                    if draw.leaves_after is not None and outcome.num_tokens >= draw.leaves_after:
                        return "vanished"
                    if draw.read_delay_s:
                        await asyncio.sleep(draw.read_delay_s)
            finally:
                call.cancel()

    def _at_end(self, outcome: Outcome) -> Fate:
        if all(seen.finished is not None for seen in outcome.choices):
            return "completed"
        outcome.error = "the stream ended in OK without its last message"
        return "failed"


def _take(outcome: Outcome, reply: generation_pb2.GenerateReply) -> None:
    if reply.HasField("delta"):
        seen = outcome.choices[reply.delta.choice]
        seen.token_ids += reply.delta.token_ids
        seen.logprobs += [token.logprob for token in reply.delta.tokens]
        seen.text += reply.delta.text
        outcome.arrivals.append(time.monotonic())
    elif reply.HasField("finished"):
        outcome.choices[reply.finished.choice].finished = reply.finished

