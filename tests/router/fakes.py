"""Scripted ranks: real gRPC servers that speak the protos and hold no model. A test replaces `serve` to misbehave."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias

from proto.baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, registry_pb2, registry_pb2_grpc
from services.runtime.serve import WIRE_VERSION, Server
from tests.clear import CLEAR
from tests.router.byte_model import MAX_MODEL_LEN, VOCAB

PATIENCE_S = 10.0


async def until(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Poll until `condition` holds."""
    deadline = asyncio.get_running_loop().time() + patience_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not within {patience_s:g} s: {what}"
        await asyncio.sleep(0.002)


class Script(Protocol):
    """What scripted ranks share: the tokens, and who has announced."""

    script: list[int]

    @property
    def router_address(self) -> str: ...
    def usable(self, role: str) -> set[str]: ...
    def token(self, index: int, choice: int = 0) -> common_pb2.Token: ...
    def finish(self, index: int, sampling: common_pb2.Sampling, choice: int = 0) -> common_pb2.FinishReason: ...
    def announce(self, request: prefill_pb2.PrefillRequest) -> None: ...
    async def announced(self, request_id: str, attempt: int, choice: int = 0) -> None: ...
    def lease(self, request: prefill_pb2.PrefillRequest) -> None: ...
    def redirect(self, request: prefill_pb2.RedirectRequest) -> prefill_pb2.RedirectReply: ...
    def release(self, key: common_pb2.RequestKey) -> None: ...
    def moving(self, key: common_pb2.RequestKey, new_attempt: int) -> "FakeMove": ...


class ScriptEnds(Exception):
    """Raised by a hook: the rank says nothing more of this request."""


Hook: TypeAlias = Callable[["DecodeSession", decode_pb2.Submit], Awaitable[None]]


class FakeMove:
    """What a scripted source and target of one move say to each other, where real ones share announcements and pages."""

    def __init__(self) -> None:
        self.started, self.is_over = asyncio.Event(), asyncio.Event()
        self.paused: asyncio.Future[int] = asyncio.get_running_loop().create_future()  # output tokens then
        self.is_done = False  # the target has it


