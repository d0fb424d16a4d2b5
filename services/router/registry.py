"""Registry.Join: fronts come, say how loaded they are, and are gone when their stream is."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from proto.baton.v1 import registry_pb2, registry_pb2_grpc
from services.router.pool import Pool
from services.runtime.errors import InvalidRequest
from services.runtime.serve import WIRE_VERSION, abort


class RegistryServicer(registry_pb2_grpc.RegistryServicer):
    """One Join stream a front; the stream's life is the membership."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._streams: dict[str, object] = {}  # front id -> the stream that speaks for it: a front that dials again replaces its old one

    async def Join(
        self, request_iterator: AsyncIterator[registry_pb2.MemberUpdate], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[registry_pb2.RegistryUpdate]:
        front_id, role, stream = "", "", object()
        try:
            async for update in request_iterator:
                kind = update.WhichOneof("update")
                if kind == "member":
                    said = update.member.front_id, update.member.role
                    if front_id and said != (front_id, role):
                        limit = f"this stream speaks for {front_id!r} of role {role}; another front has a stream of its own"
                        raise InvalidRequest("front_id and role", said, limit)
                    self._pool.join(update.member)
                    if not front_id:
                        welcome = registry_pb2.Welcome(router_id=self._pool.router_id, wire_version=WIRE_VERSION)
                        yield registry_pb2.RegistryUpdate(welcome=welcome)
                    front_id, role = said
                    self._streams[front_id] = stream
                elif not front_id:
                    raise InvalidRequest("update", kind, "the first message of Join must be member")
                elif kind == "load":
                    self._pool.report(update.load)
                elif kind == "leaving":
                    self._pool.leaving(front_id)
        except InvalidRequest as error:
            await abort(context, error)
        finally:
            if self._streams.get(front_id) is stream:
                del self._streams[front_id]
                self._pool.lose(front_id)
