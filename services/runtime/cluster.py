"""A cluster on this machine: routers and fronts as separate processes; by default one router and a front a pool, on free ports.

    python -m services.runtime.cluster up --config deploy/dev.toml [--prefill 2 --decode 2]

Life of a cluster: router first, then the fronts, then wait until every rank has joined; only then does `.run/router` name it.
Ctrl-C, SIGTERM or SIGHUP drains: fronts finish what runs, then the router leaves. Should this process die, its processes drain too.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc.aio
import psutil

from proto.baton.v1 import generation_pb2, generation_pb2_grpc
from services.runtime.config import argument_parser, load_config
from services.runtime.errors import ConfigError, Interrupted, SetupError
from services.runtime.process import run_process, say, write_whole
from services.runtime.serve import first_of, open_channel

RUN_DIR = Path(".run")
READY_S = 300.0
_POLL_S = 0.05
_QUICK_END_S = 5.0  # for processes that serve nobody yet


def _tell_nobody(_line: str) -> None:
    pass


class Cluster:
    """Starts, watches and ends the processes. `settings` are `--set` overrides for every one of them; the fronts join
    `more_routers` besides those started here; `run_dir`: where the file `router` names the address once all is up (None = nowhere);
    `log_dir`: where each process's stderr goes, to `<name>.log` (None = to ours); `report` gets a line of progress at a time.
    """

    def __init__(self, config: Path | None, *, prefill: int, decode: int, settings: Sequence[str] = (), run_dir: Path | None = None,
                 more_routers: Sequence[str] = (), log_dir: Path | None = None, report: Callable[[str], None] = _tell_nobody) -> None:
        """Raises ConfigError for a file or setting that no process could use."""
        self.routers: dict[str, str] = {}  # name -> address
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        loaded = load_config(config, settings)
        self.drain_s = max(loaded.prefill.drain_s, loaded.decode.drain_s)
        self._config = config
        self._ranks = {"prefill": prefill, "decode": decode}
        self._settings = settings
        self._address_file = run_dir / "router" if run_dir is not None else None
        self._more_routers = more_routers
        self._log_dir = log_dir
        self._report = report
        self._commands: dict[str, list[str]] = {}
        self._private = tempfile.TemporaryDirectory(prefix="baton-")
        self._is_complete = False

    @property
    def router_address(self) -> str:
        """host:port of the first router, "" before it listens."""
        return self.routers.get("router", "")

    async def start(self, stopping: asyncio.Event | None = None) -> None:
        """Start everything and wait until every rank has joined. Raises SetupError when a process cannot start, Interrupted when
        `stopping` is set before."""
        await first_of(self._start(), (stopping or asyncio.Event()).wait())
        if not self._is_complete:
            raise Interrupted("interrupted while starting; nothing is left running")

    async def _start(self) -> None:
        await self._refuse_second()
        self._check_writable()
        await self.start_router()
        for role, ranks in self._ranks.items():
            if ranks:
                self.add_front(role, ranks)
        await first_of(self._watch(), self._until_complete())
        if self._address_file is not None:
            await self._refuse_second()
            write_whole(self._address_file, self.router_address)
        self._is_complete = True

    async def _refuse_second(self) -> None:
        """One cluster a tree: clients find it by its file. Raises SetupError."""
        if self._address_file is None:
            return
        other = read_address(self._address_file)
        if other and await _answers(other):
            raise SetupError(f"a cluster of this tree is up already: its router answers at {other} ({self._address_file}); stop it first")
        self._withdraw(other)  # of one that was killed

    def _check_writable(self) -> None:
        """Raises SetupError now rather than when all is up."""
        if self._address_file is not None:
            trial = self._address_file.with_name("trial")
            write_whole(trial, "")
            trial.unlink(missing_ok=True)

    def _withdraw(self, address: str) -> None:
        """Remove the file if it is `address` that it names."""
        if self._address_file is not None and address and read_address(self._address_file) == address:
            with contextlib.suppress(OSError):
                self._address_file.unlink(missing_ok=True)

    async def start_router(self, settings: Sequence[str] = ()) -> str:
        """Start one more router, `settings` on top of everybody's, and learn its address; returns its name here. Fronts started
        later join it."""
        name = "router" if not self.routers else f"router-{len(self.processes)}"
        self._report(f"starting the {name}")
        address_file = Path(self._private.name) / name
        self._start_new(name, "services.router", settings, ["--address-file", str(address_file)])
        await first_of(self._watch(), self._read_address(name, address_file))
        self._report(f"{name} at {self.routers[name]}")
        return name

    def add_front(self, role: str, ranks: int, *, settings: Sequence[str] = (), prefix: Sequence[str] = ()) -> str:
        """Start one more front of `role` with `ranks` ranks, `settings` on top of everybody's; returns its name here. `prefix`: words
        before its command, such as `ip netns exec NAME`, that end in the same process."""
        name = role if role not in self.processes else f"{role}-{len(self.processes)}"
        routers = ", ".join(f'"{address}"' for address in (*self.routers.values(), *self._more_routers))
        self._report(f"starting {name}: {ranks} {'rank' if ranks == 1 else 'ranks'}")
        self._start_new(name, f"services.{role}", [f"{role}.ranks={ranks}", f"{role}.routers=[{routers}]", *settings], [], prefix)
        return name

    def restart(self, name: str) -> None:
        """Start a process that has ended once more, with the same command: at the same address if it was told one."""
        self._spawn(name)

    def _start_new(self, name: str, module: str, settings: Sequence[str], extra: Sequence[str], prefix: Sequence[str] = ()) -> None:
        arguments = ["--config", str(self._config)] if self._config is not None else []
        for setting in (*self._settings, *settings):
            arguments += ["--set", setting]
        command = [*prefix, sys.executable, "-m", module, *arguments, *extra, "--die-with-parent", str(os.getpid())]
        self._commands[name] = command
        self._spawn(name)

    def _spawn(self, name: str) -> None:
        with contextlib.ExitStack() as files:
            log = files.enter_context((self._log_dir / f"{name}.log").open("ab")) if self._log_dir is not None else None
            # A session of its own, so that Ctrl-C in the terminal reaches this process alone and the drain has an order. A Popen is
            # there as soon as its process is: no cancellation loses it.
            self.processes[name] = subprocess.Popen(
                self._commands[name], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True,
            )

    async def _read_address(self, name: str, path: Path) -> None:
        while not (address := read_address(path)):
            await asyncio.sleep(0.02)
        self.routers[name] = address

    async def _until_complete(self) -> None:
        began, missing = time.monotonic(), {role for role, ranks in self._ranks.items() if ranks}
        async with open_channel(self.router_address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            while missing:
                found = await _ranks_known(stub)
                for role in [role for role in self._ranks if role in missing and found.get(role, 0) >= self._ranks[role]]:
                    missing.remove(role)
                    self._report(f"{role} is up after {time.monotonic() - began:.1f} s: {', '.join(self.rank_addresses(role))}")
                if time.monotonic() - began > READY_S:
                    raise SetupError(f"after {READY_S:g} s only {found} of {self._ranks} ranks had joined; see the log lines above")
                await asyncio.sleep(_POLL_S)

    async def _watch(self) -> None:
        """Raise SetupError as soon as a process ends by itself."""
        while not (ended := [name for name, process in self.processes.items() if process.poll() is not None]):
            await asyncio.sleep(_POLL_S)
        code = self.processes[ended[0]].returncode
        raise SetupError(f"the {ended[0]} process ended with exit code {code}; its own message, if any, is above")

    async def run_until(self, stopping: asyncio.Event) -> None:
        """Watch the processes until `stopping`."""
        await first_of(self._watch(), stopping.wait())

    def rank_addresses(self, role: str) -> list[str]:
        """Ranks of the first front of `role`, written as in a request's timeline: host:port/rank."""
        sockets = psutil.Process(self.processes[role].pid).net_connections("tcp")
        bound = [found.laddr for found in sockets if found.status == psutil.CONN_LISTEN]
        listens = [f"{address.ip.removeprefix('::ffff:')}:{address.port}" for address in bound]
        return [f"{address}/{rank}" for address in listens[:1] for rank in range(self._ranks[role])]

    def engine_pids(self, name: str) -> list[int]:
        """Process ids of the engines of front `name`, by rank."""
        children = psutil.Process(self.processes[name].pid).children()
        ranks = {int(line[line.index("--rank") + 1]): child.pid for child in children if "--rank" in (line := child.cmdline())}
        return [ranks[index] for index in sorted(ranks)]

    async def stop(self) -> None:
        """Drain: fronts first, then the router. Nothing is left when it returns."""
        try:
            fronts = [process for name, process in self.processes.items() if not name.startswith("router")]
            await _end(fronts, self.drain_s + 10 if self._is_complete else _QUICK_END_S)
            await _end([process for name, process in self.processes.items() if name.startswith("router")], _QUICK_END_S)
        finally:
            self._withdraw(self.router_address)
            self._private.cleanup()