class FakeRank:
    """One rank of one front: a server, and a Join stream to the router."""

    def __init__(self, world: Script, role: str, index: int) -> None:
        self.world = world
        self.role = role
        self.instance_id = f"{role}-{index}"
        self.front_id = f"front-{self.instance_id}"
        self.fingerprint = "fp"
        self.max_model_len = MAX_MODEL_LEN
        self.max_running = 128
        self.peer: bytes | None = None  # what it says of its pages; by default its instance id
        self.server = Server("127.0.0.1:0", [], CLEAR)
        self._join: asyncio.Task[None] | None = None
        self.updates: asyncio.Queue[registry_pb2.MemberUpdate] = asyncio.Queue()

    @property
    def rank(self) -> common_pb2.Rank:
        return common_pb2.Rank(
            instance_id=self.instance_id, role=self.role, pool_address=self.server.address, rank=0,
            peer=self.instance_id.encode() if self.peer is None else self.peer,
        )

    def member(self, *ranks: common_pb2.Rank) -> registry_pb2.Member:
        limits = registry_pb2.Limits(
            max_model_len=self.max_model_len, vocab_size=VOCAB, page_size=64, num_pages=20_000, max_running=self.max_running
        )
        return registry_pb2.Member(
            front_id=self.front_id, role=self.role, address=self.server.address, fingerprint=self.fingerprint, model="fake",
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

        async with CLEAR.open_channel(self.world.router_address) as channel:
            async for _ in registry_pb2_grpc.RegistryStub(channel).Join(updates()):
                pass

    async def leave(self) -> None:
        """The front vanishes: stream and server."""
        if self._join is not None:
            self._join.cancel()
            await asyncio.wait([self._join])
        await self.server.stop(0)


class FakePrefill(FakeRank, prefill_pb2_grpc.PrefillServicer):
    def __init__(self, world: Script, index: int) -> None:
        super().__init__(world, "prefill", index)
        self.server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, self)
        self.runs: list[prefill_pb2.PrefillRequest] = []
        self.redirects: list[prefill_pb2.RedirectRequest] = []
        self.num_cancelled = 0
        self.serve_redirect: Callable[[prefill_pb2.RedirectRequest], Awaitable[prefill_pb2.RedirectReply]] = self.redirect
        self.serve: Callable[[prefill_pb2.PrefillRequest], Awaitable[prefill_pb2.PrefillReply]] = self.reply

    async def Run(self, request: prefill_pb2.PrefillRequest, context: Any) -> prefill_pb2.PrefillReply:
        self.runs.append(request)
        self.world.lease(request)
        try:
            reply = await self.serve(request)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if not reply.outcome.ok:  # nothing is held for it, so a redirect that overtakes the next Run finds nothing
            for choice in range(request.first_choice, request.first_choice + request.n):
                self.world.release(common_pb2.RequestKey(request_id=request.request_id, choice=choice, attempt=request.attempt))
        return reply

    async def Redirect(self, request: prefill_pb2.RedirectRequest, context: Any) -> prefill_pb2.RedirectReply:
        assert request.instance_id == self.instance_id and request.fingerprint == self.fingerprint
        self.redirects.append(request)
        return await self.serve_redirect(request)

    async def redirect(self, request: prefill_pb2.RedirectRequest) -> prefill_pb2.RedirectReply:
        return self.world.redirect(request)

    async def reply(self, request: prefill_pb2.PrefillRequest, cached: int = 0) -> prefill_pb2.PrefillReply:
        self.world.announce(request)
        index, choices = request.prompt.num_output_tokens, range(request.first_choice, request.first_choice + request.n)
        firsts = [
            prefill_pb2.FirstToken(
                choice=choice, token=self.world.token(index, choice), finish_reason=self.world.finish(index, request.sampling, choice)
            )
            for choice in choices
        ]
        outcome = prefill_pb2.RequestOutcome(ok=True)
        return prefill_pb2.PrefillReply(outcome=outcome, first_tokens=firsts, num_cached_tokens=cached, queue_us=1, compute_us=2)


def refusal(reason: common_pb2.Reason, message: str = "scripted") -> prefill_pb2.PrefillReply:
    return prefill_pb2.PrefillReply(outcome=prefill_pb2.RequestOutcome(ok=False, reason=reason, message=message))


def redirect_refusal(reason: common_pb2.Reason) -> prefill_pb2.RedirectReply:
    return prefill_pb2.RedirectReply(outcome=refusal(reason).outcome)


class DecodeSession:
    """What a script sees of one session."""

    def __init__(self) -> None:
        self.replies: asyncio.Queue[decode_pb2.SessionReply | None] = asyncio.Queue()
        self.live: set[int] = set()  # handles that are neither over nor cancelled
        self._sequence = 0

    def opened(self) -> None:
        """The first word of a stream, which no number counts. Scripted ranks keep no session."""
        self.replies.put_nowait(decode_pb2.SessionReply(opened=decode_pb2.SessionOpened(wire_version=WIRE_VERSION, next_request=1)))

    def send(self, **message: Any) -> None:
        self._sequence += 1
        self.replies.put_nowait(decode_pb2.SessionReply(sequence=self._sequence, **message))

    def ready(self, submit: decode_pb2.Submit, token: common_pb2.Token, position: int | None = None) -> None:
        position = submit.prompt.num_output_tokens if position is None else position
        self.send(ready=decode_pb2.Ready(
            handle=submit.handle, attempt=submit.key.attempt, position=position, first_token=token,
            transfer=common_pb2.Transfer(num_pages=1, num_bytes=8, transport="fake"),
        ))

    def step(self, submit: decode_pb2.Submit, first_index: int, tokens: Sequence[common_pb2.Token]) -> None:
        self.send(step=decode_pb2.StepTokens(
            handles=[submit.handle], attempts=[submit.key.attempt], first_index=[first_index], num_tokens=[len(tokens)],
            token_ids=[token.id for token in tokens], logprobs=[token.logprob for token in tokens],
            top_logprobs=[token.top_logprobs for token in tokens],
        ))

    def finished(self, submit: decode_pb2.Submit, num_tokens: int, reason: common_pb2.FinishReason, stop_id: int = 0) -> None:
        self.live.discard(submit.handle)
        self.send(finished=decode_pb2.RequestFinished(
            handle=submit.handle, attempt=submit.key.attempt, reason=reason, num_output_tokens=num_tokens, stop_token_id=stop_id
        ))

    def failed(self, submit: decode_pb2.Submit, reason: common_pb2.Reason) -> None:
        self.live.discard(submit.handle)
        self.send(failed=decode_pb2.RequestFailed(handle=submit.handle, attempt=submit.key.attempt, reason=reason, message="scripted"))

    def say(self, word: type[Any], submit: decode_pb2.Submit, **fields: Any) -> None:
        """Granted, CaughtUp, Paused or Resumed."""
        name = {"CaughtUp": "caught_up"}.get(word.__name__, word.__name__.lower())
        self.send(**{name: word(handle=submit.handle, attempt=submit.key.attempt, **fields)})

    def end(self) -> None:
        """Break the session from decode's side."""
        self.live.clear()
        self.replies.put_nowait(None)


