"""How many ranks the pools of a running cluster should have: measures for a while, then says so, why, and with which command.

    python -m services.runtime.cluster recommend [--ttft-ms 500 --itl-ms 50 --headroom 0.2] [--window 10] [--json]
                                                 [--metrics HOST:PORT,... | --prometheus URL]

Measured is what `.run/metrics.json` of a running `make up` names, unless told otherwise. Nothing is changed.
"""

import argparse
import asyncio
import re
import time
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from services.runtime.config import ADDRESS_PATTERN
from services.runtime.errors import ConfigError, Interrupted, SetupError
from services.runtime.process import say
from services.runtime.run_folder import RUN_DIR
from services.runtime.scrape import query_prometheus, read_targets, scrape
from services.runtime.serve import first_of
from services.runtime.sizing import MOST_RANKS, Advice, Targets, recommend
from services.runtime.window import Measured, Snapshot, measure

METRICS_FILE = RUN_DIR / "metrics.json"
SCALE = "python -m services.runtime.cluster scale"
_READS_S = 1.0  # between two reads, so that step times are seen at different batches
_FEWEST_READS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What main() reads."""
    parser.add_argument("--ttft-ms", type=float, default=500.0, metavar="MS",
                        help="time to first token that 90 %% of prompts of mean length should see (default 500)")
    parser.add_argument("--itl-ms", type=float, default=50.0, metavar="MS", help="mean time between tokens (default 50)")
    parser.add_argument("--headroom", type=float, default=0.2, metavar="SHARE", help="share of each pool to keep free (default 0.2)")
    parser.add_argument("--max-ranks", type=int, default=MOST_RANKS, metavar="N", help=f"ceiling of each pool (default {MOST_RANKS})")
    parser.add_argument("--window", type=float, default=10.0, metavar="S", help="seconds to measure (default 10)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--metrics", default="", metavar="HOST:PORT,...", help=f"processes to ask (default: those of {METRICS_FILE})")
    source.add_argument("--prometheus", default="", metavar="URL", help="take the last --window seconds from a Prometheus server instead")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


async def main(arguments: argparse.Namespace, stopping: asyncio.Event | None = None) -> None:
    """Measure, and print what to do. Raises ConfigError, SetupError, and Interrupted when `stopping` is set before the end."""
    targets, window_s = _targets(arguments), _positive("--window", arguments.window)
    snapshots: list[Snapshot] = []

    async def look() -> None:
        snapshots.extend(await _snapshots(arguments, window_s))

    stopping = stopping or asyncio.Event()
    await first_of(look(), stopping.wait())
    if stopping.is_set():
        raise Interrupted("interrupted; nothing was changed")
    if len(snapshots) < 2:
        raise SetupError(f"--window is {window_s:g} s but fewer than two readings lie in it; give a longer one, of some scrapes")
    measured = measure(snapshots, targets.quantile)
    advice = recommend(measured.prefill, measured.decode, targets)
    if not any(each.ranks for each in advice):
        names = ", ".join(sorted(snapshots[-1].processes))
        raise SetupError(f"no rank of prefill or decode was measured, only {names}; name the engines' metrics")
    if arguments.json:
        say(msgspec.json.encode(_as_json(measured, advice, targets)).decode())
    else:
        _print(measured, advice, targets)


def _positive(name: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} is {value:g} but it must be above 0")
    return value


def _targets(arguments: argparse.Namespace) -> Targets:
    ttft_ms, itl_ms = _positive("--ttft-ms", arguments.ttft_ms), _positive("--itl-ms", arguments.itl_ms)
    if not 0 <= arguments.headroom <= 0.9:
        raise ConfigError(f"--headroom is {arguments.headroom:g} but it must be between 0 and 0.9")
    if not 1 <= arguments.max_ranks <= MOST_RANKS:
        raise ConfigError(f"--max-ranks is {arguments.max_ranks} but it must be between 1 and {MOST_RANKS}")
    return Targets(ttft_s=ttft_ms / 1000, itl_s=itl_ms / 1000, headroom=arguments.headroom, most_ranks=arguments.max_ranks)


async def _snapshots(arguments: argparse.Namespace, window_s: float) -> list[Snapshot]:
    reads = max(_FEWEST_READS, round(window_s / _READS_S) + 1)
    if arguments.prometheus:
        now = time.time()
        return await asyncio.to_thread(query_prometheus, arguments.prometheus, window_s=window_s, reads=reads, now=now)
    processes = _named(arguments.metrics) if arguments.metrics else read_targets(METRICS_FILE)
    with Console(stderr=True).status("") as status:
        def left(seconds: float) -> None:
            status.update(f"reading /metrics of {len(processes)} processes: {seconds:.0f} s left")

        return await scrape(processes, window_s=window_s, reads=reads, report=left)


def _named(text: str) -> dict[str, str]:
    addresses = [address.strip() for address in text.split(",") if address.strip()]
    if not addresses:
        raise ConfigError(f"--metrics names no process in {text!r}; give host:port,...")
    for address in addresses:
        if not re.match(ADDRESS_PATTERN, address):
            raise ConfigError(f"--metrics has {address!r}, which is not of the form host:port, e.g. 127.0.0.1:9401")
    return {address: address for address in addresses}


def _as_json(measured: Measured, advice: tuple[Advice, Advice], targets: Targets) -> dict[str, Any]:
    command = scale_command(advice)
    return {"targets": targets, "measured": measured, "pools": {each.role: each for each in advice}, "command": command or None}


def scale_command(advice: tuple[Advice, ...]) -> str:
    """What carries the advice out, "" when nothing is to change."""
    changes = [f"{each.role}={each.wanted}" for each in advice if each.has_data and each.wanted != each.ranks]
    return f"{SCALE} {' '.join(changes)}" if changes else ""


def _print(measured: Measured, advice: tuple[Advice, Advice], targets: Targets) -> None:
    console = Console()
    console.print(_table(measured, advice, targets))
    for each in advice:
        console.print(f"{each.role}: {each.reason}.", highlight=False)
    command = scale_command(advice)
    if command:
        say(f"\n{command}")
    elif all(each.has_data for each in advice):
        say("\nnothing to change")


def _table(measured: Measured, advice: tuple[Advice, Advice], targets: Targets) -> Table:
    title = f"measured for {measured.window_s:.0f} s; {100 * targets.headroom:.0f} % headroom"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("pool", "ranks", "wanted", "binds", "latency", "seen", "predicted", "target", "busy"):
        table.add_column(name, justify="left" if name in ("pool", "binds", "latency") else "right", no_wrap=True)
    shown = f"TTFT p{100 * targets.quantile:.0f}"
    latencies = {"prefill": (shown, measured.ttft_s, targets.ttft_s), "decode": ("ITL mean", measured.itl_s, targets.itl_s)}
    for each in advice:
        name, seen_s, target_s = latencies[each.role]
        busy = "-" if each.utilisation is None else f"{100 * each.utilisation:.0f} %"
        times = [_ms(seconds) for seconds in (seen_s, each.predicted_s, target_s)]
        table.add_row(each.role, str(each.ranks), str(each.wanted), each.binding, name, *times, busy)
    return table


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.0f} s"
