"""A cluster on this machine: one router and a front a pool, as separate processes on free ports.

    python -m services.runtime.cluster up --config deploy/dev.toml [--prefill 2 --decode 2]

Life of a cluster: router first (its address goes to `.run/router`), then the fronts, then wait until every rank has joined;
Ctrl-C or SIGTERM drains: fronts finish what runs, then the router leaves.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from proto.baton.v1 import generation_pb2, generation_pb2_grpc
from services.runtime.config import argument_parser
from services.runtime.errors import SetupError
from services.runtime.serve import first_of, open_channel, run_process

RUN_DIR = Path(".run")
READY_S = 300.0
_LEAVE_S = 70.0  # a drain takes 60 s at most


class Cluster:
    """Starts, watches and ends the processes. `settings` are `--set` overrides for every one of them; the fronts join
    `more_routers` besides their own.
    """

    def __init__(self, config: Path | None, *, prefill: int, decode: int, settings: Sequence[str] = (), run_dir: Path = RUN_DIR,
                 more_routers: Sequence[str] = ()) -> None:
        self.router_address = ""
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self._config = config
        self._ranks = {"prefill": prefill, "decode": decode}
        self._settings = settings
        self._run_dir = run_dir
        self._more_routers = more_routers

    async def start(self) -> None:
        """Start everything and wait until every rank has joined. Raises SetupError when a process cannot start."""
        await self.start_router()
        for role, ranks in self._ranks.items():
            await self.add_front(role, ranks)
        await first_of(self._watch(), self._until_complete())

    async def start_router(self) -> None:
        """Start the router alone and learn its address."""
        self._run_dir.mkdir(parents=True, exist_ok=True)
        address_file = self._run_dir / "router"
        address_file.unlink(missing_ok=True)
        await self._spawn("router", "services.router", ["--address-file", str(address_file)])
        await first_of(self._watch(), self._read_address(address_file))

    async def add_front(self, role: str, ranks: int) -> str:
        """Start one more front of `role` with `ranks` ranks; returns its name here."""
        name = role if role not in self.processes else f"{role}-{len(self.processes)}"
        routers = ", ".join(f'"{address}"' for address in (self.router_address, *self._more_routers))
        overrides = [f"{role}.ranks={ranks}", f"{role}.routers=[{routers}]"]
        await self._spawn(name, f"services.{role}", [word for override in overrides for word in ("--set", override)])
        return name

    async def _spawn(self, name: str, module: str, extra: Sequence[str]) -> None:
        arguments = ["--config", str(self._config)] if self._config is not None else []
        for setting in self._settings:
            arguments += ["--set", setting]
        # A session of its own, so that Ctrl-C in the terminal reaches this process alone and the drain has an order.
        self.processes[name] = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *arguments, *extra, start_new_session=True
        )

    async def _read_address(self, path: Path) -> None:
        while not (address := _text_of(path)):
            await asyncio.sleep(0.02)
        self.router_address = address

    async def _until_complete(self) -> None:
        deadline = time.monotonic() + READY_S
        async with open_channel(self.router_address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            while True:
                info: generation_pb2.GetInfoReply = await stub.GetInfo(generation_pb2.GetInfoRequest())
                found = {pool.role: pool.num_ranks for pool in info.pools}
                if all(found.get(role, 0) >= ranks for role, ranks in self._ranks.items()):
                    return
                if time.monotonic() > deadline:
                    raise SetupError(f"after {READY_S:g} s only {found} of {self._ranks} ranks had joined; see the log lines above")
                await asyncio.sleep(0.05)

    async def _watch(self) -> None:
        """Raise SetupError as soon as a process ends by itself."""
        names = {asyncio.ensure_future(process.wait()): name for name, process in self.processes.items()}
        done, pending = await asyncio.wait(names, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        name = names[done.pop()]
        raise SetupError(f"the {name} process ended with exit code {self.processes[name].returncode}; its own message is above")

    async def run_until(self, stopping: asyncio.Event) -> None:
        """Watch the processes until `stopping`."""
        await first_of(self._watch(), stopping.wait())

    def engine_pids(self, name: str) -> list[int]:
        """Process ids of the engines of front `name`, by rank."""
        children = psutil.Process(self.processes[name].pid).children()
        ranks = {int(line[line.index("--rank") + 1]): child.pid for child in children if "--rank" in (line := child.cmdline())}
        return [ranks[index] for index in sorted(ranks)]

    async def stop(self) -> None:
        """Drain: fronts first, then the router. Nothing is left when it returns."""
        fronts = [process for name, process in self.processes.items() if name != "router"]
        await _end(fronts, _LEAVE_S)
        await _end([process for name, process in self.processes.items() if name == "router"], 10.0)
        (self._run_dir / "router").unlink(missing_ok=True)


def _text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def _end(processes: Sequence[asyncio.subprocess.Process], patience_s: float) -> None:
    for process in processes:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
    waiting = [asyncio.ensure_future(process.wait()) for process in processes]
    if waiting:
        await asyncio.wait(waiting, timeout=patience_s)
    for process in processes:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def main() -> None:
    parser = argument_parser("A Baton cluster on this machine")
    parser.add_argument("command", choices=["up"])
    parser.add_argument("--prefill", type=int, default=2, help="prefill ranks")
    parser.add_argument("--decode", type=int, default=2, help="decode ranks")
    arguments = parser.parse_args()

    async def up(stopping: asyncio.Event) -> None:
        cluster = Cluster(arguments.config, prefill=arguments.prefill, decode=arguments.decode, settings=arguments.set)
        try:
            print(f"starting a router, {arguments.prefill} prefill and {arguments.decode} decode ranks ...", flush=True)
            await cluster.start()
            print(f"up at {cluster.router_address}; in another terminal:  .venv/bin/python -m services.router.client \"Once upon a time\"")
            print("Ctrl-C drains and stops it", flush=True)
            await cluster.run_until(stopping)
            print("draining ...", flush=True)
        finally:
            await cluster.stop()

    run_process(up)


if __name__ == "__main__":
    main()
