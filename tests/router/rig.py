"""Rig S: a real router in this process, and scripted ranks that are real gRPC servers without any model.

A scripted rank's output token i is `script[i]`. A test replaces `prefill.serve` or `decode.serve` to misbehave.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from proto.baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, generation_pb2, generation_pb2_grpc
from proto.baton.v1 import prefill_pb2, prefill_pb2_grpc, registry_pb2, registry_pb2_grpc
from services.router.server import Router
from services.runtime.config import parse_config
from services.runtime.serve import WIRE_VERSION, Server, open_channel

BOS, EOS, FIRST_BYTE = 0, 1, 2
VOCAB = 258
MAX_MODEL_LEN = 64
PATIENCE_S = 10.0


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Ids 0 and 1 are BOS and EOS, id 2 + b is the byte b."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    order = {character: i for i, character in enumerate(alphabet)}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    character_of = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    assert set(character_of.values()) == set(order)
    vocab = {"<bos>": BOS, "<eos>": EOS} | {character_of[byte]: FIRST_BYTE + byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def ids_of(text: str) -> list[int]:
    """Byte tokens of `text`, without BOS."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def model_folder(folder: Path) -> Path:
    """config.json and tokenizer.json of a model that never runs."""
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": MAX_MODEL_LEN,
        "bos_token_id": BOS, "eos_token_id": EOS, "model_type": "deepseek_v3",
    }
    (folder / "config.json").write_text(json.dumps(sizes))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


async def until(condition: Callable[[], bool], what: str) -> None:
    """Poll until `condition` holds."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not within {PATIENCE_S} s: {what}"
        await asyncio.sleep(0.002)


class FakeRank:
    """One rank of one front: a server, and a Join stream to the router."""

    def __init__(self, world: "World", role: str, index: int) -> None:
        self.world = world
        self.role = role
        self.instance_id = f"{role}-{index}"
        self.fingerprint = "fp"
        self.max_model_len = MAX_MODEL_LEN
        self.server = Server("127.0.0.1:0", [])
        self._join: asyncio.Task[None] | None = None
        self.updates: asyncio.Queue[registry_pb2.MemberUpdate] = asyncio.Queue()

    @property
    def rank(self) -> common_pb2.Rank:
        return common_pb2.Rank(
            instance_id=self.instance_id, role=self.role, pool_address=self.server.address, rank=0, peer=self.instance_id.encode()
        )

    def member(self, *ranks: common_pb2.Rank) -> registry_pb2.Member:
        limits = registry_pb2.Limits(max_model_len=self.max_model_len, vocab_size=VOCAB, page_size=64, num_pages=100, max_running=8)
        return registry_pb2.Member(
            front_id=f"front-{self.instance_id}", role=self.role, address=self.server.address, fingerprint=self.fingerprint, model="fake",
            wire_version=WIRE_VERSION, limits=limits, ranks=ranks or [self.rank], tp=1, ep=1,
        )

    async def start(self) -> None:
        await self.server.start()

    async def join(self) -> None:
        self.updates.put_nowait(registry_pb2.MemberUpdate(member=self.member()))
        self._join = asyncio.create_task(self._stay())
        await until(lambda: self.instance_id in self.world.usable(self.role), f"{self.instance_id} joins")

    async def _stay(self) -> None:
        async def updates() -> AsyncIterator[registry_pb2.MemberUpdate]:
            while True:
                yield await self.updates.get()

        async with open_channel(self.world.router.address) as channel:
            async for _ in registry_pb2_grpc.RegistryStub(channel).Join(updates()):
                pass

    async def leave(self) -> None:
        """The front vanishes: stream and server."""
        if self._join is not None:
            self._join.cancel()
            await asyncio.wait([self._join])
        await self.server.stop(0)


class FakePrefill(FakeRank, prefill_pb2_grpc.PrefillServicer):
    def __init__(self, world: "World", index: int) -> None:
        super().__init__(world, "prefill", index)
        self.server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, self)
        self.runs: list[prefill_pb2.PrefillRequest] = []
        self.num_cancelled = 0
        self.serve: Callable[[prefill_pb2.PrefillRequest], Awaitable[prefill_pb2.PrefillReply]] = self.reply

    async def Run(self, request: prefill_pb2.PrefillRequest, context: Any) -> prefill_pb2.PrefillReply:
        self.runs.append(request)
        try:
            return await self.serve(request)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def reply(self, request: prefill_pb2.PrefillRequest, cached: int = 0) -> prefill_pb2.PrefillReply:
        self.world.announce(request)
        index = request.prompt.num_output_tokens
        first = prefill_pb2.FirstToken(token=self.world.token(index), finish_reason=self.world.finish(index, request.sampling))
        outcome = prefill_pb2.RequestOutcome(ok=True)
        return prefill_pb2.PrefillReply(outcome=outcome, first_tokens=[first], num_cached_tokens=cached, queue_us=1, compute_us=2)


def refusal(reason: common_pb2.Reason, message: str = "scripted") -> prefill_pb2.PrefillReply:
    return prefill_pb2.PrefillReply(outcome=prefill_pb2.RequestOutcome(ok=False, reason=reason, message=message))


class DecodeSession:
    """What a script sees of one session."""

    def __init__(self) -> None:
        self.replies: asyncio.Queue[decode_pb2.SessionReply | None] = asyncio.Queue()
        self._sequence = 0

    def send(self, **message: Any) -> None:
        self._sequence += 1
        self.replies.put_nowait(decode_pb2.SessionReply(sequence=self._sequence, **message))

    def ready(self, submit: decode_pb2.Submit, token: common_pb2.Token) -> None:
        self.send(ready=decode_pb2.Ready(
            handle=submit.handle, attempt=submit.key.attempt, position=submit.prompt.num_output_tokens, first_token=token,
            transfer=common_pb2.Transfer(num_pages=1, num_bytes=8, transport="fake"),
        ))

    def step(self, submit: decode_pb2.Submit, first_index: int, tokens: Sequence[common_pb2.Token]) -> None:
        self.send(step=decode_pb2.StepTokens(
            handles=[submit.handle], attempts=[submit.key.attempt], first_index=[first_index], num_tokens=[len(tokens)],
            token_ids=[token.id for token in tokens], logprobs=[token.logprob for token in tokens],
            top_logprobs=[token.top_logprobs for token in tokens],
        ))

    def finished(self, submit: decode_pb2.Submit, num_tokens: int, reason: common_pb2.FinishReason, stop_id: int = 0) -> None:
        self.send(finished=decode_pb2.RequestFinished(
            handle=submit.handle, attempt=submit.key.attempt, reason=reason, num_output_tokens=num_tokens, stop_token_id=stop_id
        ))

    def failed(self, submit: decode_pb2.Submit, reason: common_pb2.Reason) -> None:
        self.send(failed=decode_pb2.RequestFailed(handle=submit.handle, attempt=submit.key.attempt, reason=reason, message="scripted"))

    def end(self) -> None:
        """Break the session from decode's side."""
        self.replies.put_nowait(None)


