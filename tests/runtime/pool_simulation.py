"""Queues of prefill and decode ranks, simulated; what they did as `/metrics` would tell it."""

import heapq
from dataclasses import dataclass

import numpy as np

from services.runtime.window import Snapshot

TOKEN_S = 0.0004  # of prefill
BASE_S, REQUEST_S = 0.010, 0.0010  # of a decode step: a + b x batch
PAGES = 4  # of a running request


@dataclass
class Run:
    """What clients saw, and what an operator would."""

    latencies_s: np.ndarray  # waits of prompts; gaps of tokens, one a request and step
    snapshots: list[Snapshot]


def prefill_run(ranks: int, *, requests_per_s: float, tokens: float, seconds: float, seed: int) -> Run:
    """Poisson arrivals of prompts with exponentially distributed lengths, each to the rank with the least work in front of it."""
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1 / requests_per_s, round(requests_per_s * seconds)))
    sizes = np.ceil(random.exponential(tokens, len(arrivals)))
    free, starts, places = [(0.0, rank) for rank in range(ranks)], np.empty(len(arrivals)), np.empty(len(arrivals), int)
    for number, (at, size) in enumerate(zip(arrivals, sizes, strict=True)):
        free_at, places[number] = heapq.heappop(free)
        starts[number] = max(at, free_at)
        heapq.heappush(free, (starts[number] + size * TOKEN_S, int(places[number])))

    def shot(at: float) -> Snapshot:
        computed = np.clip((at - starts) / TOKEN_S, 0, sizes)
        is_here, is_over = arrivals <= at, computed >= sizes
        processes: dict[str, dict[str, float]] = {
            "router": {
                "baton_requests_running": float(np.sum(is_here & ~is_over)), "baton_requests_total{outcome=ok}": float(np.sum(is_over)),
            },
        }
        for rank in range(ranks):
            own = places == rank
            done = float(np.sum(computed[own]))
            processes[f"prefill/{rank}"] = {
                "baton_prefill_queued_tokens": float(np.sum(sizes[own & is_here])) - done, "baton_prefill_computed_tokens_total": done,
                "baton_engine_busy_seconds_total": done * TOKEN_S,
            }
        return Snapshot(at, processes)

    return Run(starts - arrivals, [shot(at) for at in (seconds * (0.1 + 0.08 * number) for number in range(11))])


class _DecodeRank:
    def __init__(self) -> None:
        self.left: list[int] = []  # tokens that each request still gets
        self.arrived: list[int] = []  # during the step under way
        self.tokens = self.steps = 0
        self.seconds = 0.0

    @property
    def size(self) -> int:
        return len(self.left) + len(self.arrived)

    def series(self) -> dict[str, float]:
        return {
            "baton_decode_running": float(len(self.left)),
            "baton_decode_claims": 0.0,
            "baton_decode_used_pages": float(PAGES * len(self.left)),
            "baton_decode_tokens_total": float(self.tokens),
            "baton_step_seconds_count": float(self.steps),
            "baton_step_seconds_sum": self.seconds,
            "baton_kv_pages_capacity": 1024.0,
            "baton_max_running": 64.0,
        }


def decode_run(ranks: int, *, requests_per_s: float, tokens: float, seconds: float, seed: int) -> Run:
    """Poisson arrivals of requests with geometrically distributed answers, each to the smallest rank; a token each a step."""
    random = np.random.default_rng(seed)
    pool = [_DecodeRank() for _ in range(ranks)]
    events: list[tuple[float, int, int]] = [(0.0, -1, 0)]  # time, rank whose step ends or -1 for an arrival, a number that breaks ties
    gaps, shots, due = list[np.ndarray](), list[Snapshot](), seconds / 10
    while events[0][0] < seconds:
        now, place, number = heapq.heappop(events)
        while now >= due:
            shots.append(Snapshot(due, {f"decode/{rank}": each.series() for rank, each in enumerate(pool)}))
            due += seconds * 0.08
        if place < 0:
            heapq.heappush(events, (now + random.exponential(1 / requests_per_s), -1, number + 1))
            place = min(range(ranks), key=lambda each: (pool[each].size, random.random()))
            pool[place].arrived.append(int(random.geometric(1 / tokens)))
            if pool[place].left:
                continue  # a step is under way
        else:
            pool[place].left = [left - 1 for left in pool[place].left if left > 1]
        rank = pool[place]
        rank.left += rank.arrived
        rank.arrived = []
        if rank.left:
            step_s = BASE_S + REQUEST_S * len(rank.left)
            gaps.append(np.full(len(rank.left), step_s))
            rank.tokens, rank.steps, rank.seconds = rank.tokens + len(rank.left), rank.steps + 1, rank.seconds + step_s
            heapq.heappush(events, (now + step_s, place, number))
    return Run(np.concatenate(gaps), shots)
