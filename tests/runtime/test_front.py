"""A front over an engine that has no model: health, the members it lists, and what a renewed agent changes (B49)."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.runtime import supervisor as supervisor_module
from services.runtime.config import Config, PoolSection, SecuritySection
from services.runtime.front import Front
from services.runtime.ipc import Heartbeat, RankLoad, SocketDirectory, StartFailed, Up
from services.runtime.supervisor import RankProcess
from tests.runtime.waiting import until

Event = Up | StartFailed | Heartbeat | RankLoad
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
STOPPED_S = 5.0  # within which a stopped engine must be NOT_SERVING


class FakePool:
    """A PoolService that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def register(self, server: Any) -> None: ...

    def attach(self, ranks: Any) -> None: ...

    def on_event(self, rank: RankProcess, event: Any) -> None: ...

    def on_renewed(self, rank: RankProcess, former_instance_id: str) -> None:
        assert rank.up is not None
        self.told.append((former_instance_id, rank.up.instance_id))

    def on_down(self, rank: RankProcess, instance_id: str) -> None:
        self.told.append(("down", instance_id))

    def drain(self) -> None: ...

    def num_active(self) -> int:
        return 0


class World:
    """A front of one rank and a client of its health."""

    def __init__(self, pool: FakePool, num_ranks: int = 1, *, insecure: bool = False, **settings: Any) -> None:
        section = PoolSection(ranks=num_ranks, routers=("127.0.0.1:1",), **settings)
        self.pool = pool
        self.front = Front(role="fake", module="tests.runtime.fake_engine", services=["fake.Pool"], event_type=Event,
                           config=Config(security=SecuritySection(insecure=insecure)), section=section, arguments=[], pool=pool)
        self.stopping = asyncio.Event()

    @property
    def rank(self) -> RankProcess:
        return self.front._supervisor.ranks[0]  # pyright: ignore[reportPrivateUsage]

    async def health(self, service: str) -> Any:
        async with grpc.aio.insecure_channel(self.front._server.address) as channel:  # pyright: ignore[reportPrivateUsage]
            try:
                return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))).status
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.NOT_FOUND
                return None

    async def healths(self) -> list[Any]:
        return [await self.health(name) for name in ("", "fake.Pool", "fake.Pool/0")]

    async def until_health(self, wanted: list[Any], patience_s: float = 20.0) -> float:
        """Seconds until it was so."""
        began = time.monotonic()
        while (seen := await self.healths()) != wanted:
            assert time.monotonic() - began < patience_s, f"health is {seen} after {patience_s} s"
            await asyncio.sleep(0.02)
        return time.monotonic() - began


@contextlib.asynccontextmanager
async def fronted(num_ranks: int = 1) -> AsyncIterator[World]:
    world = World(FakePool(), num_ranks)
    task = asyncio.create_task(world.front.run(world.stopping))
    try:
        await until(lambda: bool(world.front._server.address), "it listens")  # pyright: ignore[reportPrivateUsage]
        yield world
    finally:
        world.stopping.set()
        await asyncio.wait_for(task, 20.0)


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda behaviour: monkeypatch.setenv("BATON_FAKE_ENGINE", behaviour)


