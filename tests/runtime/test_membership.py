"""A front joins every router, says what changes, and dials again when a router was away."""

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from typing import Any

import pytest

from proto.baton.v1 import registry_pb2, registry_pb2_grpc
from services.runtime import membership as membership_module
from services.runtime.membership import Membership, local_host
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
async def joined(*routers: str) -> AsyncIterator[tuple[Membership, list[str], list[registry_pb2.Load]]]:
    told: list[str] = []
    loads: list[registry_pb2.Load] = []
    membership = Membership(
        routers, lambda local_host: registry_pb2.Member(front_id="f", address=local_host), lambda: loads, told.append, INSECURE
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
        await until(lambda: registry.kinds() == ["member"], "joined")
        assert asked == [server.address] * 3 and told == [server.address]
    await server.stop(0)
