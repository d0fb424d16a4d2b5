"""Rig S: a real router in this process and scripted ranks. A scripted rank's output token i is `world.script[i]`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from proto.baton.v1 import common_pb2, generation_pb2, generation_pb2_grpc, prefill_pb2
from services.router.server import Router
from services.runtime.config import parse_config
from services.runtime.serve import CHANNEL_OPTIONS
from tests.router.byte_model import BOS, EOS, MAX_MODEL_LEN, ids_of, model_folder
from tests.router.fakes import FakeDecode, FakeMove, FakePrefill, redirect_refusal, until


class World:
    """Router, ranks and script of one test."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.script: list[int] = ids_of("abcdefghijklmnopqrstuvwxyz" * 4)
        self.prefills: list[FakePrefill] = []
        self.decodes: list[FakeDecode] = []
        self._announced: dict[tuple[str, int, int], asyncio.Event] = {}  # request, choice, attempt
        self._leases: dict[tuple[str, int], list[int | bool]] = {}  # request, choice: attempt, whether it is announced
        self._moving: dict[tuple[str, int, int], FakeMove] = {}

    @property
    def router_address(self) -> str:
        return self.router.address

    def usable(self, role: str) -> set[str]:
        return {state.instance_id for state in self.router.pool.usable(role)}

    def token(self, index: int, choice: int = 0) -> common_pb2.Token:
        """Choice c has the script from its token c on."""
        token_id = self.script[index + choice]
        return common_pb2.Token(
            id=token_id, logprob=-0.25 * (index + 1), top_logprobs=common_pb2.TopLogprobs(token_ids=[token_id], logprobs=[-0.5])
        )

    def finish(self, index: int, sampling: common_pb2.Sampling, choice: int = 0) -> common_pb2.FinishReason:
        """What a real rank finds about its output token `index`."""
        if self.script[index + choice] in (set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})):
            return common_pb2.STOP
        return common_pb2.LENGTH if index + 1 >= sampling.max_tokens else common_pb2.FINISH_UNSPECIFIED

    def _event(self, request_id: str, attempt: int, choice: int) -> asyncio.Event:
        return self._announced.setdefault((request_id, choice, attempt), asyncio.Event())

    def lease(self, request: prefill_pb2.PrefillRequest) -> None:
        for choice in range(request.first_choice, request.first_choice + request.n):
            self._leases[request.request_id, choice] = [request.attempt, False]

    def announce(self, request: prefill_pb2.PrefillRequest) -> None:
        """The prompt's pages are there, for whoever is the reader of each choice by now."""
        for choice in range(request.first_choice, request.first_choice + request.n):
            lease = self._leases.get((request.request_id, choice), [request.attempt, True])
            lease[1] = True
            self._event(request.request_id, lease[0], choice).set()

    async def announced(self, request_id: str, attempt: int, choice: int = 0) -> None:
        await self._event(request_id, attempt, choice).wait()

    def redirect(self, request: prefill_pb2.RedirectRequest) -> prefill_pb2.RedirectReply:
        """As prefill does it: UNKNOWN_REQUEST once a reader is ready, STALE_ATTEMPT for one that is no newer."""
        key = request.key
        lease = self._leases.get((key.request_id, key.choice))
        if lease is None:
            return redirect_refusal(common_pb2.UNKNOWN_REQUEST)
        if key.attempt <= lease[0]:
            return redirect_refusal(common_pb2.STALE_ATTEMPT)
        lease[0] = key.attempt
        if lease[1]:
            self._event(key.request_id, key.attempt, key.choice).set()
        return prefill_pb2.RedirectReply(outcome=prefill_pb2.RequestOutcome(ok=True))

    def release(self, key: common_pb2.RequestKey) -> None:
        self._leases.pop((key.request_id, key.choice), None)

    def moving(self, key: common_pb2.RequestKey, new_attempt: int) -> FakeMove:
        return self._moving.setdefault((key.request_id, key.choice, new_attempt), FakeMove())

    async def add(self, role: str, **changes: Any) -> Any:
        ranks: list[Any] = self.prefills if role == "prefill" else self.decodes
        rank = (FakePrefill if role == "prefill" else FakeDecode)(self, len(ranks))
        for name, value in changes.items():
            setattr(rank, name, value)
        ranks.append(rank)
        await rank.start()
        await rank.join()
        return rank

    async def stream(
        self, timeout_s: float | None = None, options: Sequence[tuple[str, Any]] = (), **fields: Any
    ) -> AsyncIterator[generation_pb2.GenerateReply]:
        async with grpc.aio.insecure_channel(self.router.address, options=[*dict([*CHANNEL_OPTIONS, *options]).items()]) as channel:
            call: Any = generation_pb2_grpc.GenerationStub(channel).Generate(request_of(**fields), timeout=timeout_s)
            try:
                async for reply in call:
                    yield reply
            finally:
                call.cancel()

    async def generate(self, answer: "Answer | None" = None, **fields: Any) -> "Answer":
        answer = answer or Answer()
        async with contextlib.aclosing(self.stream(**fields)) as replies:
            async for reply in replies:
                answer.take(reply)
        return answer

    async def settle(self) -> None:
        """Nothing of any request is left in the router, nor at a decode rank that could still be told."""
        def left() -> list[str]:
            states = [*self.router.pool.usable("prefill"), *self.router.pool.usable("decode")]
            found = [f"{state.name} has {state.num_own_requests}" for state in states if state.num_own_requests]
            found += [f"{state.name}'s session has {state.session.num_requests}" for state in states if state.session]
            found = [text for text in found if not text.endswith(" 0")]
            found += [f"{decode.instance_id} has {session.live}" for decode in self.decodes for session in decode.sessions if session.live]
            return found + ([f"{self.router.dispatcher.num_requests} requests"] if self.router.dispatcher.num_requests else [])

        await until(lambda: not left(), "nothing of any request is left in the router")


