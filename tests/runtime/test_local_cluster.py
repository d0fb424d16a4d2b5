"""Which cluster `.run/router` names: one that is up, and never somebody else's. Clusters of a router alone."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from proto.baton.v1 import generation_pb2, generation_pb2_grpc
from services.runtime.errors import ConfigError, Interrupted, SetupError
from services.runtime.local_cluster import Cluster
from tests.clear import CLEAR
from tests.runtime.waiting import until

SETTINGS = ("router.address=127.0.0.1:0",)


@contextlib.asynccontextmanager
async def cluster_of(run_dir: Path | None, prefill: int = 0) -> AsyncIterator[Cluster]:
    cluster = Cluster(None, prefill=prefill, decode=0, settings=SETTINGS, run_dir=run_dir)
    try:
        yield cluster
    finally:
        await cluster.stop()


async def test_file_names_the_cluster_while_it_is_up_and_a_second_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run" / "router"
    async with cluster_of(file.parent) as first:
        await first.start()
        assert file.read_text() == first.router_address
        assert list(first.processes) == ["router"], "a role without ranks needs no front"
        async with cluster_of(file.parent) as second:
            with pytest.raises(SetupError, match=f"its router answers at {first.router_address}"):
                await second.start()
            assert not second.processes
        assert file.read_text() == first.router_address
    assert not file.exists()


async def test_file_of_a_dead_cluster_is_replaced_and_one_of_another_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "router"
    file.write_text("127.0.0.1:1")
    async with cluster_of(tmp_path) as cluster:
        await cluster.start()
        assert file.read_text() == cluster.router_address
        file.write_text("127.0.0.1:2")
    assert file.read_text() == "127.0.0.1:2"


async def test_interrupted_start_names_nobody_and_leaves_no_process(tmp_path: Path) -> None:
    stopping = asyncio.Event()
    async with cluster_of(tmp_path, prefill=1) as cluster:
        starting = asyncio.ensure_future(cluster.start(stopping))
        await until(lambda: "prefill" in cluster.processes, "the front is started")
        assert not (tmp_path / "router").exists()
        stopping.set()
        with pytest.raises(Interrupted):
            await starting
        heads = [psutil.Process(process.pid) for process in cluster.processes.values()]
        family = [*heads, *(child for head in heads for child in head.children(recursive=True))]
    assert not (tmp_path / "router").exists()
    assert all(process.returncode is not None for process in cluster.processes.values())
    await until(lambda: not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in family), "all have ended")


async def test_a_process_that_ends_by_itself_ends_the_start() -> None:
    cluster = Cluster(None, prefill=0, decode=0, settings=[*SETTINGS, "model.path=/nowhere"])
    with pytest.raises(SetupError, match="the router process ended with exit code 1"):
        await cluster.start()
    await cluster.stop()


async def test_folder_that_cannot_be_written_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    async with cluster_of(tmp_path / "file") as cluster:
        with pytest.raises(SetupError, match=r"cannot be written"):
            await cluster.start()
        assert not cluster.processes


def test_bad_setting_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="no_such_key"):
        Cluster(None, prefill=1, decode=1, settings=["decode.no_such_key=1"])


async def test_second_router_starts_again_at_the_same_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as trial:
        address = f"127.0.0.1:{trial.getsockname()[1]}"
    async with cluster_of(None) as cluster:
        await cluster.start()
        name = await cluster.start_router([f"router.address={address}"])
        assert cluster.routers == {"router": cluster.router_address, name: address} and address != cluster.router_address
        cluster.processes[name].kill()
        cluster.processes[name].wait()
        cluster.restart(name)
        async with CLEAR.open_channel(address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            info = await stub.GetInfo(generation_pb2.GetInfoRequest(), wait_for_ready=True, timeout=60)
        assert info.max_model_len > 0


async def test_command_prefix_and_log_of_a_front(tmp_path: Path) -> None:
    cluster = Cluster(None, prefill=0, decode=0, settings=SETTINGS, log_dir=tmp_path)
    try:
        await cluster.start()
        name = cluster.add_front("decode", 1, prefix=["env", "UCX_TLS=tcp"], settings=["model.path=/nowhere"])
        assert await asyncio.to_thread(cluster.processes[name].wait) == 1
        assert "/nowhere" in (tmp_path / "decode.log").read_text()
    finally:
        await cluster.stop()
