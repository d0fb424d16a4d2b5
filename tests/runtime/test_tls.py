"""mTLS between real servers and channels: who gets in, as whom, and what happens when certificates are renewed."""

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proto.baton.v1 import generation_pb2, generation_pb2_grpc, prefill_pb2, prefill_pb2_grpc, registry_pb2, registry_pb2_grpc
from services.runtime.security import Security
from services.runtime.serve import Server
from services.runtime.telemetry import INCIDENTS
from tests.clear import CLEAR
from tests.runtime.keys_rig import Keys, changed, keys_in

Clients = dict[str, grpc.StatusCode]


class Services(generation_pb2_grpc.GenerationServicer, registry_pb2_grpc.RegistryServicer, prefill_pb2_grpc.PrefillServicer):
    """A method of each kind that the check must cover; all answer anybody."""

    async def GetInfo(self, request: Any, context: Any) -> generation_pb2.GetInfoReply:
        return generation_pb2.GetInfoReply(model="here")

    async def Run(self, request: Any, context: Any) -> prefill_pb2.PrefillReply:
        return prefill_pb2.PrefillReply()

    async def Join(self, request_iterator: Any, context: Any) -> AsyncIterator[registry_pb2.RegistryUpdate]:
        async for _ in request_iterator:
            yield registry_pb2.RegistryUpdate(welcome=registry_pb2.Welcome(router_id="r"))


@contextlib.asynccontextmanager
async def serving(security: Security, **options: Any) -> AsyncIterator[str]:
    server, services = Server("127.0.0.1:0", ["baton.v1.Generation"], security, **options), Services()
    server.add(generation_pb2_grpc.add_GenerationServicer_to_server, services)
    server.add(registry_pb2_grpc.add_RegistryServicer_to_server, services)
    server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, services)
    await server.start()
    await server.set_serving(True)
    yield server.address
    await server.stop(0)


async def outcome(security: Security, address: str, method: str) -> grpc.StatusCode:
    """How one call over a channel of its own ends."""
    async with security.open_channel(address) as channel:
        try:
            if method == "GetInfo":
                await generation_pb2_grpc.GenerationStub(channel).GetInfo(generation_pb2.GetInfoRequest(), timeout=10)
            elif method == "Health":
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            elif method == "Run":
                await prefill_pb2_grpc.PrefillStub(channel).Run(prefill_pb2.PrefillRequest(), timeout=10)
            else:
                call: Any = registry_pb2_grpc.RegistryStub(channel).Join(iter([registry_pb2.MemberUpdate()]), timeout=10)
                assert [reply.welcome.router_id async for reply in call] == ["r"]
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", ["GetInfo", "Health", "Run", "Join"])
async def test_the_clusters_own_may_call_everything_and_a_client_what_is_for_clients(method: str, keys: Keys) -> None:
    refused = INCIDENTS.labels("call not permitted", "")
    before = refused._value.get()  # pyright: ignore
    async with serving(keys.inner) as address:
        assert await outcome(keys.inner, address, method) == grpc.StatusCode.OK
        is_clients = method in ("GetInfo", "Health")
        assert await outcome(keys.client, address, method) == (grpc.StatusCode.OK if is_clients else grpc.StatusCode.PERMISSION_DENIED)
    assert refused._value.get() - before == (0 if is_clients else 1)  # pyright: ignore


async def test_a_service_added_later_is_closed_to_clients(keys: Keys) -> None:
    async with serving(keys.inner) as address, keys.client.open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/baton.v1.Generations/GetInfo")(b"")  # a name that only begins alike, and nobody has
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_strangers_are_refused_and_told_why(keys: Keys, other_keys: Keys) -> None:
    async with serving(keys.inner) as address:
        strangers = ((CLEAR, "it speaks TLS: give the certificate, key and ca"), (other_keys.client, "its certificate is none that"))
        for security, why in strangers:
            assert await outcome(security, address, "GetInfo") == grpc.StatusCode.UNAVAILABLE
            assert why in await security.why_refused(address)
        half = Security.of(keys_with_ca(other_keys, keys))  # believes the server, who does not believe it
        assert await outcome(half, address, "GetInfo") == grpc.StatusCode.UNAVAILABLE
        assert "it does not accept" in await half.why_refused(address) and "client.pem" in await half.why_refused(address)
        assert await keys.client.why_refused(address) == ""
    async with serving(CLEAR) as address:
        assert await outcome(keys.client, address, "GetInfo") == grpc.StatusCode.UNAVAILABLE
        assert "it speaks no TLS" in await keys.client.why_refused(address)
        assert await CLEAR.why_refused(address) == ""
    assert await keys.client.why_refused(address) == "", "nobody listens there any more"


