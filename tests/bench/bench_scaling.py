"""What a second decode node brings (SC-2), and streams that fail while pools scale (SC-FAIL).

Each decode node, front and engine, may use 0.35 of a CPU, by cgroup; routers, prefill and the client are not capped and have time left.
Needs root for the cgroup. Both runs have the same streams a node, more than it runs at once, so that each node is as busy, its batch as
large and its queue as long in both: requests that wait at a node cost it CPU time too.
"""

import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from proto.baton.v1 import generation_pb2_grpc
from tests.bench.report import Row, report
from tests.clear import CLEAR
from tests.e2e.rig import Answer, Rig, generate
from tests.e2e.scaling_run import run_scaling

CAP = 0.35
MAX_RUNNING = 8  # requests a node
STREAMS_A_NODE = 12
NUM_OUTPUT = 96
WARM_S, WINDOW_S = 5.0, 25.0
_PERIOD_US = 20_000
_GROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def capped(name: str, pids: Sequence[int]) -> Generator[None]:
    """`pids` together may use CAP of a CPU while the block runs."""
    is_v1 = (_GROUPS / "cpu").is_dir()
    group = (_GROUPS / "cpu" if is_v1 else _GROUPS) / f"baton-bench-{os.getpid()}-{name}"
    root = group.parent / "cgroup.procs"
    if not is_v1:
        (_GROUPS / "cgroup.subtree_control").write_text("+cpu")
    group.mkdir()
    try:
        quota = round(CAP * _PERIOD_US)
        if is_v1:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has ended
                root.write_text(pid)
        group.rmdir()


@dataclass
class Measured:
    """One run: tokens a second, and CPUs used, 1 = one core."""

    rate: float
    busy: dict[str, float]  # router, prefill, client; each decode node
    total: float  # the whole machine's, of all its cores

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {value:.2f}" for name, value in self.busy.items())
        return f"{self.rate:.1f} tokens/s; CPUs used: {shown}; whole machine {self.total:.2f} of {psutil.cpu_count()}"


def make_requests(seed: int) -> list[dict[str, Any]]:
    """Four distinct prompts of less than a page: prefill and router have little to do."""
    draw = random.Random(seed)
    prompts = [[0, *(draw.randrange(3, 4000) for _ in range(15))] for _ in range(4)]
    return [{"prompt": prompt, "max_tokens": NUM_OUTPUT, "temperature": 0.0, "ignore_eos": True, "seed": 1} for prompt in prompts]


class Clients:
    """So many, each with one request after another."""

    def __init__(self, address: str, number: int) -> None:
        self.num_tokens = 0
        self.stopping = False
        self._address, self._number = address, number

    async def run(self) -> None:
        """Until `stopping`, and what runs then has ended."""
        async with CLEAR.open_channel(self._address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            await asyncio.gather(*(self._client(stub, fields) for fields in make_requests(2) * (self._number // 4)))

    async def _client(self, stub: Any, fields: dict[str, Any]) -> None:
        while not self.stopping:
            seen = 0

            def count(answer: Answer) -> None:
                nonlocal seen
                self.num_tokens += len(answer.token_ids) - seen
                seen = len(answer.token_ids)

            await generate(stub, count, **fields)


def measure(num_nodes: int) -> Measured:
    """Throughput of `num_nodes` decode nodes."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as groups:
        rig = Rig(1, 0, [f"decode.max_running={MAX_RUNNING}"], Path(folder))
        try:
            nodes = [rig.cluster.add_front("decode", 1) for _ in range(num_nodes)]
            rig.wait_for_ranks("decode", num_nodes)
            for name in nodes:
                groups.enter_context(capped(name, family(rig, name)))
            return asyncio.run(_timed(rig, nodes))
        finally:
            rig.close()


def family(rig: Rig, name: str) -> list[int]:
    """Process ids of a process of the cluster and its engines."""
    head = psutil.Process(rig.cluster.processes[name].pid)
    return [head.pid, *(child.pid for child in head.children(recursive=True))]


async def _timed(rig: Rig, nodes: Sequence[str]) -> Measured:
    whom = {name: family(rig, name) for name in ("router", "prefill", *nodes)} | {"client": [os.getpid()]}
    clients = Clients(rig.address, STREAMS_A_NODE * len(nodes))
    work = asyncio.ensure_future(clients.run())
    try:
        await asyncio.wait([work], timeout=WARM_S)
        before, idle_before = {name: _cpu_of(pids) for name, pids in whom.items()}, psutil.cpu_times().idle
        began, num_before = time.perf_counter(), clients.num_tokens
        await asyncio.wait([work], timeout=WINDOW_S)
        seconds, num_tokens = time.perf_counter() - began, clients.num_tokens - num_before
        busy = {name: (_cpu_of(pids) - before[name]) / seconds for name, pids in whom.items()}
        total = (psutil.cpu_count() or 1) - (psutil.cpu_times().idle - idle_before) / seconds
        assert not work.done(), "a stream failed"
    finally:
        clients.stopping = True
        await work
    return Measured(num_tokens / seconds, busy, total)


def _cpu_of(pids: Sequence[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


def main() -> None:
    one, two = measure(1), measure(2)
    for number, found in ((1, one), (2, two)):
        print(f"  {number} decode node{'s' if number > 1 else ''}: {found}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        scaled = asyncio.run(run_scaling(Path(folder), seed=1))
    load = scaled.load
    shape = (f"{WINDOW_S:g} s of {STREAMS_A_NODE} streams a decode node, one request after another, 16 tokens in and {NUM_OUTPUT} out, "
             f"greedy; a decode node is capped at {CAP} CPU by cgroup and runs {MAX_RUNNING} requests at most; 1 prefill rank, 1 router, "
             "uncapped")
    rest = max(found.busy[name] for found in (one, two) for name in ("router", "prefill", "client"))
    report("scaling", [
        Row("SC-2", two.rate / one.rate, "x", "higher", 1.6, 1.9, f"throughput of 2 decode nodes over 1. One: {one}. Two: {two}. {shape}"),
        Row("SC-BUSY", rest, "CPUs", "lower", 0.8, 0.8, "the busiest of router, prefill and client in either run: none holds decode up"),
        Row("SC-FAIL", len(load.failed), "streams", "lower", 0, 0,
            f"of {len(load.done) + len(load.failed)} while decode scaled 1 -> 3 -> 1 and prefill 2 -> 1 -> 2 through two routers, "
            f"UCX_TLS=tcp; recoveries {dict(load.recoveries())}; seconds of each command: "
            + ", ".join(f"{name} {seconds:.1f}" for name, seconds in scaled.steps.items())),
    ])


if __name__ == "__main__":
    main()
