"""Under mTLS, what a peer may call depends on whom its certificate names.

A certificate with `security.server_name` among its DNS names belongs to the cluster: router, front, tool. Any other of the same authorities
is a client's, and may generate, ask for health and reflect; nothing else, whatever service is added later.
"""

import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from services.runtime.errors import NotPermitted
from services.runtime.serve import abort
from services.runtime.telemetry import count_incident

logger = logging.getLogger(__name__)

_FOR_CLIENTS = ("/baton.v1.Generation/", "/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")
Context = grpc.aio.ServicerContext[Any, Any]


class PeerCheck(grpc.aio.ServerInterceptor):
    """Stands before every service of a server under mTLS."""

    def __init__(self, server_name: str) -> None:
        self._server_name = server_name

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler, behind check() unless clients may call it; see grpc.aio."""
        handler, method = await continuation(handler_call_details), str(handler_call_details.method)
        if handler is None or method.startswith(_FOR_CLIENTS):
            return handler
        kind = "_".join("stream" if streams else "unary" for streams in (handler.request_streaming, handler.response_streaming))
        guarded = _behind(getattr(handler, kind), lambda context: self.check(method, context))
        make: Callable[..., Any] = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(guarded, handler.request_deserializer, handler.response_serializer)

    async def check(self, method: str, context: Context) -> None:
        """End the call with PERMISSION_DENIED unless the peer's certificate names `server_name`."""
        names = [name.decode(errors="replace") for name in context.auth_context().get("peer_dns", ())]
        if self._server_name not in names:
            count_incident("call not permitted")
            logger.info("%s refused to %s, whose certificate names %s", method, context.peer(), names)
            await abort(context, NotPermitted(
                f"{method.removeprefix('/')} is for the cluster's own certificates, which name {self._server_name}; this one does not"
            ))


def _behind(behaviour: Callable[..., Any], check: Callable[[Context], Awaitable[None]]) -> Callable[..., Any]:
    """`behaviour` after `check`, of the same kind: gRPC tells generators from coroutines."""
    if inspect.isasyncgenfunction(behaviour):
        async def generator(request: Any, context: Context) -> AsyncIterator[Any]:
            await check(context)
            async with contextlib.aclosing(behaviour(request, context)) as replies:
                async for reply in replies:
                    yield reply
        return generator

    async def coroutine(request: Any, context: Context) -> Any:
        await check(context)
        return await behaviour(request, context)
    return coroutine
