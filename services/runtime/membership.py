"""A front's side of the registry: dial every router found, say who we are, keep saying how loaded we are."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from proto.baton.v1 import registry_pb2, registry_pb2_grpc
from services.runtime.security import Security
from services.runtime.serve import cancel, first_of
from services.runtime.telemetry import count_incident

logger = logging.getLogger(__name__)

_RESOLVE_S = 2.0  # how often names are looked up again: replicas come and go
_FORGET_S = 10.0  # a router that no name lists any more, and that is not joined, is dialled this much longer
_REDIAL_S = 0.2
_LOAD_S = 0.05  # at most one load report a rank in this time


Resolve = Callable[[str], Awaitable[set[str]]]  # of one configured host:port; raises OSError or ValueError


@dataclass(eq=False)
class _Link:
    """One router's address."""

    task: "asyncio.Task[None]"
    is_joined: bool = False
    missed_since: float = 0.0  # when it was last listed or joined


class Membership:
    """Joins every router that the configured names resolve to. `member(local_host)` and `loads()` give what is true now, `local_host`
    being the address of this machine that the router is dialled from.

    A name says whom to dial, never whom to leave: a router that is joined stays so for as long as its stream lives, whatever names list,
    since streams of its clients run here; and while a name cannot be resolved, what it listed last stands.
    """

    def __init__(
        self, routers: Sequence[str], member: Callable[[str], registry_pb2.Member], loads: Callable[[], Sequence[registry_pb2.Load]],
        on_joined: Callable[[str], None], security: Security, *, resolve: Resolve | None = None, resolve_s: float = _RESOLVE_S,
        forget_s: float = _FORGET_S,
    ) -> None:
        """`on_joined(address)` runs whenever a router has let us in. Raises ConfigError when one must not be dialled
        in the clear."""
        for address in routers:
            security.check_dial(address)
        self._security = security
        self._resolve, self._resolve_s, self._forget_s = resolve or resolve_address, resolve_s, forget_s
        self._listed: dict[str, set[str]] = {}  # by configured host:port, as it resolved last
        self._links: dict[str, _Link] = {}  # by numeric host:port
        self._routers = routers
        self._member = member
        self._loads = loads
        self._on_joined = on_joined
        self._changed = asyncio.Event()
        self._leaving = False
        self._version = 0
        self._explained: set[str] = set()  # routers that refuse us, and we have said why

    @property
    def num_joined(self) -> int:
        """Routers that have let us in and are there."""
        return sum(link.is_joined for link in self._links.values())

    def member_changed(self) -> None:
        """A rank came or went: say so to every router at once."""
        self._version += 1
        self._wake()

    def loads_changed(self) -> None:
        self._wake()

    def leave(self) -> None:
        """Tell every router that no new work is wanted; running work goes on."""
        self._leaving = True
        self.member_changed()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def addresses(self) -> set[str]:
        """Numeric host:port of every router that is joined or dialled."""
        return set(self._links)

    async def run(self) -> None:
        """Keep one stream a router address until cancelled."""
        try:
            await first_of(*(self._follow(name) for name in self._routers))
        finally:
            await cancel(*(link.task for link in self._links.values()))

    async def _follow(self, name: str) -> None:
        """Look one name up again and again: one that hangs holds up no other."""
        is_lost = False
        while True:
            try:
                self._listed[name] = await self._resolve(name)
                is_lost = False
            except (OSError, ValueError) as error:
                if not is_lost:
                    logger.warning("router address %s cannot be resolved, what it was stands: %s", name, error)
                is_lost = True
                count_incident("router address not resolved")
            self._dial_and_forget(asyncio.get_running_loop().time())
            await asyncio.sleep(self._resolve_s)

    def _dial_and_forget(self, now: float) -> None:
        listed = {address for addresses in self._listed.values() for address in addresses}
        for address in listed - self._links.keys():
            self._links[address] = _Link(asyncio.create_task(self._stay_joined(address)))
        for address, link in list(self._links.items()):
            if link.task.done():  # it ends by itself only when it must not dial
                link.task.result()
            if address in listed or link.is_joined:
                link.missed_since = now
            elif now - link.missed_since > self._forget_s:
                logger.info("router %s is listed no more and gone", address)
                del self._links[address]
                link.task.cancel()

    async def _stay_joined(self, address: str) -> None:
        while True:
            async with self._security.open_channel(address) as channel:
                try:
                    call = registry_pb2_grpc.RegistryStub(channel).Join(self._updates(local_host(address)))
                    async for update in call:
                        logger.info("joined router %s at %s", update.welcome.router_id, address)
                        self._explained.discard(address)
                        self._links[address].is_joined = True
                        self._on_joined(address)
                except grpc.aio.AioRpcError as error:
                    await self._tell(address, error)
                except OSError as error:
                    logger.info("router %s: no way there from this machine (%s)", address, error.strerror)
            self._links[address].is_joined = False
            await asyncio.sleep(_REDIAL_S)

    async def _tell(self, address: str, error: grpc.aio.AioRpcError) -> None:
        """A router that is not there may come; one that will never let us in is worth a warning, once."""
        reason = error.details() or error.code().name
        if error.code() == grpc.StatusCode.UNAVAILABLE and address not in self._explained:
            reason = await self._security.why_refused(address) or reason
        is_news = address not in self._explained and (error.code() != grpc.StatusCode.UNAVAILABLE or reason != error.details())
        if is_news:
            self._explained.add(address)
        logger.log(logging.WARNING if is_news else logging.INFO, "router %s: %s", address, reason)

    async def _updates(self, host: str) -> AsyncIterator[registry_pb2.MemberUpdate]:
        said_version, said_loads = -1, None
        while True:
            changed = self._changed
            if said_version != self._version:
                said_version = self._version
                yield registry_pb2.MemberUpdate(member=self._member(host))
                if self._leaving:
                    yield registry_pb2.MemberUpdate(leaving=registry_pb2.Leaving())
            loads = list(self._loads())
            if loads != said_loads:
                said_loads = loads
                for load in loads:
                    yield registry_pb2.MemberUpdate(load=load)
                await asyncio.sleep(_LOAD_S)
            if changed is self._changed:
                await changed.wait()


def local_host(address: str) -> str:
    """The address of this machine, IPv6 in brackets, that `address` (numeric host:port) is dialled from. OSError without a route."""
    host, _, port = address.rpartition(":")
    is_v6 = host.startswith("[")
    with socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host.strip("[]"), int(port)))  # sends nothing: the kernel alone chooses the way
        name = probe.getsockname()[0]
    return f"[{name}]" if is_v6 else name


async def resolve_address(address: str) -> set[str]:
    """Every numeric host:port behind a configured one. Raises OSError or ValueError when it cannot be resolved now."""
    host, _, port = address.rpartition(":")
    # Only what is written as an IPv6 address is one: a name with both kinds would be one router joined twice.
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    infos = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), family=family, type=socket.SOCK_STREAM)
    return {f"[{info[4][0]}]:{port}" if family == socket.AF_INET6 else f"{info[4][0]}:{port}" for info in infos}
