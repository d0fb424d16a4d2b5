"""The cluster of deploy/compose.yaml for tests and benchmarks: an engine and a base image found, built, up, scaled, and gone in the end."""

import asyncio
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from proto.baton.v1 import generation_pb2, generation_pb2_grpc
from tests.clear import CLEAR
from tests.e2e.rig import Answer, generate

ROOT = Path(__file__).parents[2]
BASE_SCRIPT = ROOT.parent / "shared" / "tools" / "docker_base.sh"  # starts an engine and makes a base image where none can be pulled
PUBLIC_BASE = "python:3.11-slim"


class NoEngine(Exception):
    """Why no container can run here."""


def run(*command: str, timeout_s: float = 600.0, environment: dict[str, str] | None = None) -> str:
    """Standard output; fails with both streams otherwise."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, env=os.environ | (environment or {}))
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def is_fine(*command: str, timeout_s: float = 60.0) -> bool:
    """Whether `command` can be run and ends well."""
    try:
        return subprocess.run(command, capture_output=True, timeout=timeout_s).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def find_base() -> dict[str, str]:
    """compose.yaml's variables for a build on this machine. Raises NoEngine, which says why there can be none."""
    has_engine = is_fine("docker", "info")
    if has_engine and (is_fine("docker", "image", "inspect", PUBLIC_BASE) or is_fine("docker", "pull", PUBLIC_BASE, timeout_s=120)):
        return {}
    if BASE_SCRIPT.exists():
        done = subprocess.run(["bash", str(BASE_SCRIPT)], capture_output=True, text=True, timeout=300)
        if done.returncode == 0:
            return {"BASE_IMAGE": done.stdout.split()[-1], "BATON_BUILD_NETWORK": "host"}
        raise NoEngine(f"{BASE_SCRIPT} failed: {done.stderr[-500:]}")
    raise NoEngine(f"{PUBLIC_BASE} cannot be pulled" if has_engine else "no Docker engine answers")


def find_compose() -> list[str]:
    """Compose v2 where it is installed, else v1. Raises NoEngine."""
    if is_fine("docker", "compose", "version"):
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise NoEngine("neither `docker compose` nor docker-compose is installed")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class ComposeCluster:
    """One project. `BATON_COMPOSE` in the environment names another command than find_compose() would."""

    def __init__(self, project: str) -> None:
        given = os.environ.get("BATON_COMPOSE", "").split()
        self.variables = find_base()
        self.project, self.port, self.address = project, free_port(), ""
        self.address = f"127.0.0.1:{self.port}"
        self.subnet = f"10.213.{os.getpid() % 200 + 1}.0/24"
        self.variables |= {"BATON_PORT": str(self.port), "BATON_KV_SUBNET": self.subnet, "BATON_TAG": "test"}
        self._command = [*(given or find_compose()), "-p", project, "-f", "deploy/compose.yaml"]

    def compose(self, *arguments: str, timeout_s: float = 600.0) -> str:
        return run(*self._command, *arguments, timeout_s=timeout_s, environment=self.variables)

    def up(self, prefill: int = 1, decode: int = 1) -> None:
        """Returns once Compose has started and stopped what it takes; those that go have drained by then."""
        self.compose("up", "-d", "--scale", f"prefill={prefill}", "--scale", f"decode={decode}")

    def down(self) -> None:
        self.compose("down", "-v", "--remove-orphans", "-t", "20")

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail=60")

    def containers(self, service: str = "") -> list[str]:
        """Ids of those that run."""
        labels = ["--filter", f"label=com.docker.compose.project={self.project}"]
        if service:
            labels += ["--filter", f"label=com.docker.compose.service={service}"]
        return run("docker", "ps", "-q", "--no-trunc", *labels).split()

    def leftovers(self) -> list[str]:
        """Containers, networks and volumes that bear the project's label."""
        label = f"label=com.docker.compose.project={self.project}"
        return [line for kind in (["ps", "-aq"], ["network", "ls", "-q"], ["volume", "ls", "-q"])
                for line in run("docker", *kind, "--filter", label).split()]

    def inside(self, container: str, *command: str) -> str:
        """Output of a command in a container."""
        return run("docker", "exec", container, *command)

    def num_ranks(self, role: str) -> int:
        """As the router says; 0 while it does not answer."""

        async def ask() -> int:
            async with CLEAR.open_channel(self.address) as channel:
                info = await generation_pb2_grpc.GenerationStub(channel).GetInfo(generation_pb2.GetInfoRequest())
            return sum(pool.num_ranks for pool in info.pools if pool.role == role)

        try:
            return asyncio.run(ask())
        except grpc.aio.AioRpcError:
            return 0

    def wait_for(self, condition: Callable[[], bool], what: str, patience_s: float = 90.0) -> None:
        """Poll; the failure shows what the containers said."""
        deadline = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not so after {patience_s:g} s\n{self.logs()}"
            time.sleep(0.1)

    def wait_for_ranks(self, prefill: int, decode: int) -> None:
        self.wait_for(lambda: (self.num_ranks("prefill"), self.num_ranks("decode")) == (prefill, decode),
                      f"{prefill} prefill and {decode} decode ranks")


@dataclass
class Load:
    """Clients in a closed loop, each with the next of `requests`, from a thread of its own.

    with Load(address, requests, at_once=6) as load:
        load.wait_for(20)               more streams have ended
    load.answers, load.failures
    """

    address: str
    requests: Sequence[dict[str, Any]]
    at_once: int
    answers: list[tuple[int, Answer]] = field(default_factory=list)  # index into `requests`
    failures: list[str] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(120)
        assert not self._thread.is_alive(), "streams do not end"

    def wait_for(self, number: int, patience_s: float = 60.0) -> None:
        """Until so many more streams have ended."""
        wanted, deadline = self.num_ended + number, time.monotonic() + patience_s
        while self.num_ended < wanted:
            assert time.monotonic() < deadline, f"{self.num_ended} of {wanted} streams have ended after {patience_s:g} s"
            time.sleep(0.05)

    @property
    def num_ended(self) -> int:
        return len(self.answers) + len(self.failures)

    async def _run(self) -> None:
        async with CLEAR.open_channel(self.address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            await asyncio.gather(*(self._client(stub, first) for first in range(self.at_once)))

    async def _client(self, stub: generation_pb2_grpc.GenerationStub, first: int) -> None:
        turn = first
        while not self._over.is_set():
            index = turn % len(self.requests)
            try:
                self.answers.append((index, await generate(stub, **self.requests[index])))
            except grpc.aio.AioRpcError as error:
                self.failures.append(f"{error.code().name}: {error.details()}")
            turn += self.at_once