async def test_b49_a_stopped_engine_is_not_serving_within_5_s_and_until_another_is_up(
    behave: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    behave("serves")
    async with fronted() as world:
        await world.until_health([SERVING] * 3)
        assert world.rank.pid is not None
        behave("loads")  # its successor never says Up
        os.kill(world.rank.pid, signal.SIGSTOP)
        stopped = world.rank.pid
        assert await world.until_health([NOT_SERVING] * 3, STOPPED_S) < STOPPED_S
        assert world.pool.told == [("down", "fake")] and not world.front._member("127.0.0.1").ranks  # pyright: ignore[reportPrivateUsage]
        await until(lambda: world.rank.num_starts == 2 and world.rank.pid != stopped, "a successor loads")
        assert await world.healths() == [NOT_SERVING] * 3


async def test_b49_readiness_waits_for_the_engine_and_a_killed_one_ends_it(behave: Callable[[str], None]) -> None:
    behave("loads")
    async with fronted() as world:
        await world.until_health([NOT_SERVING] * 3)
    behave("serves")
    async with fronted() as world:
        await world.until_health([SERVING] * 3)
        behave("loads")
        assert world.rank.pid is not None
        os.kill(world.rank.pid, signal.SIGKILL)
        assert await world.until_health([NOT_SERVING] * 3) < 2.0


async def test_each_rank_has_a_health_of_its_own(behave: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    behave("serves")
    async with fronted(2) as world:
        await until(lambda: all(rank.up for rank in world.front._supervisor.ranks), "both are up")  # pyright: ignore[reportPrivateUsage]
        await world.until_health([SERVING] * 3)
        behave("loads")
        assert world.rank.pid is not None
        os.kill(world.rank.pid, signal.SIGKILL)
        await world.until_health([SERVING, SERVING, NOT_SERVING])
        assert await world.health("fake.Pool/1") == SERVING and await world.health("fake.Pool/2") is None


async def test_a_front_that_hangs_over_a_dead_engine_says_so_before_it_is_reaped(
    behave: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that the kernel does not let go must not look alive for as long."""
    behave("serves")
    monkeypatch.setattr(supervisor_module, "HEARTBEAT_S", 1.0)
    released = asyncio.Event()
    real_kill = RankProcess.kill

    async def kill(self: RankProcess) -> None:
        await released.wait()
        await real_kill(self)

    async with fronted() as world:
        await world.until_health([SERVING] * 3)
        monkeypatch.setattr(RankProcess, "kill", kill)
        assert world.rank.pid is not None
        os.kill(world.rank.pid, signal.SIGSTOP)
        await world.until_health([NOT_SERVING] * 3)
        assert world.pool.told == [("down", "fake")]
        released.set()


async def test_a_renewed_agent_is_listed_with_its_former_instance_id(behave: Callable[[str], None]) -> None:
    behave("renews")
    async with fronted() as world:
        await until(lambda: world.pool.told == [("fake", "fake2")], "the pool has heard of it")
        member = world.front._member("127.0.0.1")  # pyright: ignore[reportPrivateUsage]
        ((rank,), (source,)) = member.ranks, member.kv_events
        assert (rank.instance_id, rank.former_instance_id) == ("fake2", "fake")
        assert (source.instance_id, source.endpoint, source.replay_endpoint) == ("fake2", "tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002")
        assert [load.instance_id for load in world.front._load_reports()] == ["fake2"], "its load goes with it"  # pyright: ignore[reportPrivateUsage]
        await world.until_health([SERVING] * 3)


@pytest.mark.parametrize(("address", "advertise", "listed"), [
    ("0.0.0.0:0", "", "172.30.0.4"),
    ("[::]:0", "", "172.30.0.4"),
    ("0.0.0.0:0", "decode-0.pods", "decode-0.pods"),
    ("127.0.0.1:0", "", "127.0.0.1"),
    ("localhost:0", "", "localhost"),
])
async def test_a_front_that_listens_everywhere_is_listed_where_routers_are_dialled_from(address: str, advertise: str, listed: str) -> None:
    front = World(FakePool(), insecure=True, address=address, advertise=advertise).front
    await front._server.start()  # pyright: ignore[reportPrivateUsage]
    try:
        host, _, port = front._member("172.30.0.4").address.rpartition(":")  # pyright: ignore[reportPrivateUsage]
        assert host == listed and int(port) > 0
    finally:
        await front._server.stop(0)  # pyright: ignore[reportPrivateUsage]
        front._supervisor._directory.cleanup()  # pyright: ignore[reportPrivateUsage]


def test_folders_of_fronts_that_were_killed_are_removed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living = SocketDirectory()
    dead, young = tmp_path / "baton-ipc-dead", tmp_path / "baton-ipc-young"
    other = tmp_path / "somebody-else"
    for folder in (dead, young, other):
        folder.mkdir()
        (folder / "rank0.1.events").touch()
    for folder in (dead, other, tmp_path / living.name):
        os.utime(folder, (1, 1))
    next_one = SocketDirectory()
    assert not dead.exists() and young.exists() and other.exists()
    assert os.path.isdir(living.name) and os.path.isdir(next_one.name)
    living.cleanup()
    next_one.cleanup()
    assert not os.path.isdir(living.name)