class FakeDecode(FakeRank, decode_pb2_grpc.DecodeServicer):
    def __init__(self, world: Script, index: int) -> None:
        super().__init__(world, "decode", index)
        self.server.add(decode_pb2_grpc.add_DecodeServicer_to_server, self)
        self.sessions: list[DecodeSession] = []
        self.submits: list[decode_pb2.Submit] = []
        self.cancels: list[decode_pb2.Cancel] = []
        self.moves: list[decode_pb2.Move] = []
        self.sources: dict[int, Source] = {}  # by handle
        self.hooks: dict[str, Hook] = {}  # called when a request here is claimed, ready, granted, caught_up, paused, pulled, moved
        self.tokens_a_step = 1
        self.step_s = 0.0
        self.serve: Callable[[DecodeSession, decode_pb2.Submit], Awaitable[None]] = self.decode

    async def Session(
        self, request_iterator: AsyncIterator[decode_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[decode_pb2.SessionReply]:
        opened = await anext(aiter(request_iterator))
        assert opened.open.instance_id == self.instance_id and opened.open.wire_version == WIRE_VERSION
        session = DecodeSession()
        self.sessions.append(session)
        session.opened()
        reader = asyncio.create_task(self._read(request_iterator, session))
        try:
            while (reply := await session.replies.get()) is not None:
                yield reply
        finally:
            reader.cancel()

    def drain(self, seconds: int = 60) -> None:
        """Tell every router that this rank will leave."""
        self.sessions[-1].send(draining=decode_pb2.Draining(seconds_left=seconds))

    async def _read(self, requests: AsyncIterator[decode_pb2.SessionRequest], session: DecodeSession) -> None:
        tasks: dict[int, asyncio.Task[None]] = {}
        try:
            async for request in requests:
                if request.HasField("submit"):
                    self.submits.append(request.submit)
                    session.live.add(request.submit.handle)
                    self.sources[request.submit.handle] = Source(self.world, session, request.submit)
                    tasks[request.submit.handle] = asyncio.ensure_future(self._serve(session, request.submit))
                elif request.HasField("cancel"):
                    self.cancels.append(request.cancel)
                    session.live.discard(request.cancel.handle)
                    tasks[request.cancel.handle].cancel()
                    self.sources[request.cancel.handle].abort()
                elif request.HasField("move"):
                    self.moves.append(request.move)
                    self.sources[request.move.handle].on(request.move)
        finally:
            session.live.clear()
            for task in tasks.values():
                task.cancel()

    async def _serve(self, session: DecodeSession, submit: decode_pb2.Submit) -> None:
        with contextlib.suppress(ScriptEnds):
            await self.serve(session, submit)

    async def _at(self, phase: str, session: DecodeSession, submit: decode_pb2.Submit) -> None:
        if phase in self.hooks:
            await self.hooks[phase](session, submit)

    async def decode(self, session: DecodeSession, submit: decode_pb2.Submit, stop_after: int | None = None) -> None:
        """Claim, get ready, then steps to the request's end; with `stop_after` go silent at that many output tokens."""
        session.send(claimed=decode_pb2.Claimed(handle=submit.handle))
        await self._at("claimed", session, submit)
        if submit.is_move:
            index = await self.pull(session, submit)
        else:
            await self.world.announced(submit.key.request_id, submit.key.attempt, submit.key.choice)
            self.world.release(submit.key)
            index = submit.prompt.num_output_tokens
            session.ready(submit, self.world.token(index, submit.key.choice))
            await self._at("ready", session, submit)
        await self.run_on(session, submit, index, stop_after)

    async def pull(self, session: DecodeSession, submit: decode_pb2.Submit) -> int:
        """A move's target, up to `ready`. Returns the index of the last token of the source."""
        key = submit.key
        move = self.world.moving(key, key.attempt)
        session.say(decode_pb2.Granted, submit)
        await self._at("granted", session, submit)
        await move.started.wait()
        session.say(decode_pb2.CaughtUp, submit)
        await self._at("caught_up", session, submit)
        index = await move.paused - 1
        await self._at("pulled", session, submit)
        known = [self.world.token(i, key.choice).id for i in range(submit.prompt.num_output_tokens)]
        assert list(submit.prompt.token_ids)[len(submit.prompt.token_ids) - len(known):] == known and len(known) <= index + 1
        move.is_done = True
        move.is_over.set()
        session.ready(submit, self.world.token(index, key.choice), index)
        await self._at("moved", session, submit)
        return index

    async def run_on(self, session: DecodeSession, submit: decode_pb2.Submit, index: int, stop_after: int | None = None) -> None:
        """Steps after token `index`, to the end or until another rank has taken over."""
        choice, source = submit.key.choice, self.sources[submit.handle]
        while not (reason := self.world.finish(index, submit.sampling, choice)):
            if stop_after is not None and index + 1 >= stop_after:
                return
            if source.is_pausing:
                source.pause(index + 1)
                await self._at("paused", session, submit)
                if not await source.go_on():
                    return
            tokens: list[common_pb2.Token] = []
            while len(tokens) < self.tokens_a_step and not reason:
                index += 1
                tokens.append(self.world.token(index, choice))
                reason = self.world.finish(index, submit.sampling, choice)
            session.step(submit, index - len(tokens) + 1, tokens)
            await asyncio.sleep(self.step_s)
        session.finished(submit, index + 1, reason, self.world.token(index, choice).id if reason == common_pb2.STOP else 0)


class Source:
    """The source's side of the moves of one request."""

    def __init__(self, world: Script, session: DecodeSession, submit: decode_pb2.Submit) -> None:
        self._world, self._session, self._submit = world, session, submit
        self._move: FakeMove | None = None
        self._is_pausing = False

    def on(self, move: decode_pb2.Move) -> None:
        if move.step == decode_pb2.Move.START:
            self._move = self._world.moving(self._submit.key, move.new_attempt)
            self._move.started.set()
        elif move.step == decode_pb2.Move.PAUSE:
            self._is_pausing = True
        elif self._move is not None and not self._move.is_done:
            self.resume(common_pb2.CANCELLED)

    def resume(self, reason: common_pb2.Reason) -> None:
        """Run on here, and say so."""
        move = self._move
        self.abort()
        if move is not None:
            self._session.say(decode_pb2.Resumed, self._submit, reason=reason)

    def abort(self) -> None:
        move, self._move, self._is_pausing = self._move, None, False
        if move is not None:
            move.paused.cancel()
            move.is_over.set()

    @property
    def is_pausing(self) -> bool:
        """Whether the next step's end is the pause."""
        return self._move is not None and self._is_pausing

    def pause(self, num_tokens: int) -> None:
        assert self._move is not None
        self._session.say(decode_pb2.Paused, self._submit, num_output_tokens=num_tokens)
        self._paused = self._move
        self._move.paused.set_result(num_tokens)

    async def go_on(self) -> bool:
        """The end of the pause: whether the request runs on here."""
        await self._paused.is_over.wait()
        if self._paused.is_done:
            self._session.failed(self._submit, common_pb2.REPLACED)
        return not self._paused.is_done
