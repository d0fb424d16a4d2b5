"""Reads `/metrics` of processes, or the same series from a Prometheus server."""

import asyncio
import json
import math
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from services.runtime.errors import ConfigError, SetupError
from services.runtime.window import TTFT_BUCKET, Snapshot

_TIMEOUT_S = 3.0
_MOST_BYTES = 8 << 20  # of an answer: a process says about 20 kB
_AT_ONCE = 16
_LABELS = ("state", "outcome", "le")  # those of our own that tell series of a process apart
_WANTED = (  # what services/runtime/window.py reads
    "baton_prefill_.*|baton_decode_(claims|running|used_pages|tokens_total)|baton_(decode_accept_length|decode_itl_seconds)_(sum|count)"
    "|baton_step_seconds_(sum|count)|baton_request_ttft_seconds_bucket|baton_requests_.*|baton_engine_busy_seconds_total"
    "|baton_kv_pages|baton_kv_pages_capacity|baton_max_running"
)


class _Group(msgspec.Struct):
    """An entry of Prometheus's file_sd form, as a running `make up` writes it."""

    targets: list[str]
    labels: dict[str, str] = {}


def read_targets(path: Path) -> dict[str, str]:
    """Process name to host:port of every process that the file_sd file names. Raises SetupError."""
    try:
        groups = msgspec.json.decode(path.read_bytes(), type=list[_Group])
    except OSError:
        raise SetupError(
            f"no cluster of this tree is up: {path} is not there; start one with make up, or name processes with --metrics HOST:PORT,..."
        ) from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise SetupError(f"{path} is not in Prometheus's file_sd form ({error}); start the cluster again") from None
    named = {group.labels.get("process", target): target for group in groups for target in group.targets}
    if len(named) == sum(len(group.targets) for group in groups):
        return named
    return {target: target for group in groups for target in group.targets}  # one name for several: addresses tell them apart


def series_of(text: str) -> dict[str, float]:
    """The samples of an exposition; buckets are kept of TTFT alone. Raises ValueError for what is no exposition."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("baton_") and ("le" not in sample.labels or sample.name == TTFT_BUCKET):
                key = _key(sample.name, sample.labels)
                found[key] = found.get(key, 0.0) + sample.value
    return found


def _key(name: str, labels: dict[str, str]) -> str:
    own = ",".join(f"{label}={labels[label]}" for label in _LABELS if label in labels)
    return f"{name}{{{own}}}" if own else name


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:
        return reply.read(_MOST_BYTES).decode()


async def scrape(targets: dict[str, str], *, window_s: float, reads: int, report: Callable[[float], None]) -> list[Snapshot]:
    """Read all of `targets` (name to host:port) `reads` times over `window_s`; `report` hears how many seconds are left. A process that
    does not answer is missing from that snapshot. Raises SetupError when none ever answers."""
    began, snapshots = time.monotonic(), list[Snapshot]()
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="scrape") as pool:
        loop = asyncio.get_running_loop()
        for number in range(reads):
            due = began + window_s * number / (reads - 1)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            report(max(0.0, began + window_s - time.monotonic()))
            read_at = time.monotonic()
            answers = await asyncio.gather(*(loop.run_in_executor(pool, _read_one, address) for address in targets.values()))
            alive = {name: answer for name, answer in zip(targets, answers, strict=True) if isinstance(answer, dict)}
            if not alive:
                raise SetupError(f"no process answers with metrics: {answers[0]}" if answers else "no process to ask for metrics")
            snapshots.append(Snapshot(read_at, alive))
    return snapshots


def _read_one(address: str) -> dict[str, float] | str:
    """Its series, or why there are none."""
    try:
        return series_of(_get(f"http://{address}/metrics"))
    except (OSError, ValueError) as error:
        return f"http://{address}/metrics: {getattr(error, 'reason', error)}"


def query_prometheus(url: str, *, window_s: float, reads: int, now: float) -> list[Snapshot]:
    """The last `window_s` before `now` (unix seconds) as `reads` snapshots, from the HTTP API of the Prometheus server at `url`; its
    instances are the processes. Raises SetupError, ConfigError."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--prometheus is {url!r} but it must be a URL such as http://127.0.0.1:9090")
    step_s = window_s / (reads - 1)
    query = {"query": f'{{__name__=~"{_WANTED}"}}', "start": f"{now - window_s:.3f}", "end": f"{now:.3f}", "step": f"{step_s:.3f}"}
    try:
        answer = json.loads(_get(f"{url.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(query)}"))
        if answer["status"] != "success":
            raise ValueError(answer.get("error", "no success"))
        return _snapshots_of(answer["data"]["result"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = getattr(error, "reason", error)
        raise SetupError(f"the Prometheus server at {url} does not answer as one ({why}); check --prometheus") from None


def _snapshots_of(result: Iterable[dict[str, Any]]) -> list[Snapshot]:
    """One at each time of a range query's result."""
    at: dict[float, dict[str, dict[str, float]]] = {}
    for row in result:
        labels: dict[str, str] = row["metric"]
        process, key = labels.get("instance", ""), _key(labels["__name__"], labels)
        values: Sequence[tuple[float, str]] = row["values"]
        for moment, text in values:
            value = float(text)
            if math.isfinite(value):
                series = at.setdefault(moment, {}).setdefault(process, {})
                series[key] = series.get(key, 0.0) + value
    return [Snapshot(moment, at[moment]) for moment in sorted(at)]