class Answer:
    """All that a client was told of one choice; `choices` of every one."""

    def __init__(self) -> None:
        self.request_id = ""
        self.seed = 0
        self.text = ""
        self.token_ids: list[int] = []
        self.tokens: list[common_pb2.Token] = []
        self.deltas: list[str] = []
        self.finished: generation_pb2.Finished | None = None
        self.choices: list[Answer] = [self]

    def take(self, reply: generation_pb2.GenerateReply) -> None:
        if reply.HasField("started"):
            assert not self.request_id, "started comes once"
            self.request_id, self.seed = reply.started.request_id, reply.started.seed
            return
        number = reply.delta.choice if reply.HasField("delta") else reply.finished.choice
        self.choices += [Answer() for _ in range(number + 1 - len(self.choices))]
        choice = self.choices[number]
        assert choice.finished is None, "nothing follows finished"
        if reply.HasField("delta"):
            choice.text += reply.delta.text
            choice.deltas.append(reply.delta.text)
            choice.token_ids += reply.delta.token_ids
            choice.tokens += reply.delta.tokens
        else:
            choice.finished = reply.finished

    @property
    def recoveries(self) -> list[generation_pb2.Recovery]:
        assert self.finished is not None
        return list(self.finished.timeline.recoveries)


def request_of(prompt: Sequence[int] | None = None, **fields: Any) -> generation_pb2.GenerateRequest:
    if "text" not in fields and "chat" not in fields and prompt is None:
        prompt = [BOS, *ids_of("hello")]
    if prompt is not None:
        fields["token_ids"] = generation_pb2.TokenIds(ids=prompt)
    return generation_pb2.GenerateRequest(**fields)


@contextlib.asynccontextmanager
async def running(
    folder: Path, prefills: int = 1, decodes: int = 1, max_model_len: int = MAX_MODEL_LEN, **router_keys: Any
) -> AsyncIterator[World]:
    """A router with that many scripted ranks; at the end nothing may be left of any request."""
    table = {"model": {"path": str(model_folder(folder, max_model_len))}, "router": {"address": "127.0.0.1:0"} | router_keys}
    router = Router(parse_config(table, "test"))
    await router.start()
    health = asyncio.create_task(router.watch_health())
    world = World(router)
    try:
        for role, number in (("prefill", prefills), ("decode", decodes)):
            for _ in range(number):
                await world.add(role, max_model_len=max_model_len)
        yield world
        await world.settle()
    finally:
        health.cancel()
        for rank in (*world.prefills, *world.decodes):
            await rank.leave()
        await router.stop(0.0)


@contextlib.contextmanager
def failing(code: grpc.StatusCode) -> Iterator[list[str]]:
    """The block raises an AioRpcError of `code`; yields a list that then holds its details."""
    details: list[str] = []
    try:
        yield details
    except grpc.aio.AioRpcError as error:
        assert error.code() == code, f"{error.code()}: {error.details()}"
        details.append(error.details() or "")
    else:
        raise AssertionError(f"no {code} was raised")