class FakeDecode(FakeRank, decode_pb2_grpc.DecodeServicer):
    def __init__(self, world: "World", index: int) -> None:
        super().__init__(world, "decode", index)
        self.server.add(decode_pb2_grpc.add_DecodeServicer_to_server, self)
        self.sessions: list[DecodeSession] = []
        self.submits: list[decode_pb2.Submit] = []
        self.cancels: list[decode_pb2.Cancel] = []
        self.tokens_a_step = 1
        self.serve: Callable[[DecodeSession, decode_pb2.Submit], Awaitable[None]] = self.decode

    async def Session(self, request_iterator: AsyncIterator[decode_pb2.SessionRequest], context: Any) -> AsyncIterator[decode_pb2.SessionReply]:
        opened = await anext(aiter(request_iterator))
        assert opened.open.instance_id == self.instance_id and opened.open.wire_version == WIRE_VERSION
        session = DecodeSession()
        self.sessions.append(session)
        session.send(opened=decode_pb2.SessionOpened(wire_version=WIRE_VERSION))
        reader = asyncio.create_task(self._read(request_iterator, session))
        try:
            while (reply := await session.replies.get()) is not None:
                yield reply
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[decode_pb2.SessionRequest], session: DecodeSession) -> None:
        tasks: dict[int, asyncio.Task[None]] = {}
        try:
            async for request in requests:
                if request.HasField("submit"):
                    self.submits.append(request.submit)
                    tasks[request.submit.handle] = asyncio.ensure_future(self.serve(session, request.submit))
                elif request.HasField("cancel"):
                    self.cancels.append(request.cancel)
                    tasks[request.cancel.handle].cancel()
        finally:
            for task in tasks.values():
                task.cancel()

    async def decode(self, session: DecodeSession, submit: decode_pb2.Submit, stop_after: int | None = None) -> None:
        """Claim, get ready, then steps to the request's end; with `stop_after` go silent at that many output tokens."""
        session.send(claimed=decode_pb2.Claimed(handle=submit.handle))
        await self.world.announced(submit.key.request_id, submit.key.attempt)
        index = submit.prompt.num_output_tokens
        session.ready(submit, self.world.token(index))
        while not (reason := self.world.finish(index, submit.sampling)):
            if stop_after is not None and index + 1 >= stop_after:
                return
            tokens: list[common_pb2.Token] = []
            while len(tokens) < self.tokens_a_step and not reason:
                index += 1
                tokens.append(self.world.token(index))
                reason = self.world.finish(index, submit.sampling)
            session.step(submit, index - len(tokens) + 1, tokens)
            await asyncio.sleep(0)
        session.finished(submit, index + 1, reason, tokens_end(self.world.script, index) if reason == common_pb2.STOP else 0)


def tokens_end(script: Sequence[int], index: int) -> int:
    return script[index]


