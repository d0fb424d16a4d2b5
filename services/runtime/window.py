"""From what `/metrics` said at several times to what the sizing rule takes. Pure.

A rank is a process that exports its role's own gauges; a router one that exports `baton_requests_running`. Counters are read as growth
from one time to the next, so that a process started again, or one that came during the window, counts from then on.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.runtime.queueing import Steps, fit_steps
from services.runtime.sizing import DecodeSample, PrefillSample

Series = Mapping[str, float]  # sample name, or name{label=value}, to value

QUEUED_TOKENS = "baton_prefill_queued_tokens"
QUEUE_AGE = "baton_prefill_queue_age_seconds"
LEASED_PAGES = "baton_prefill_leased_pages"
COMPUTED_TOKENS = "baton_prefill_computed_tokens_total"
BUSY_SECONDS = "baton_engine_busy_seconds_total"
REQUEST_PAGES = "baton_kv_pages{state=request}"
CAPACITY = "baton_kv_pages_capacity"
CLAIMS = "baton_decode_claims"
RUNNING = "baton_decode_running"
USED_PAGES = "baton_decode_used_pages"
DECODED_TOKENS = "baton_decode_tokens_total"
MAX_RUNNING = "baton_max_running"
STEP_SUM, STEP_COUNT = "baton_step_seconds_sum", "baton_step_seconds_count"
ACCEPT_SUM, ACCEPT_COUNT = "baton_decode_accept_length_sum", "baton_decode_accept_length_count"
ITL_SUM, ITL_COUNT = "baton_decode_itl_seconds_sum", "baton_decode_itl_seconds_count"
TTFT_BUCKET = "baton_request_ttft_seconds_bucket"  # {le=...}: the one histogram that is read whole
REQUESTS_RUNNING, REQUESTS_QUEUED = "baton_requests_running", "baton_requests_queued"
OUTCOMES = "baton_requests_total"
REFUSED = ("overloaded", "unavailable")  # outcomes of requests that a larger pool might have served
NO_LOAD = ("invalid",)  # outcomes of requests that no pool would ever have seen


@dataclass(frozen=True)
class Snapshot:
    """All processes at one time."""

    at_s: float  # any clock's, the same for all
    processes: Mapping[str, Series]  # by name


@dataclass(frozen=True)
class Measured:
    """What a window held."""

    window_s: float
    routers: int
    prefill: PrefillSample
    decode: DecodeSample
    ttft_s: float | None  # the quantile asked for, as clients saw it
    itl_s: float | None  # mean, as running requests saw it


class _Window:
    """Snapshots in order, at least two."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self.snapshots = snapshots
        self.last = snapshots[-1].processes
        self.seconds = snapshots[-1].at_s - snapshots[0].at_s

    def growth(self, process: str, name: str, pairs: Sequence[tuple[Snapshot, Snapshot]] | None = None) -> float:
        """How much a counter of `process` grew, across restarts."""
        return sum(
            _grown(before.processes[process].get(name), after.processes[process].get(name))
            for before, after in (pairs if pairs is not None else self.pairs())
            if process in before.processes and process in after.processes
        )

    def pairs(self) -> list[tuple[Snapshot, Snapshot]]:
        return list(zip(self.snapshots, self.snapshots[1:], strict=False))

    def rate(self, processes: Iterable[str], name: str) -> float:
        return sum(self.growth(process, name) for process in processes) / self.seconds

    def having(self, name: str) -> list[str]:
        """Processes that export `name` at the end."""
        return sorted(process for process, series in self.last.items() if name in series)

    def sum(self, processes: Iterable[str], name: str) -> float:
        return sum(self.last[process].get(name, 0.0) for process in processes)

    def mean(self, processes: Sequence[str], name: str) -> float:
        """Of a gauge: summed over `processes`, then averaged over the window."""
        at_each = [sum(shot.processes.get(process, {}).get(name, 0.0) for process in processes) for shot in self.snapshots]
        return sum(at_each) / len(at_each)

    def change(self, processes: Iterable[str], name: str) -> float:
        """Of a gauge from the first snapshot that has its process to the last, summed over `processes`."""
        total = 0.0
        for process in processes:
            seen = [shot.processes[process].get(name, 0.0) for shot in self.snapshots if process in shot.processes]
            total += seen[-1] - seen[0]
        return total

    def ratio(self, processes: Sequence[str], numerator: str, denominator: str) -> float | None:
        below = self.rate(processes, denominator)
        return self.rate(processes, numerator) / below if below > 0 else None


def _grown(before: float | None, after: float | None) -> float:
    if before is None or after is None:
        return 0.0
    return after - before if after >= before else after


def measure(snapshots: Sequence[Snapshot], quantile: float = 0.9) -> Measured:
    """Both pools over `snapshots`, at least two, in order of time; `quantile` of TTFT."""
    assert len(snapshots) >= 2 and snapshots[-1].at_s > snapshots[0].at_s, "a window has a beginning and an end"
    window = _Window(snapshots)
    routers = window.having(REQUESTS_RUNNING)
    prefill = window.having(QUEUED_TOKENS)
    decode = window.having(RUNNING)
    arrived, refused = _requests(window, routers)
    offered = (arrived + refused) / arrived if arrived > 0 else 1.0
    return Measured(
        window_s=window.seconds, routers=len(routers),
        prefill=_prefill(window, prefill, routers, arrived, offered),
        decode=_decode(window, decode, prefill, offered),
        ttft_s=_quantile(window, routers, TTFT_BUCKET, quantile), itl_s=window.ratio(decode, ITL_SUM, ITL_COUNT),
    )


