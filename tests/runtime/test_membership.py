"""A front joins every router, says what changes, and dials again when a router was away."""

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from typing import Any

import pytest

from proto.baton.v1 import registry_pb2, registry_pb2_grpc
from services.runtime import membership as membership_module
from services.runtime.membership import Membership, Resolve, local_host
from services.runtime.serve import WIRE_VERSION, Server, cancel
from tests.clear import CLEAR, INSECURE
from tests.runtime.waiting import until


class Registry(registry_pb2_grpc.RegistryServicer):
    def __init__(self) -> None:
        self.updates: list[registry_pb2.MemberUpdate] = []

    async def Join(
        self, request_iterator: AsyncIterator[registry_pb2.MemberUpdate], context: Any
    ) -> AsyncIterator[registry_pb2.RegistryUpdate]:
        yield registry_pb2.RegistryUpdate(welcome=registry_pb2.Welcome(router_id="r", wire_version=WIRE_VERSION))
        async for update in request_iterator:
            self.updates.append(update)

    def kinds(self) -> list[str | None]:
        return [update.WhichOneof("update") for update in self.updates]


async def listening(address: str) -> tuple[Server, Registry]:
    registry = Registry()
    server = Server(address, ["baton.v1.Registry"], CLEAR)
    server.add(registry_pb2_grpc.add_RegistryServicer_to_server, registry)
    await server.start()
    return server, registry


@contextlib.asynccontextmanager
async def joined(
    *routers: str, resolve: Resolve | None = None
) -> AsyncIterator[tuple[Membership, list[str], list[registry_pb2.Load]]]:
    told: list[str] = []
    loads: list[registry_pb2.Load] = []
    membership = Membership(
        routers, lambda local_host: registry_pb2.Member(front_id="f", address=local_host), lambda: loads, told.append, INSECURE,
        resolve=resolve, resolve_s=0.02, forget_s=0.2,
    )
    task = asyncio.ensure_future(membership.run())
    try:
        yield membership, told, loads
    finally:
        await cancel(task)


async def test_every_router_hears_of_member_load_and_leaving() -> None:
    servers = [await listening("127.0.0.1:0") for _ in range(2)]
    addresses = {server.address for server, _ in servers}
    async with joined(*addresses) as (membership, told, loads):
        await until(lambda: set(told) == addresses, "both let it in")
        for _, registry in servers:
            await until(lambda registry=registry: registry.kinds() == ["member"], "the member is told")
        loads.append(registry_pb2.Load(instance_id="i", num_free_pages=3))
        membership.loads_changed()
        for _, registry in servers:
            await until(lambda registry=registry: registry.kinds() == ["member", "load"], "the load is told")
        membership.leave()
        for _, registry in servers:
            await until(lambda registry=registry: registry.kinds()[2:] == ["member", "leaving"], "the leave is told")
    for server, _ in servers:
        await server.stop(0)


async def test_a_router_that_comes_back_is_joined_again() -> None:
    server, registry = await listening("127.0.0.1:0")
    address = server.address
    async with joined(address) as (_, told, _):
        await until(lambda: registry.kinds() == ["member"], "joined")
        await server.stop(0)
        server, registry = await listening(address)
        await until(lambda: registry.kinds() == ["member"], "joined again")
        assert told == [address, address]
    await server.stop(0)


async def test_a_name_that_cannot_be_resolved_keeps_nobody_from_the_others() -> None:
    server, registry = await listening("127.0.0.1:0")
    async with joined("no.such.host.invalid:1", "no port", server.address):
        await until(lambda: registry.kinds() == ["member"], "joined")
    await server.stop(0)


async def test_a_router_is_told_the_address_that_it_is_dialled_from() -> None:
    server, registry = await listening("127.0.0.1:0")
    async with joined(server.address):
        await until(lambda: registry.kinds() == ["member"], "joined")
        assert registry.updates[0].member.address == "127.0.0.1"
    await server.stop(0)