def keys_with_ca(whose: Keys, authority: Keys) -> Any:
    return changed(whose.section("client"), ca=authority.section().ca)


async def test_a_server_without_the_clusters_name_is_not_believed(keys: Keys) -> None:
    """A client's certificate, of the same authority, cannot pass for a router."""
    pretender = Security.of(changed(keys.section("client"), server_name="client.baton"))
    async with serving(pretender) as address:
        assert await outcome(keys.client, address, "GetInfo") == grpc.StatusCode.UNAVAILABLE
        assert "vouches for as baton.internal" in await keys.client.why_refused(address)


async def test_renewed_certificates_are_taken_up_while_serving(keys: Keys, other_keys: Keys, tmp_path: Path) -> None:
    folder = tmp_path / "live"
    shutil.copytree(keys.folder, folder)
    for name in ("inner", "client"):
        text = (folder / f"{name}.toml").read_text().replace(str(keys.folder), str(folder))
        (folder / f"{name}.toml").write_text(text)
    live = Keys(folder)
    security = live.inner
    async with serving(security) as address, keys.client.open_channel(address) as long_lived:
        stub = generation_pb2_grpc.GenerationStub(long_lived)
        await stub.GetInfo(generation_pb2.GetInfoRequest())
        (folder / "inner.key").write_bytes(b"half written")
        assert await outcome(keys.client, address, "GetInfo") == grpc.StatusCode.OK, "what cannot be used changes nothing"
        for name in ("ca.pem", "inner.key", "inner.pem"):
            shutil.copy(other_keys.folder / name, folder / f"{name}.new")
            os.replace(folder / f"{name}.new", folder / name)
        assert await outcome(other_keys.client, address, "GetInfo") == grpc.StatusCode.OK
        assert await outcome(keys.client, address, "GetInfo") == grpc.StatusCode.UNAVAILABLE
        assert await outcome(security, address, "Run") == grpc.StatusCode.OK, "new channels read the files anew"
        await stub.GetInfo(generation_pb2.GetInfoRequest())  # what is connected stays


async def test_names_for_clients_are_in_the_certificate(tmp_path: Path) -> None:
    """A foreign client checks the name that it dials."""
    named = keys_in(tmp_path / "named", ("router.example", "127.0.0.1"))
    pem = named.client._tls.current()  # pyright: ignore
    credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)
    async with serving(named.inner) as address:
        for options in ([], [("grpc.ssl_target_name_override", "router.example")]):
            async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
                reply = await generation_pb2_grpc.GenerationStub(channel).GetInfo(generation_pb2.GetInfoRequest(), timeout=10)
                assert reply.model == "here"


async def test_a_message_that_is_too_large_ends_its_own_call_only() -> None:
    async with serving(CLEAR, max_request_bytes=100_000) as address, CLEAR.open_channel(address) as channel:
        joined: Any = registry_pb2_grpc.RegistryStub(channel).Join()
        await joined.write(registry_pb2.MemberUpdate())
        assert (await joined.read()).welcome.router_id == "r"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await prefill_pb2_grpc.PrefillStub(channel).Run(prefill_pb2.PrefillRequest(fingerprint="x" * 100_001))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (caught.value.details() or "")
        await prefill_pb2_grpc.PrefillStub(channel).Run(prefill_pb2.PrefillRequest(fingerprint="x" * 99_000))
        await joined.write(registry_pb2.MemberUpdate())
        assert (await joined.read()).welcome.router_id == "r", "another call of the same connection goes on"
        joined.cancel()
