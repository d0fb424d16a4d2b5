"""A cluster on this machine: routers and fronts as separate processes, on free ports.

Life of a cluster: routers first, then the fronts, then wait until every router knows every rank; only then does `.run/router` name it.
stop() drains: fronts finish what runs, then the routers leave. Should this process die, its processes drain too.
"""

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from services.runtime.config import load_config
from services.runtime.errors import Interrupted, SetupError
from services.runtime.processes import Processes
from services.runtime.run_folder import RunFolder, router_info
from services.runtime.security import Security
from services.runtime.serve import first_of

ROLES = ("prefill", "decode")
READY_S = 300.0
_POLL_S = 0.05
_QUICK_END_S = 5.0  # for processes that serve nobody yet


def _tell_nobody(_line: str) -> None:
    pass


class Node(NamedTuple):
    """A front and its ranks."""

    role: str
    ranks: int


class Cluster:
    """Starts and ends the processes. `settings` are `--set` overrides for every one of them; `ranks_per_node`: of a front, the last
    one of a role may get fewer (None = one front a role has them all); the fronts join `more_routers` besides those started here;
    `run_dir` says where the cluster is once all is up (None = nowhere does); `log_dir`: where each process's stderr goes, to
    `<name>.log` (None = to ours); `report` gets a line of progress at a time.
    """

    def __init__(self, config: Path | None, *, prefill: int, decode: int, routers: int = 1, ranks_per_node: int | None = None,
                 settings: Sequence[str] = (), run_dir: Path | None = None, more_routers: Sequence[str] = (), log_dir: Path | None = None,
                 report: Callable[[str], None] = _tell_nobody) -> None:
        """Raises ConfigError for a file or setting that no process could use."""
        self.routers: dict[str, str] = {}  # name -> address
        self.nodes: dict[str, Node] = {}  # name -> front, the oldest first
        self.attended: set[str] = set()  # names whose end somebody waits for or expects
        self._loaded = load_config(config, settings)
        self.drain_s = max(self._loaded.prefill.drain_s, self._loaded.decode.drain_s)
        self.security = Security.of(self._loaded.security)
        self.run_folder = RunFolder(run_dir, self.security) if run_dir is not None else None
        self.report = report
        self._config = config
        self._wanted = {"prefill": prefill, "decode": decode}
        self._num_routers = routers
        self._ranks_per_node = ranks_per_node
        self._settings = settings
        self._more_routers = more_routers
        self._started = Processes(log_dir)
        self._numbers = {name: itertools.count(1) for name in ("router", *ROLES)}
        self._is_complete = False

    @property
    def processes(self) -> dict[str, "subprocess.Popen[bytes]"]:
        """By name: "router", "prefill", "decode", then "router-2" and so on."""
        return self._started.newest

    @property
    def router_address(self) -> str:
        """host:port of the first router, "" before it listens."""
        return self.routers.get("router", "")

    # ---- start

    async def start(self, stopping: asyncio.Event | None = None) -> None:
        """Start everything and wait until every rank has joined. Raises SetupError when a process cannot start, Interrupted when
        `stopping` is set before."""
        await first_of(self._start(), (stopping or asyncio.Event()).wait())
        if not self._is_complete:
            raise Interrupted("interrupted while starting; nothing is left running")

    async def _start(self) -> None:
        if self.run_folder is not None:
            await self.run_folder.refuse_second()
            self.run_folder.check_writable()
        for number in range(self._num_routers):
            await self.start_router([] if not number else [f"router.address={self._any_port()}"])
        for role, ranks in self._wanted.items():
            for taken in range(0, ranks, self._ranks_per_node or max(ranks, 1)):
                self.add_front(role, min(self._ranks_per_node or ranks, ranks - taken))
        await first_of(self._until_one_ends(list(self.processes)), self._until_complete())
        if self.run_folder is not None:
            await self.run_folder.refuse_second()
            self.run_folder.name_routers(list(self.routers.values()))
        self._is_complete = True

    def _any_port(self) -> str:
        """A port that the file names can be one router's only."""
        return f"{self._loaded.router.address.rpartition(':')[0]}:0"

    async def start_router(self, settings: Sequence[str] = ()) -> str:
        """Start one more router, `settings` on top of everybody's, and learn its address; returns its name here. Fronts started
        later join it."""
        name = self._new_name("router")
        self.report(f"starting the {name}")
        self._start_new(name, "services.router", settings)
        await first_of(self._until_one_ends(list(self.processes)), self._until_it_listens(name))
        self.routers[name] = self._started.address(name)
        self._started.pin(name, f"router.address={self.routers[name]}")  # fronts and clients know it by that
        self.report(f"{name} at {self.routers[name]}")
        return name

    def add_front(self, role: str, ranks: int, *, settings: Sequence[str] = (), prefix: Sequence[str] = ()) -> str:
        """Start one more front of `role` with `ranks` ranks, `settings` on top of everybody's; returns its name here. `prefix`: words
        before its command, such as `ip netns exec NAME`, that end in the same process."""
        name = self._new_name(role)
        routers = ", ".join(f'"{address}"' for address in (*self.routers.values(), *self._more_routers))
        self.report(f"starting {name}: {ranks} {'rank' if ranks == 1 else 'ranks'}")
        self._start_new(name, f"services.{role}", [f"{role}.ranks={ranks}", f"{role}.routers=[{routers}]", *settings], prefix)
        self.nodes[name] = Node(role, ranks)
        return name

    def restart(self, name: str) -> None:
        """Start a process that has ended once more, with the same command: a router at the same address, a front at one it was told."""
        self._started.restart(name)

    def _new_name(self, kind: str) -> str:
        """No name is used twice: a front that comes after one that left is another one."""
        number = next(self._numbers[kind])
        return kind if number == 1 else f"{kind}-{number}"

    def _start_new(self, name: str, module: str, settings: Sequence[str], prefix: Sequence[str] = ()) -> None:
        arguments = ["--config", str(self._config)] if self._config is not None else []
        for setting in (*self._settings, *settings):
            arguments += ["--set", setting]
        self._started.start(name, [*prefix, sys.executable, "-m", module, *arguments])

    # ---- wait

    async def _until_it_listens(self, name: str) -> None:
        while not self._started.address(name):
            await asyncio.sleep(0.02)

    async def _until_complete(self) -> None:
        began, missing = time.monotonic(), {role for role, ranks in self._wanted.items() if ranks}
        while missing:
            known = await self.ranks_known()
            for role in [role for role in ROLES if role in missing and known[role] >= self._wanted[role]]:
                missing.remove(role)
                self.report(f"{role} is up after {time.monotonic() - began:.1f} s: {', '.join(self._rank_addresses(role))}")
            if missing and time.monotonic() - began > READY_S:
                raise SetupError(f"after {READY_S:g} s only {known} of {self._wanted} ranks had joined; see the log lines above")
            await asyncio.sleep(_POLL_S)

    async def _until_one_ends(self, names: Sequence[str]) -> None:
        """Raises SetupError as soon as one of `names` has ended by itself."""
        while not (ended := [name for name in self._started.ended() if name in names]):
            await asyncio.sleep(_POLL_S)
        code = self.processes[ended[0]].returncode
        raise SetupError(f"the {ended[0]} process ended with exit code {code}; its own message, if any, is above")

    async def run_until(self, stopping: asyncio.Event) -> None:
        """Wait until `stopping`. Raises SetupError when a process ends by itself before."""
        await first_of(self._until_one_ends(list(self.processes)), stopping.wait())

    async def ranks_known(self) -> dict[str, int]:
        """Ranks of each role that every router could use now; one that does not answer knows nobody."""
        known = await asyncio.gather(*(_known_at(address, self.security) for address in self.routers.values()))
        return {role: min((found.get(role, 0) for found in known), default=0) for role in ROLES}

    def num_ranks(self, role: str) -> int:
        """Ranks of `role` that were started here and not told to leave."""
        return sum(node.ranks for name, node in self.nodes.items() if node.role == role and name not in self.attended)

    # ---- nodes come and go

    async def grow(self, role: str, ranks: Sequence[int]) -> None:
        """Start a front for each of `ranks` and wait until every router knows all their ranks. Raises SetupError when one cannot start:
        then none of them is left."""
        before = await self.ranks_known()
        names = [self.add_front(role, number) for number in ranks]
        self.attended |= set(names)
        # Fronts of others may have joined too; ours may be away for the moment.
        wanted = max(before[role], self.num_ranks(role)) + sum(ranks)
        try:
            await first_of(self._until_one_ends(names), self._until_known(role, wanted))
        except BaseException:
            await self._remove(names, _QUICK_END_S)
            raise
        self.attended -= set(names)

    async def _until_known(self, role: str, wanted: int) -> None:
        """Raises SetupError after READY_S."""
        began = time.monotonic()
        while (known := (await self.ranks_known())[role]) < wanted:
            if time.monotonic() - began > READY_S:
                raise SetupError(f"after {READY_S:g} s a router knew {known} of {wanted} {role} ranks; see the log of `up`")
            await asyncio.sleep(_POLL_S)

    async def shrink(self, names: Sequence[str]) -> list[str]:
        """Drain these fronts and wait until they have left; returns the names of those that had to be killed."""
        self.attended |= set(names)
        return await self._remove(names, self.drain_s + 10)

    async def _remove(self, names: Sequence[str], patience_s: float) -> list[str]:
        killed = await self._started.end(names, patience_s)
        for name in names:
            self._started.forget(name)
            del self.nodes[name]
        self.attended -= set(names)
        return killed

    # ---- what is there

    def _rank_addresses(self, role: str) -> list[str]:
        """Ranks of `role`, written as in a request's timeline: host:port/rank."""
        fronts = [(self._started.address(name), node.ranks) for name, node in self.nodes.items() if node.role == role]
        return [f"{address}/{rank}" for address, ranks in fronts if address for rank in range(ranks)]

    def engine_pids(self, name: str) -> list[int]:
        """Process ids of the engines of front `name`, by rank."""
        return self._started.engine_pids(name)

    def listens(self, name: str) -> str:
        """host:port where a router or front serves gRPC, "" while it has not said so."""
        return self._started.address(name)

    def ended(self) -> list[str]:
        """Names of processes that have ended though nobody had told them to."""
        return [name for name in self._started.ended() if name not in self.attended]

    def metrics_targets(self) -> dict[str, tuple[str, str]]:
        """Who serves /metrics: name -> role, host:port."""
        roles = dict.fromkeys(self.routers, "router") | {name: node.role for name, node in self.nodes.items()}
        alive = roles.keys() - set(self._started.ended())
        return {
            process: (role, address) for name, role in roles.items() if name in alive
            for process, address in self._started.metrics_addresses(name).items()
        }

    # ---- end

    async def stop(self) -> None:
        """Drain: fronts first, then the routers. Nothing is left when it returns."""
        try:
            routers = [name for name in self.processes if name not in self.nodes]
            await self._started.end(list(self.nodes), self.drain_s + 10 if self._is_complete else _QUICK_END_S)
            await self._started.end(routers, _QUICK_END_S)
        finally:
            if self.run_folder is not None:
                self.run_folder.withdraw(",".join(self.routers.values()))
            self._started.close()


async def _known_at(address: str, security: Security) -> dict[str, int]:
    """Ranks a role that the router at `address` could use now; none when it does not answer."""
    info = await router_info(address, security)
    return {} if info is None else {role: sum(pool.num_ranks for pool in info.pools if pool.role == role) for role in ROLES}
