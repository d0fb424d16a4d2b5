"""The cluster under test: two routers, fronts of one rank each that join both, and a watcher that hears what they report.

Each front has a network namespace of its own where that can be had, and always an address of its own, so that it starts again at it.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import psutil
import zmq.auth

from proto.baton.v1 import generation_pb2, generation_pb2_grpc, registry_pb2_grpc
from services.doctor.chaos.control import RankControl
from services.doctor.chaos.netns import Host, Network, why_unavailable
from services.doctor.watcher import Watcher
from services.runtime.config import load_config
from services.runtime.errors import SetupError
from services.runtime.local_cluster import Cluster
from services.runtime.security import Security
from services.runtime.serve import Server

CONFIG = Path(__file__).parents[3] / "deploy" / "dev.toml"
ROLES = ("prefill", "decode")
LAYOUT = {"prefill": 3, "decode": 3}
# Pools so small that a burst of long requests finds no free page.
SETTINGS = ("model.max_model_len=1024", "prefill.num_pages=96", "decode.num_pages=56", "decode.max_running=16", "log.level=info")
_PORT = 50100  # of a front in its own namespace
_START_S = 120.0
_POLL_S = 0.05
_DOWN = re.compile(r"\(instance \w+\) is down, exit code (-?\d+)")


@dataclass(eq=False)
class Node:
    """One front and its engine. `fault` names what it suffers now, "" = nothing."""

    name: str  # in the Cluster
    role: str
    address: str
    host: Host | None
    control: RankControl
    fault: str = ""


class Stage:
    """Starts and ends all of it, and knows whom to strike."""

    def __init__(self, log_dir: Path, report: Callable[[str], None], settings: Sequence[str] = ()) -> None:
        """`settings` on top of SETTINGS; `log_dir` gets every process's stderr."""
        self.watcher = Watcher()
        self.nodes: list[Node] = []
        self._log_dir, self._report, self._settings = log_dir, report, settings
        self._network: Network | None = None
        self._no_network = why_unavailable()
        self._server: Server | None = None
        self._cluster: Cluster | None = None
        self.empty_since: dict[str, float] = {}  # role -> when its last serving rank went
        self.empty: list[tuple[float, float]] = []  # times without a serving rank of some role

    @property
    def cluster(self) -> Cluster:
        """Raises SetupError before start()."""
        if self._cluster is None:
            raise SetupError("the cluster was not started")
        return self._cluster

    @property
    def can_partition(self) -> bool:
        return self._network is not None

    async def start(self) -> None:
        """Everything up, and both routers know every rank. Raises SetupError."""
        if self._no_network:
            self._report(f"partition is left out: {self._no_network}")
        else:
            self._network = Network()
        ip = self._network.ip if self._network else "127.0.0.1"
        self._log_dir.mkdir(parents=True, exist_ok=True)
        security: list[str] = []
        if self._network:  # nobody else reaches these namespaces, but ZMQ beyond loopback goes under CURVE or not at all
            _, curve_key = zmq.auth.create_certificates(self._log_dir, "curve")
            security = ["security.insecure=true", f"security.curve_key={curve_key}"]
        self._server = Server(f"{ip}:0", ["baton.v1.Registry"], Security.of(load_config(CONFIG, security).security))
        self._server.add(registry_pb2_grpc.add_RegistryServicer_to_server, self.watcher)
        await self._server.start()
        self._cluster = Cluster(
            CONFIG, prefill=0, decode=0, settings=[*SETTINGS, *security, *self._settings, f"router.address={ip}:{_free_port(ip)}"],
            more_routers=[self._server.address], log_dir=self._log_dir,
        )
        await self._cluster.start()
        await self._cluster.start_router([f"router.address={ip}:{_free_port(ip)}"])
        for role, number in LAYOUT.items():
            for _ in range(number):
                self.nodes.append(self._add_node(self._cluster, role))
        if not await until(self._is_complete, _START_S):
            raise SetupError(f"after {_START_S:g} s not every front had joined; see {self._log_dir}")
        if not await self.routers_complete(_START_S):
            raise SetupError(f"after {_START_S:g} s not every router knew every rank; see {self._log_dir}")

    def _add_node(self, cluster: Cluster, role: str) -> Node:
        host = self._network.add_host() if self._network else None
        address = f"{host.ip}:{_PORT}" if host else f"127.0.0.1:{_free_port('127.0.0.1')}"
        # Over shared memory a stopped peer can still be read, which hides everything.
        environment = ["env", "UCX_TLS=tcp", f"UCX_NET_DEVICES={'eth0' if host else 'lo'}"]
        prefix = [*(host.prefix if host else []), *environment]
        control = RankControl(self._log_dir / f"control{len(self.nodes)}", role)
        name = cluster.add_front(role, 1, settings=[f"{role}.address={address}", control.setting], prefix=prefix)
        return Node(name, role, address, host, control)

    def _is_complete(self) -> bool:
        return all(len(self.watcher.serving(role)) == number for role, number in LAYOUT.items())

    async def routers_complete(self, patience_s: float) -> bool:
        """Whether every router knows every rank that the watcher knows, within `patience_s`."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            wanted = {role: len(self.watcher.serving(role)) for role in ROLES}
            if all([await _known(address, self.cluster.security) == wanted for address in self.cluster.routers.values()]):
                return True
            await asyncio.sleep(_POLL_S)
        return False

    def whole(self, role: str = "") -> list[Node]:
        """Nodes that suffer nothing and serve."""
        return [node for node in self.nodes if role in ("", node.role) and not node.fault and self.serves(node)]

    def serves(self, node: Node) -> bool:
        return f"{node.address}/0" in self.watcher.serving(node.role)

    def instance(self, node: Node) -> str:
        """Instance id of its rank, "" while none is known."""
        rank = self.watcher.serving(node.role).get(f"{node.address}/0")
        return rank.instance_id if rank is not None else ""

    def front_pid(self, node: Node) -> int:
        return self.cluster.processes[node.name].pid

    def engine_pid(self, node: Node) -> int:
        """Process id of its engine, 0 when there is none now."""
        with contextlib.suppress(psutil.Error, IndexError):
            return self.cluster.engine_pids(node.name)[0]
        return 0

    async def wait_ended(self, name: str, patience_s: float) -> bool:
        """Whether a process has ended by then."""
        return await until(lambda: self.cluster.processes[name].poll() is not None, patience_s)

    def sample(self) -> None:
        """Note when a pool had no serving rank; to be called often."""
        now = time.monotonic()
        for role in ROLES:
            if self.watcher.serving(role):
                began = self.empty_since.pop(role, None)
                if began is not None:
                    self.empty.append((began, now))
            else:
                self.empty_since.setdefault(role, now)

    async def end_fronts(self) -> list[str]:
        """Drain every front; names of those that had to be killed, or left an engine behind."""
        cluster, hung = self.cluster, list[str]()
        engines = {node.name: self.engine_pid(node) for node in self.nodes}
        for node in self.nodes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.front_pid(node), signal.SIGTERM)
        for node in self.nodes:
            if not await self.wait_ended(node.name, 15.0):  # nothing runs any more
                hung.append(node.name)
            elif engines[node.name] and not await until(lambda pid=engines[node.name]: not psutil.pid_exists(pid), 5.0):
                hung.append(f"{node.name}'s engine")
        for name in cluster.routers:
            cluster.processes[name].terminate()
            if not await self.wait_ended(name, 15.0):
                hung.append(name)
        return hung

    def crashes(self) -> list[str]:
        """Engines that ended otherwise than by SIGKILL or when told to, as their fronts logged it: no fault of ours does that."""
        found = [(log.stem, code) for log in sorted(self._log_dir.glob("*.log")) for code in _DOWN.findall(log.read_text(errors="replace"))]
        return [f"{name}'s engine ended with exit code {code}" for name, code in found if code not in ("0", "-9")]

    async def close(self) -> None:
        """Nothing is left: processes, namespaces, the watcher."""
        for node in self.nodes:
            for pid in (self.engine_pid(node), self.front_pid(node)):
                with contextlib.suppress(ProcessLookupError):
                    if pid and self.cluster.processes[node.name].poll() is None:
                        os.kill(pid, signal.SIGCONT)
        try:
            if self._cluster is not None:
                await self._cluster.stop()
        finally:
            if self._server is not None:
                await self._server.stop(0)
            if self._network is not None:
                self._network.close()


async def until(condition: Callable[[], bool], patience_s: float) -> bool:
    """Poll `condition`; False when it has not come true within `patience_s`."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True


async def _known(address: str, security: Security) -> dict[str, int]:
    """Ranks a role that the router at `address` could use now; nothing when it does not answer."""
    async with security.open_channel(address) as channel:
        try:
            stub = generation_pb2_grpc.GenerationStub(channel)
            info: generation_pb2.GetInfoReply = await stub.GetInfo(generation_pb2.GetInfoRequest(), timeout=2.0)
        except grpc.aio.AioRpcError:
            return {}
    return {role: sum(pool.num_ranks for pool in info.pools if pool.role == role) for role in ROLES}


def _free_port(ip: str) -> int:
    with socket.create_server((ip, 0)) as trial:
        return trial.getsockname()[1]
