"""What every gRPC server and channel of Baton has in common: options, health, reflection, status mapping."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.runtime import errors

if TYPE_CHECKING:
    from services.runtime.security import Security

# Version of proto/baton/v1 (NIXL notifications have their own, services/kv/messages.py); unequal peers refuse each other.
#   1  first
#   2  sessions resume, requests move between decode ranks, several choices a prefill, agents renewed
WIRE_VERSION = 2

ERROR_KEY = "baton-error"  # trailing metadata: class of the error
# Of one message between routers and fronts: three million token ids, or a step of thousands of requests with their logprobs. What clients
# may send a router is bounded by the model (services/router/server.py).
MAX_MESSAGE_BYTES = 16 * 2**20
# gRPC's own keepalive is what notices a peer that vanished without closing (DESIGN.md section 3: 2 s / 3 s both ways).
_COMMON_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),  # without it an unanswered ping is waited for a minute, whatever keepalive says
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # a second process on the same port must fail
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
]
CHANNEL_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),
    # A peer that was away is dialled again at once and then every 0.2 s to 1 s: what was broken may be resumed for 3 s only.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1000),  # how long one try to connect may take
    ("grpc.max_reconnect_backoff_ms", 1000),
]

_STATUS: dict[type[errors.BatonError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NotPermitted: grpc.StatusCode.PERMISSION_DENIED,
    errors.NoMember: grpc.StatusCode.UNAVAILABLE,
    errors.HandoffError: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.EngineError: grpc.StatusCode.INTERNAL,
    errors.SetupError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.BatonError: grpc.StatusCode.INTERNAL,
}


def status_of(error: errors.BatonError) -> grpc.StatusCode:
    """gRPC status of `error`: that of the nearest class in the tree of errors.py."""
    return next(_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: errors.BatonError) -> None:
    """End an RPC with the status of `error`; never returns normally. Trailing metadata says that the error is Baton's own and not
    the connection's, and when to try again."""
    trailing = [(ERROR_KEY, type(error).__name__)]
    if isinstance(error, errors.Overloaded):
        trailing.append(("retry-after-ms", str(int(error.retry_after_s * 1000))))
    await context.abort(status_of(error), str(error), tuple(trailing))


async def is_refused(address: str) -> bool:
    """Whether nobody listens at `address` (host:port) although its host answers: no process there will come back to what it had."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):  # not to be reached now: that may pass
        return False
    writer.close()
    return False


class Server:
    """A gRPC server with health and reflection that is NOT_SERVING until told otherwise."""

    def __init__(self, address: str, services: Sequence[str], security: "Security", max_request_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """`max_request_bytes`: a larger message is refused with RESOURCE_EXHAUSTED. Raises ConfigError when `address` must not be
        served as `security` is."""
        security.check_listen(address, "gRPC")
        self._credentials = security.server_credentials()
        options = [*dict([*SERVER_OPTIONS, ("grpc.max_receive_message_length", max_request_bytes)]).items()]
        self._server = grpc.aio.server(options=options, interceptors=security.interceptors())
        self._services = services
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
                                             reflection.SERVICE_NAME], self._server)
        self._requested = address
        self.address = ""  # host:port really bound, after start()

    def add(self, register: Callable[[Any, grpc.aio.Server], None], servicer: object) -> None:
        """`register` = the generated add_XServicer_to_server."""
        register(servicer, self._server)

    async def start(self) -> None:
        """Bind and listen. Raises SetupError when the port is taken."""
        host, _, wanted = self._requested.rpartition(":")
        try:
            # Tried first without gRPC, whose core would write lines of its own about a port that is taken.
            family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
            with socket.create_server((host.strip("[]"), int(wanted)), family=family):
                pass
            if self._credentials is None:
                port = self._server.add_insecure_port(self._requested)
            else:
                port = self._server.add_secure_port(self._requested, self._credentials)
        except (OSError, OverflowError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or "it is no host:port"
            advice = "choose another address (port 0 = any free one)"
            raise errors.SetupError(f"cannot listen on {self._requested} ({reason}); {advice}") from None
        await self._server.start()
        self.address = f"{host}:{port}"

    async def set_serving(self, serving: bool) -> None:
        """Answer of grpc.health.v1.Health for "" and every service."""
        for name in ("", *self._services):
            await self.set_health(name, serving)

    async def set_health(self, name: str, serving: bool) -> None:
        """Answer of grpc.health.v1.Health for one name."""
        kinds = health_pb2.HealthCheckResponse
        await self._health.set(name, kinds.SERVING if serving else kinds.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)


async def first_of(*awaitables: Awaitable[Any]) -> None:
    """Wait until one of `awaitables` is done, cancel the rest, and raise what the first one raised."""
    tasks = [asyncio.ensure_future(item) for item in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel(*tasks)


async def cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel `tasks` and wait until they are gone; their outcome is of no interest any more. Being cancelled meanwhile goes through."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # looked at: asyncio need not complain
