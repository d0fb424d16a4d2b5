"""Front of a decode pool: `baton.v1.Decode`, whose sessions become commands to the ranks and events back into replies."""
import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio

from proto.baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from services.decode import wire
from services.decode.messages import Cancel, Event, Failed, Finished, RequestEvent, Resumed, SessionLost, StepOut
from services.decode.session import RouterSession
from services.runtime.errors import BatonError, EngineError, HandoffError, InvalidRequest
from services.runtime.front import run_front
from services.runtime.resume import RESUME_S
from services.runtime.serve import WIRE_VERSION, Server, abort
from services.runtime.supervisor import RankProcess
from services.runtime.telemetry import count_incident

SERVICE = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name

logger = logging.getLogger(__name__)


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """The gRPC servicer and the PoolService of `runtime/front.py`."""

    def __init__(self, drain_s: float, resume_s: float = RESUME_S) -> None:
        self._drain_s, self._resume_s = drain_s, resume_s
        self._drain_ends_at: float | None = None  # the loop's clock; set once draining
        self._ranks: Sequence[RankProcess] = ()
        self._sessions: dict[int, RouterSession] = {}
        self._numbers = itertools.count(1)
        self._renewed: dict[str, str] = {}  # former instance id -> present one, of engines that live

    @property
    def num_sessions(self) -> int:
        """Sessions open or to be resumed, of all ranks."""
        return len(self._sessions)

    # ---- PoolService

    def register(self, server: Server) -> None:
        """See PoolService."""
        server.add(decode_pb2_grpc.add_DecodeServicer_to_server, self)

    def attach(self, ranks: Sequence[RankProcess]) -> None:
        """See PoolService."""
        self._ranks = ranks

    def drain(self) -> None:
        """See PoolService: running requests go on until they end or move, new ones are refused. What is left after `drain_s` fails."""
        loop = asyncio.get_running_loop()
        self._drain_ends_at = loop.time() + self._drain_s
        loop.call_later(self._drain_s, self._end_drain)
        for session in self._sessions.values():
            self._tell_draining(session, self._drain_s)

    def _tell_draining(self, session: RouterSession, seconds_left: float) -> None:
        session.push(decode_pb2.SessionReply(draining=decode_pb2.Draining(seconds_left=int(seconds_left))))

    def _end_drain(self) -> None:
        for session in list(self._sessions.values()):
            for handle in list(session.requests):
                self._expel(session, handle, common_pb2.DRAINING, f"it neither ended nor moved within {self._drain_s:g} s of the drain")

    def num_active(self) -> int:
        """See PoolService."""
        return sum(len(session.requests) for session in self._sessions.values())

    def on_event(self, rank: RankProcess, event: RequestEvent) -> None:
        """See PoolService. What concerns a request or session that is over here is dropped."""
        session = self._sessions.get(event.session)
        if session is None or not (isinstance(event, StepOut) or event.handle in session.requests):
            count_incident("event of a request that is over")
            return
        try:
            reply = wire.to_reply(event, session.requests)
        except Exception as error:
            logger.exception("an engine's %s is no reply", type(event).__name__)
            self._fail_unsendable(session, event, error)
            return
        if isinstance(event, Finished | Failed):
            del session.requests[event.handle]
        session.push(reply)

    def _fail_unsendable(self, session: RouterSession, event: RequestEvent, error: Exception) -> None:
        """Fail the requests that an event names, at the engine too, and nothing else."""
        text = f"the engine's {type(event).__name__} cannot be sent: {error}"
        for handle in event.handles if isinstance(event, StepOut) else [event.handle]:
            if handle not in session.requests:
                continue
            if isinstance(event, Finished | Failed):
                self._fail(session, handle, common_pb2.INTERNAL, text)
            else:
                self._expel(session, handle, common_pb2.INTERNAL, text)

    def on_renewed(self, rank: RankProcess, former_instance_id: str) -> None:
        """See PoolService: sessions live on, and routers that have not heard of it yet may still resume theirs."""
        up = rank.up
        if up is None:
            return
        self._renewed = {
            former: up.instance_id if present == former_instance_id else present for former, present in self._renewed.items()
        } | {former_instance_id: up.instance_id}
        for session in self._sessions.values():
            if session.instance_id == former_instance_id:
                session.instance_id = up.instance_id

    def on_down(self, rank: RankProcess, instance_id: str) -> None:
        """See PoolService."""
        message = f"engine {instance_id} of rank {rank.rank} is gone"
        self._renewed = {former: present for former, present in self._renewed.items() if present != instance_id}
        for session in list(self._sessions.values()):
            if session.instance_id == instance_id:
                for handle in list(session.requests):
                    self._fail(session, handle, common_pb2.ENGINE_DIED, message)
                session.end(HandoffError(common_pb2.ENGINE_DIED, message))

    # ---- Decode

    async def Session(
        self, request_iterator: AsyncIterator[decode_pb2.SessionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """One stream of one router's session with one rank. The session waits for another stream after it; then the engine forgets it.

        Writes rather than yields: a cancelled call then ends right here, and not when a generator is collected.
        """
        session, stream, opened = await self._open(request_iterator, context)
        reader = asyncio.create_task(self._read(session, stream, request_iterator))
        try:
            await context.write(decode_pb2.SessionReply(opened=opened))
            async for reply in session.replies(stream):
                await context.write(reply)
        except BatonError as error:
            await abort(context, error)
        finally:
            reader.cancel()
            session.detach(stream)

    async def _open(
        self, requests: AsyncIterator[decode_pb2.SessionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> tuple[RouterSession, int, decode_pb2.SessionOpened]:
        """The session that a new stream carries, the stream's number, and what the router is told of it."""
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("message") != "open":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a session must be `open`")
        asked = first.open
        if asked.wire_version != WIRE_VERSION:
            message = f"wire version is {WIRE_VERSION} here and {asked.wire_version} at the router; run one version"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        present = self._renewed.get(asked.instance_id, asked.instance_id)
        rank = next((rank for rank in self._ranks if rank.up is not None and rank.up.instance_id == present), None)
        if rank is None:
            message = f"instance {asked.instance_id} is not up here; the member list names those that are"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        session = next((old for old in self._sessions.values() if (old.router_id, old.rank) == (asked.router_id, rank)), None)
        resumed = session is not None and session.can_resume(asked.next_message)
        if asked.next_message:
            count_incident("session resumed" if resumed else "session not resumed")
        if session is None or not resumed:
            session = self._replace(session, rank, present, asked.router_id)
        stream = session.attach(asked.next_message or 1)
        opened = decode_pb2.SessionOpened(resumed=resumed, wire_version=WIRE_VERSION, next_request=session.stream.next_expected)
        return session, stream, opened

    def _replace(self, old: RouterSession | None, rank: RankProcess, instance_id: str, router_id: str) -> RouterSession:
        """A new session; what the router had in an old one is not wanted any more."""
        if old is not None:
            old.abandon()
        session = RouterSession(number=next(self._numbers), rank=rank, instance_id=instance_id, router_id=router_id,
                                resume_s=self._resume_s, on_over=self._forget)
        self._sessions[session.number] = session
        if self._drain_ends_at is not None:
            self._tell_draining(session, max(self._drain_ends_at - asyncio.get_running_loop().time(), 0.0))
        return session

    async def _read(self, session: RouterSession, stream: int, requests: AsyncIterator[decode_pb2.SessionRequest]) -> None:
        """Until the stream ends or another takes over. gRPC tells a broken stream and a half-closed one by the same end."""
        try:
            async for request in requests:
                if stream != session.stream.current:
                    return
                if session.stream.take(request.sequence, request.ack):
                    self._take(session, request)
                elif request.WhichOneof("message") is not None and not request.sequence:
                    raise InvalidRequest("sequence", 0, "submit, cancel and move are numbered from 1; `open` comes once")
        except BatonError as error:
            session.end(error)

    def _take(self, session: RouterSession, request: decode_pb2.SessionRequest) -> None:
        match request.WhichOneof("message"):
            case "submit":
                self._submit(session, request.submit)
            case "cancel":
                if session.requests.pop(request.cancel.handle, None) is not None:
                    with contextlib.suppress(EngineError):  # it reads no more commands: its supervisor is about to end it
                        session.rank.send(Cancel(session.number, request.cancel.handle, wire.to_reason(request.cancel.reason)))
            case "move":
                self._move(session, request.move)
            case kind:
                raise InvalidRequest("message", kind, "a session takes submit, cancel and move after its one `open`")

    def _submit(self, session: RouterSession, message: decode_pb2.Submit) -> None:
        handle, up = message.handle, session.rank.up
        if handle in session.requests:
            raise InvalidRequest("submit.handle", handle, "it is in use; every attempt has a fresh one")
        session.requests[handle] = message.key.attempt
        if self._drain_ends_at is not None:
            self._fail(session, handle, common_pb2.DRAINING, "this rank drains and takes no new request; try another")
        elif up is None or up.instance_id != session.instance_id:
            self._fail(session, handle, common_pb2.ENGINE_DIED, f"engine {session.instance_id} is gone")
        elif message.fingerprint != up.fingerprint:
            text = f"fingerprint is {up.fingerprint} here and {message.fingerprint} at the holder; pair ranks of one model and revision"
            self._fail(session, handle, common_pb2.FINGERPRINT_MISMATCH, text)
        else:
            try:
                session.rank.send(wire.to_submit(session.number, message, up.vocab_size))
            except InvalidRequest as error:
                self._fail(session, handle, common_pb2.INVALID, str(error))
            except EngineError as error:
                self._fail(session, handle, common_pb2.ENGINE_DIED, str(error))

    def _move(self, session: RouterSession, message: decode_pb2.Move) -> None:
        """Pass a step of a move on; one that cannot be taken is answered by `resumed`: the request runs on here."""
        handle, up = message.handle, session.rank.up
        if handle not in session.requests:  # its end has crossed the move
            count_incident("move of a request that is over")
        elif message.step == decode_pb2.Move.START and up is not None and message.fingerprint != up.fingerprint:
            text = f"fingerprint is {up.fingerprint} here and {message.fingerprint} at the reader; pair ranks of one model and revision"
            refused = Resumed(session.number, handle, common_pb2.FINGERPRINT_MISMATCH, text)
            count_incident("move refused", common_pb2.FINGERPRINT_MISMATCH)
            session.push(wire.to_reply(refused, session.requests))
        else:
            try:
                session.rank.send(wire.to_move(session.number, message))
            except EngineError as error:  # that it is dead, all of the session will hear when the front does
                session.push(wire.to_reply(Resumed(session.number, handle, common_pb2.ENGINE_DIED, str(error)), session.requests))

    def _fail(self, session: RouterSession, handle: int, reason: int, message: str) -> None:
        session.push(wire.failed(handle, session.requests.pop(handle, 0), reason, message))

    def _expel(self, session: RouterSession, handle: int, reason: int, message: str) -> None:
        """Fail a request that its engine still has."""
        with contextlib.suppress(EngineError):  # it reads no more commands: its supervisor is about to end it
            session.rank.send(Cancel(session.number, handle, reason))
        self._fail(session, handle, reason, message)

    def _forget(self, session: RouterSession) -> None:
        """The session is over: so are its requests, at the engine too."""
        del self._sessions[session.number]
        if session.requests and session.rank.up is not None and session.rank.up.instance_id == session.instance_id:
            count_incident("session lost", common_pb2.SESSION_LOST)
            logger.warning("session %d of router %s is lost with %d requests", session.number, session.router_id, len(session.requests))
            with contextlib.suppress(EngineError):  # it reads no more commands: its supervisor is about to end it
                session.rank.send(SessionLost(session.number))
        session.requests.clear()


def main() -> None:
    """Run the front until a signal, then drain."""
    run_front("decode", service=SERVICE, event_type=Event, pool=lambda config: DecodeService(config.decode.drain_s))
