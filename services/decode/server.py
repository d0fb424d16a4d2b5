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
from services.decode.messages import Cancel, Event, Failed, Finished, RequestEvent, SessionLost, StepOut
from services.decode.session import RouterSession
from services.runtime.errors import BatonError, EngineError, HandoffError, InvalidRequest
from services.runtime.front import run_front
from services.runtime.serve import WIRE_VERSION, Server, abort
from services.runtime.supervisor import RankProcess

SERVICE = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name

logger = logging.getLogger(__name__)


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """The gRPC servicer and the PoolService of `runtime/front.py`."""

    def __init__(self, drain_s: float) -> None:
        self._drain_s = drain_s
        self._draining = False
        self._ranks: Sequence[RankProcess] = ()
        self._sessions: dict[int, RouterSession] = {}
        self._numbers = itertools.count(1)

    @property
    def num_sessions(self) -> int:
        """Open sessions, of all ranks."""
        return len(self._sessions)

    # ---- PoolService

    def register(self, server: Server) -> None:
        """See PoolService."""
        server.add(decode_pb2_grpc.add_DecodeServicer_to_server, self)

    def attach(self, ranks: Sequence[RankProcess]) -> None:
        """See PoolService."""
        self._ranks = ranks

    def drain(self) -> None:
        """See PoolService: running requests go on, new ones are refused."""
        self._draining = True
        for session in self._sessions.values():
            session.push(decode_pb2.SessionReply(draining=decode_pb2.Draining(seconds_left=int(self._drain_s))))

    def num_active(self) -> int:
        """See PoolService."""
        return sum(len(session.requests) for session in self._sessions.values())

    def on_event(self, rank: RankProcess, event: RequestEvent) -> None:
        """See PoolService. What concerns a request or session that is over here is dropped."""
        session = self._sessions.get(event.session)
        if session is None or not (isinstance(event, StepOut) or event.handle in session.requests):
            return
        try:
            reply = wire.to_reply(event, session.requests)
        except Exception as error:
            logger.exception("an engine's %s is no reply", type(event).__name__)
            self._fail_unsendable(session, event, error)
            return
        session.push(reply)
        if isinstance(event, Finished | Failed):
            del session.requests[event.handle]

    def _fail_unsendable(self, session: RouterSession, event: RequestEvent, error: Exception) -> None:
        """Fail the requests that an event names, at the engine too, and nothing else."""
        for handle in event.handles if isinstance(event, StepOut) else [event.handle]:
            if handle in session.requests:
                if not isinstance(event, Finished | Failed):
                    with contextlib.suppress(EngineError):  # it reads no more commands: its supervisor is about to end it
                        session.rank.send(Cancel(session.number, handle, common_pb2.INTERNAL))
                self._fail(session, handle, common_pb2.INTERNAL, f"the engine's {type(event).__name__} cannot be sent: {error}")

    def on_down(self, rank: RankProcess, instance_id: str) -> None:
        """See PoolService."""
        message = f"engine {instance_id} of rank {rank.rank} is gone"
        for session in self._sessions.values():
            if session.instance_id == instance_id:
                for handle in list(session.requests):
                    self._fail(session, handle, common_pb2.ENGINE_DIED, message)
                session.end(HandoffError(common_pb2.ENGINE_DIED, message))

    # ---- Decode

    async def Session(
        self, request_iterator: AsyncIterator[decode_pb2.SessionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """One router's stream with one rank; however it ends, the engine forgets its requests.

        Writes rather than yields: a cancelled call then ends right here, and not when a generator is collected.
        """
        session = await self._open(request_iterator, context)
        reader = asyncio.create_task(self._read(session, request_iterator))
        try:
            async for reply in session.replies():
                await context.write(reply)
        except BatonError as error:
            await abort(context, error)
        finally:
            reader.cancel()
            self._close(session)

    async def _open(
        self, requests: AsyncIterator[decode_pb2.SessionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> RouterSession:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("message") != "open":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a session must be `open`")
        opened = first.open
        if opened.wire_version != WIRE_VERSION:
            message = f"wire version is {WIRE_VERSION} here and {opened.wire_version} at the router; run one version"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        rank = next((rank for rank in self._ranks if rank.up is not None and rank.up.instance_id == opened.instance_id), None)
        if rank is None:
            message = f"instance {opened.instance_id} is not up here; the member list names those that are"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        session = RouterSession(next(self._numbers), rank, opened.instance_id, opened.router_id)
        self._sessions[session.number] = session
        # A broken session is not kept, so there is nothing to resume: the router replays what it had in it.
        session.push(decode_pb2.SessionReply(opened=decode_pb2.SessionOpened(resumed=False, wire_version=WIRE_VERSION)))
        return session

    async def _read(self, session: RouterSession, requests: AsyncIterator[decode_pb2.SessionRequest]) -> None:
        try:
            async for request in requests:
                self._take(session, request)
        except BatonError as error:
            session.end(error)
        finally:
            session.end(None)

    def _take(self, session: RouterSession, request: decode_pb2.SessionRequest) -> None:
        match request.WhichOneof("message"):
            case "submit":
                self._submit(session, request.submit)
            case "cancel":
                if session.requests.pop(request.cancel.handle, None) is not None:
                    session.rank.send(Cancel(session.number, request.cancel.handle, wire.to_reason(request.cancel.reason)))
            case "move":  # the request ends here on both sides, so that router and engine agree on who owns it
                if request.move.handle in session.requests:
                    session.rank.send(Cancel(session.number, request.move.handle, common_pb2.INTERNAL))
                self._fail(session, request.move.handle, common_pb2.INTERNAL, "this rank cannot move requests; let it drain")
            case kind:
                raise InvalidRequest("message", kind, "a session takes submit, cancel and move after its one `open`")

    def _submit(self, session: RouterSession, message: decode_pb2.Submit) -> None:
        handle, up = message.handle, session.rank.up
        if handle in session.requests:
            raise InvalidRequest("submit.handle", handle, "it is in use; every attempt has a fresh one")
        session.requests[handle] = message.key.attempt
        if self._draining:
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

    def _fail(self, session: RouterSession, handle: int, reason: int, message: str) -> None:
        session.push(wire.failed(handle, session.requests.pop(handle, 0), reason, message))

    def _close(self, session: RouterSession) -> None:
        del self._sessions[session.number]
        if session.requests and session.rank.up is not None and session.rank.up.instance_id == session.instance_id:
            logger.info("session %d of router %s ended with %d requests", session.number, session.router_id, len(session.requests))
            session.rank.send(SessionLost(session.number))


def main() -> None:
    """Run the front until a signal, then drain."""
    run_front("decode", service=SERVICE, event_type=Event, pool=lambda config: DecodeService(config.decode.drain_s))
