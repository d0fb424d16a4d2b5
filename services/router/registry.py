"""Registry.Join: fronts come, say how loaded they are, and are gone when their stream is and they do not dial again."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from proto.baton.v1 import common_pb2, registry_pb2, registry_pb2_grpc
from services.router.pool import Pool
from services.runtime.errors import InvalidRequest
from services.runtime.resume import RESUME_S
from services.runtime.serve import WIRE_VERSION, abort
from services.runtime.telemetry import count_incident


class RegistryServicer(registry_pb2_grpc.RegistryServicer):
    """One Join stream a front; the stream's life is the membership. A front whose stream broke has as long to dial again as a session."""

    def __init__(self, pool: Pool, resume_s: float = RESUME_S) -> None:
        self._pool = pool
        self._resume_s = resume_s
        self._expiries: dict[str, asyncio.TimerHandle] = {}  # front id -> when it is given up
        self._streams: dict[str, object] = {}  # front id -> the stream that speaks for it: a front that dials again replaces its old one

    async def Join(
        self, request_iterator: AsyncIterator[registry_pb2.MemberUpdate], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[registry_pb2.RegistryUpdate]:
        front_id, role, stream = "", "", object()
        try:
            async for update in request_iterator:
                kind = update.WhichOneof("update")
                if not front_id:
                    if kind != "member":
                        raise InvalidRequest("update", kind, "the first message of Join must be member")
                    self._pool.join(update.member)
                    front_id, role = update.member.front_id, update.member.role
                    self._streams[front_id] = stream
                    self._stop_expiry(front_id)
                    welcome = registry_pb2.Welcome(router_id=self._pool.router_id, wire_version=WIRE_VERSION)
                    yield registry_pb2.RegistryUpdate(welcome=welcome)
                elif self._streams.get(front_id) is not stream:
                    count_incident("registry message of a stream that was replaced", common_pb2.REPLACED)
                else:
                    self._take(update, front_id, role)
        except InvalidRequest as error:
            await abort(context, error)
        finally:
            if self._streams.get(front_id) is stream:
                del self._streams[front_id]
                self._pool.away(front_id)
                self._expiries[front_id] = asyncio.get_running_loop().call_later(self._resume_s, self._give_up, front_id)

    def _take(self, update: registry_pb2.MemberUpdate, front_id: str, role: str) -> None:
        """What a front says after its first word. Raises InvalidRequest."""
        kind = update.WhichOneof("update")
        if kind == "member":
            said = update.member.front_id, update.member.role
            if said != (front_id, role):
                limit = f"this stream speaks for {front_id!r} of role {role}; another front has a stream of its own"
                raise InvalidRequest("front_id and role", said, limit)
            self._pool.join(update.member)
        elif kind == "load":
            self._pool.report(update.load)
        elif kind == "leaving":
            self._pool.leaving(front_id)

    def _give_up(self, front_id: str) -> None:
        del self._expiries[front_id]
        self._pool.lose(front_id)

    def _stop_expiry(self, front_id: str) -> None:
        expiry = self._expiries.pop(front_id, None)
        if expiry is not None:
            expiry.cancel()