def _quantile(window: _Window, processes: Sequence[str], bucket: str, quantile: float) -> float | None:
    """Of a histogram, within its bucket by interpolation as PromQL's histogram_quantile does; None where nothing was observed."""
    grown: dict[float, float] = {}  # upper bound -> observations at or below it
    for name in {name for process in processes for name in window.last[process] if name.startswith(f"{bucket}{{")}:
        grown[float(name.partition("=")[2].rstrip("}"))] = window.rate(processes, name)
    bounds = sorted(grown)
    if not bounds or grown[bounds[-1]] <= 0:
        return None
    wanted, lower, below = quantile * grown[bounds[-1]], 0.0, 0.0
    for bound in bounds:
        if grown[bound] >= wanted and math.isfinite(bound):
            inside = grown[bound] - below
            return lower + (bound - lower) * ((wanted - below) / inside if inside > 0 else 1.0)
        lower, below = (bound if math.isfinite(bound) else lower), grown[bound]
    return lower  # beyond the last bound: at least that


def _requests(window: _Window, routers: Sequence[str]) -> tuple[float, float]:
    """Requests a second that came in and were let in, and those refused: ended ones and those that the routers have more than before."""
    ended = refused = 0.0
    names = {name for router in routers for name in window.last[router] if name.startswith(f"{OUTCOMES}{{")}
    for name in names:
        rate, outcome = window.rate(routers, name), name.partition("=")[2].rstrip("}")
        if outcome in REFUSED:
            refused += rate
        elif outcome not in NO_LOAD:
            ended += rate
    waiting = window.change(routers, REQUESTS_RUNNING) + window.change(routers, REQUESTS_QUEUED)
    return max(0.0, ended + waiting / window.seconds), refused


def _prefill(window: _Window, ranks: Sequence[str], routers: Sequence[str], arrived: float, offered: float) -> PrefillSample:
    computed = window.rate(ranks, COMPUTED_TOKENS)
    tokens = max(0.0, computed + window.change(ranks, QUEUED_TOKENS) / window.seconds)
    held_back = window.sum(routers, REQUESTS_QUEUED)  # by routers: not yet in any rank's queue
    queued = window.sum(ranks, QUEUED_TOKENS) + (held_back * tokens / arrived if arrived > 0 else 0.0)
    return PrefillSample(
        ranks=len(ranks), tokens_per_s=tokens * offered, requests_per_s=arrived * offered if routers else None,
        token_s=window.ratio(ranks, BUSY_SECONDS, COMPUTED_TOKENS), queued_tokens=queued,
        queue_age_s=max((window.last[rank].get(QUEUE_AGE, 0.0) for rank in ranks), default=0.0),
        held_pages=window.mean(ranks, REQUEST_PAGES) + window.mean(ranks, LEASED_PAGES), rank_pages=_smallest(window, ranks, CAPACITY),
    )


def _decode(window: _Window, ranks: Sequence[str], prefill: Sequence[str], offered: float) -> DecodeSample:
    accept = window.ratio(ranks, ACCEPT_SUM, ACCEPT_COUNT) or 1.0
    steps = _steps(window, ranks, accept)
    total = sum(each.number for each in steps)

    def weighted(value: Callable[[Steps], float]) -> float | None:
        return sum(each.number * value(each) for each in steps) / total if total > 0 else None

    return DecodeSample(
        ranks=len(ranks), tokens_per_s=window.rate(ranks, DECODED_TOKENS) * offered, line=fit_steps(steps),
        batch=weighted(lambda each: each.batch), step_s=weighted(lambda each: each.step_s), accept_length=accept,
        running=window.mean(ranks, RUNNING), claims=window.mean(ranks, CLAIMS), used_pages=window.mean(ranks, USED_PAGES),
        waiting_pages=window.mean(prefill, LEASED_PAGES), rank_pages=_smallest(window, ranks, CAPACITY),
        max_running=_smallest(window, ranks, MAX_RUNNING),
    )


def _smallest(window: _Window, ranks: Sequence[str], name: str) -> float:
    return min((window.last[rank].get(name, 0.0) for rank in ranks), default=0.0)


def _steps(window: _Window, ranks: Sequence[str], accept: float) -> list[Steps]:
    """Each rank's steps between each two snapshots. Exact means, because counters tell them: tokens / steps / accept length = batch."""
    found: list[Steps] = []
    for rank in ranks:
        for pair in window.pairs():
            number = window.growth(rank, STEP_COUNT, [pair])
            tokens = window.growth(rank, DECODED_TOKENS, [pair])
            if number > 0 and tokens > 0 and math.isfinite(tokens):
                found.append(Steps(batch=tokens / number / accept, step_s=window.growth(rank, STEP_SUM, [pair]) / number, number=number))
    return found
