"""`python -m services.runtime.cluster up` as its user runs it, in a folder of its own, with a watcher that its fronts join as well."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

from proto.baton.v1 import registry_pb2_grpc
from services.doctor.watcher import Watcher
from services.runtime.serve import Server
from tests.clear import CLEAR
from tests.e2e.rig import DEMO_CONFIG, ROOT
from tests.runtime.waiting import until

MODEL = ROOT / "deploy" / "demo_model"
_MODULE = [sys.executable, "-m", "services.runtime.cluster"]


class Up:
    """A cluster that is up. `scale(...)` is the command."""

    def __init__(self, folder: Path, watcher: Watcher, process: "subprocess.Popen[bytes]") -> None:
        self.folder, self.watcher, self.process = folder, watcher, process
        self.log = folder / "up.log"

    @property
    def routers(self) -> list[str]:
        return (self.folder / ".run" / "router").read_text().split(",")

    def serving(self, role: str) -> set[str]:
        """host:port/rank of each rank that takes work, as in a timeline."""
        return set(self.watcher.serving(role))

    async def scale(self, *targets: str) -> str:
        """What the command said; it has to succeed."""
        command = await asyncio.create_subprocess_exec(
            *_MODULE, "scale", *targets, cwd=self.folder, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        said, _ = await command.communicate()
        assert command.returncode == 0, f"scale {targets}: {said.decode()}\n{self.log.read_text()}"
        return said.decode()

    async def settled(self, patience_s: float = 20.0) -> None:
        """Conservation: every rank's pages come back, nothing is queued, claimed, leased or running."""
        await until(lambda: not self.watcher.untidy(), f"all is back: {self.watcher.untidy()}", patience_s)


def _environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)} | more


@contextlib.asynccontextmanager
async def up(folder: Path, *arguments: str, **environment: str) -> AsyncGenerator[Up]:
    """`arguments` besides configuration and model; the cluster drains at the end, and has to end well."""
    watcher, server = Watcher(), Server("127.0.0.1:0", ["baton.v1.Registry"], CLEAR)
    server.add(registry_pb2_grpc.add_RegistryServicer_to_server, watcher)
    await server.start()
    process = _start(folder, ["--join", server.address, *arguments], environment)
    rig = Up(folder, watcher, process)
    try:
        await until(lambda: process.poll() is not None or (folder / ".run" / "control.sock").exists(), "it is up", 120.0)
        assert process.poll() is None, rig.log.read_text()
        yield rig
        process.terminate()
        await until(lambda: process.poll() is not None, "it has ended", 80.0)
        assert process.returncode == 0, rig.log.read_text()
        assert not list((folder / ".run").iterdir()), "files of a cluster that is down"
    finally:
        process.kill()
        process.wait()
        await server.stop(0)


def _start(folder: Path, arguments: Sequence[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    command = [*_MODULE, "up", "--config", str(DEMO_CONFIG), "--set", f"model.path={MODEL}", *arguments]
    with (folder / "up.log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=_environment(**environment), stdout=log, stderr=subprocess.STDOUT)


async def until_true(condition: Callable[[], bool], what: str, work: "asyncio.Future[Any]", patience_s: float = 120.0) -> None:
    """Wait until `condition`, or until `work`, which is to go on, has failed: then raise what it raised."""
    waiting = asyncio.ensure_future(until(condition, what, patience_s))
    await asyncio.wait([waiting, work], return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        waiting.cancel()
        work.result()
    await waiting