class World:
    """Router, ranks and script of one test."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.script: list[int] = ids_of("abcdefghijklmnopqrstuvwxyz" * 4)
        self.prefills: list[FakePrefill] = []
        self.decodes: list[FakeDecode] = []
        self._announced: dict[tuple[str, int], asyncio.Event] = {}

    def usable(self, role: str) -> set[str]:
        return {state.instance_id for state in self.router.pool.usable(role)}

    def token(self, index: int) -> common_pb2.Token:
        token_id = self.script[index]
        return common_pb2.Token(
            id=token_id, logprob=-0.25 * (index + 1), top_logprobs=common_pb2.TopLogprobs(token_ids=[token_id], logprobs=[-0.5])
        )

    def finish(self, index: int, sampling: common_pb2.Sampling) -> common_pb2.FinishReason:
        """What a real rank finds about its output token `index`."""
        if self.script[index] in (set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})):
            return common_pb2.STOP
        return common_pb2.LENGTH if index + 1 >= sampling.max_tokens else common_pb2.FINISH_UNSPECIFIED

    def announce(self, request: prefill_pb2.PrefillRequest) -> None:
        self._announced.setdefault((request.request_id, request.attempt), asyncio.Event()).set()

    async def announced(self, request_id: str, attempt: int) -> None:
        await self._announced.setdefault((request_id, attempt), asyncio.Event()).wait()

    async def add(self, role: str, **changes: Any) -> Any:
        ranks: list[Any] = self.prefills if role == "prefill" else self.decodes
        rank = (FakePrefill if role == "prefill" else FakeDecode)(self, len(ranks))
        for name, value in changes.items():
            setattr(rank, name, value)
        ranks.append(rank)
        await rank.start()
        await rank.join()
        return rank

    async def stream(self, **fields: Any) -> AsyncIterator[generation_pb2.GenerateReply]:
        async with open_channel(self.router.address) as channel:
            call: Any = generation_pb2_grpc.GenerationStub(channel).Generate(request_of(**fields))
            try:
                async for reply in call:
                    yield reply
            finally:
                call.cancel()

    async def generate(self, **fields: Any) -> "Answer":
        answer = Answer()
        async with contextlib.aclosing(self.stream(**fields)) as replies:
            async for reply in replies:
                answer.take(reply)
        return answer

    async def settle(self) -> None:
        """Nothing of any request is left in the router."""
        def left() -> list[str]:
            states = [*self.router.pool.usable("prefill"), *self.router.pool.usable("decode")]
            found = [f"{state.name} has {state.num_own_requests}" for state in states if state.num_own_requests]
            found += [f"session of {state.name} has {state.session.num_requests}" for state in states if state.session and state.session.num_requests]
            return found + ([f"{self.router.dispatcher.num_requests} requests"] if self.router.dispatcher.num_requests else [])

        await until(lambda: not left(), f"the router settles: {left()}")


class Answer:
    """All that a client was told."""

    def __init__(self) -> None:
        self.request_id = ""
        self.seed = 0
        self.text = ""
        self.token_ids: list[int] = []
        self.tokens: list[common_pb2.Token] = []
        self.deltas: list[str] = []
        self.finished: generation_pb2.Finished | None = None

    def take(self, reply: generation_pb2.GenerateReply) -> None:
        if reply.HasField("started"):
            self.request_id, self.seed = reply.started.request_id, reply.started.seed
        elif reply.HasField("delta"):
            self.text += reply.delta.text
            self.deltas.append(reply.delta.text)
            self.token_ids += reply.delta.token_ids
            self.tokens += reply.delta.tokens
        else:
            assert self.finished is None
            self.finished = reply.finished


def request_of(prompt: Sequence[int] | None = None, **fields: Any) -> generation_pb2.GenerateRequest:
    if "text" not in fields and "chat" not in fields and prompt is None:
        prompt = [BOS, *ids_of("hello")]
    if prompt is not None:
        fields["token_ids"] = generation_pb2.TokenIds(ids=prompt)
    return generation_pb2.GenerateRequest(**fields)


@contextlib.asynccontextmanager
async def running(folder: Path, prefills: int = 1, decodes: int = 1, **router_keys: Any) -> AsyncIterator[World]:
    """A router with that many scripted ranks; at the end nothing may be left of any request."""
    table = {"model": {"path": str(model_folder(folder))}, "router": {"address": "127.0.0.1:0"} | router_keys}
    router = Router(parse_config(table, "test"))
    await router.start()
    health = asyncio.create_task(router.watch_health())
    world = World(router)
    try:
        for role, number in (("prefill", prefills), ("decode", decodes)):
            for _ in range(number):
                await world.add(role)
        yield world
        await world.settle()
    finally:
        health.cancel()
        for rank in (*world.prefills, *world.decodes):
            await rank.leave()
        await router.stop(0.0)


@contextlib.contextmanager
def failing(code: grpc.StatusCode) -> Any:
    """The block raises an AioRpcError of `code`; yields a list that then holds its details."""
    details: list[str] = []
    try:
        yield details
    except grpc.aio.AioRpcError as error:
        assert error.code() == code, f"{error.code()}: {error.details()}"
        details.append(error.details() or "")
    else:
        raise AssertionError(f"no {code} was raised")