@pytest.mark.parametrize(("router", "ours"), [("127.0.0.1:1", "127.0.0.1"), ("127.0.0.2:1", "127.0.0.1"), ("[::1]:1", "[::1]")])
def test_the_way_to_a_router_says_who_we_are(router: str, ours: str) -> None:
    assert local_host(router) == ours


async def test_a_router_without_a_route_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def none_at_first(address: str) -> str:
        asked.append(address)
        if len(asked) < 3:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        return "127.0.0.1"

    monkeypatch.setattr(membership_module, "local_host", none_at_first)
    server, registry = await listening("127.0.0.1:0")
    async with joined(server.address) as (_, told, _):
        await until(lambda: registry.kinds() == ["member"] and bool(told), "joined")
        assert asked == [server.address] * 3 and told == [server.address]
    await server.stop(0)


class Names:
    """A resolver whose answers the test gives; without one it fails, as while DNS is away."""

    def __init__(self, *addresses: str) -> None:
        self.answer: set[str] | None = set(addresses)
        self.num_asked = 0

    async def resolve(self, name: str) -> set[str]:
        assert name == "routers.test:50050"
        self.num_asked += 1
        if self.answer is None:
            raise OSError("temporary failure in name resolution")
        return self.answer

    async def asked_again(self) -> None:
        """Whoever asked with the present answer has acted on it."""
        number = self.num_asked
        await until(lambda: self.num_asked >= number + 2, "the name is looked up again")


def report(loads: list[registry_pb2.Load], membership: Membership, num_free_pages: int) -> None:
    loads[:] = [registry_pb2.Load(instance_id="i", num_free_pages=num_free_pages)]
    membership.loads_changed()


def last_load(registry: Registry) -> int:
    return max((update.load.num_free_pages for update in registry.updates if update.HasField("load")), default=0)


async def test_router_that_appears_behind_a_name_is_joined_and_one_that_vanishes_keeps_its_stream() -> None:
    (first, of_first), (second, of_second) = [await listening("127.0.0.1:0") for _ in range(2)]
    names = Names(first.address)
    async with joined("routers.test:50050", resolve=names.resolve) as (membership, told, loads):
        await until(lambda: told == [first.address], "the first one lets it in")
        names.answer = {first.address, second.address}
        await until(lambda: told == [first.address, second.address], "the second one does")
        names.answer = {second.address}
        await names.asked_again()
        report(loads, membership, 3)
        for registry in (of_first, of_second):
            await until(lambda registry=registry: last_load(registry) == 3, "both hear of the load")
        await first.stop(0)
        await until(lambda: membership.addresses == {second.address}, "the first one is gone, and dialled no more")
        assert told == [first.address, second.address]
    await second.stop(0)


async def test_failed_or_empty_lookups_drop_nobody() -> None:
    server, registry = await listening("127.0.0.1:0")
    address, names = server.address, Names(server.address)
    async with joined("routers.test:50050", resolve=names.resolve) as (membership, told, loads):
        await until(lambda: told == [address], "joined")
        for number, answer in enumerate((None, set[str]()), start=1):
            names.answer = answer
            await names.asked_again()
            report(loads, membership, number)
            await until(lambda number=number: last_load(registry) == number, "the stream goes on")
        assert told == [address], "it never had to join again"
        names.answer = {address}
        await names.asked_again()
        names.answer = None
        await server.stop(0)
        server, registry = await listening(address)
        await until(lambda: told == [address, address], "what the name listed last is dialled again")
    await server.stop(0)


async def test_a_name_that_hangs_holds_up_no_other() -> None:
    server, registry = await listening("127.0.0.1:0")

    async def resolve(name: str) -> set[str]:
        if name == "hangs.test:1":
            await asyncio.Event().wait()
        return {server.address}

    async with joined("hangs.test:1", "answers.test:1", resolve=resolve):
        await until(lambda: registry.kinds() == ["member"], "joined")
    await server.stop(0)