def read_address(path: Path) -> str:
    """host:port in the file, "" when there is none."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


async def _answers(address: str) -> bool:
    async with open_channel(address) as channel:
        try:
            await generation_pb2_grpc.GenerationStub(channel).GetInfo(generation_pb2.GetInfoRequest(), timeout=2.0)
        except (grpc.aio.AioRpcError, ValueError):
            return False
    return True


async def _ranks_known(stub: generation_pb2_grpc.GenerationStub) -> dict[str, int]:
    """Ranks a role that the router could use now; none when it does not answer, which _watch() will explain."""
    try:
        info: generation_pb2.GetInfoReply = await stub.GetInfo(generation_pb2.GetInfoRequest())
    except grpc.aio.AioRpcError:
        return {}
    return {role: sum(pool.num_ranks for pool in info.pools if pool.role == role) for role in ("prefill", "decode")}


async def _end(processes: Sequence["subprocess.Popen[bytes]"], patience_s: float) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its engines follow it
            process.wait()


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """--prefill and --decode, read by rank_counts()."""
    for role in ("prefill", "decode"):
        parser.add_argument(f"--{role}", default="2", metavar="N", help=f"{role} ranks, at least 1 (default 2)")


def rank_counts(arguments: argparse.Namespace) -> tuple[int, int]:
    """Ranks of prefill and of decode. Raises ConfigError, which names the variable that `make` takes."""
    texts: dict[str, str] = {role: getattr(arguments, role) for role in ("prefill", "decode")}
    for role, text in texts.items():
        if not text.isascii() or not text.isdigit() or int(text) < 1:
            raise ConfigError(f"{role.upper()} (--{role}) is {text!r} but it must be a whole number of ranks, at least 1")
    return int(texts["prefill"]), int(texts["decode"])


def main() -> None:
    parser = argument_parser("A Baton cluster on this machine")
    parser.add_argument("command", choices=["up"])
    add_rank_arguments(parser)
    arguments = parser.parse_args()

    async def up(stopping: asyncio.Event) -> None:
        prefill, decode = rank_counts(arguments)
        cluster = Cluster(arguments.config, prefill=prefill, decode=decode, settings=arguments.set, run_dir=RUN_DIR, report=say)
        try:
            await cluster.start(stopping)
            say(f"up at {cluster.router_address}; in another terminal:  .venv/bin/python -m services.router.client \"Once upon a time\"")
            say("Ctrl-C drains and stops it")
            await cluster.run_until(stopping)
            say(f"draining: what runs gets {cluster.drain_s:g} s at most; a second Ctrl-C ends it at once")
        finally:
            await cluster.stop()

    run_process(up)


if __name__ == "__main__":
    main()
