"""How many ranks each pool should have: what was measured over a window and two targets in, ranks and the reason out. Pure: no clock,
no I/O, and nothing but what was measured: where data lack, the advice says so and keeps the ranks there are.

Every bound is a function of the number of ranks, and the bound that asks for most binds. Formulas: services/runtime/queueing.py.

    prefill  compute       busy ranks / ranks <= 1
             TTFT          service of a mean prompt + wait of `quantile` of prompts in M/M/c <= target
             KV pages      pages of prompts, leased ones too / pages there are <= 1; not while decode itself is short: leases end with reads
    decode   ITL           lone ITL / (1 - share of what a rank can give) <= target
             KV pages      pages used, and leased on the prefill side for it / pages there are <= 1
             max_running   requests running, and waiting with their leases / places <= 1

A pool grows when it would break a bound with half the headroom left, and then to what holds every bound with all of it: under load /
(1 - headroom). It shrinks by one rank at a time while that holds too, and at once to one rank when nothing at all came. Between the two
nothing moves, so that a size just taken is not taken back.

Dynamo's planner moves by one when every engine's estimate, from a fit of its forward passes, breaks TTFT or ITL, above a floor from
forecast load. Here the fit is the same in kind, growth goes to the size that the formulas give, and there is no forecast. llm-d's
variant autoscaler scales on shares of KV (0.80) and of queue slots alone; here those are two bounds beside the latencies.
"""

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.runtime.queueing import StepLine, steepest_line, wait_quantile

MOST_RANKS = 1024  # of a pool, where no ceiling is given
DRAIN_S = 30.0  # a backlog should be gone in about the time that a new rank takes to serve
_LONE_BATCH = 1.05  # mean requests a step up to which they count as running alone
_REACH = 1.1  # a target that no number of ranks reaches counts as this much above what a lone request takes


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What the sizes are for. `quantile`: the share of prompts of mean length that should see `ttft_s`; `itl_s` is a mean."""

    ttft_s: float = 0.5
    itl_s: float = 0.05
    headroom: float = 0.2  # share of a pool that is to stay free, 0 <= headroom < 1
    quantile: float = 0.9
    most_ranks: int = MOST_RANKS  # of each pool


@dataclass(frozen=True, kw_only=True)
class PrefillSample:
    """The prefill pool over a window: sums over its ranks unless said otherwise. None = could not be measured."""

    ranks: int
    tokens_per_s: float  # uncached prompt tokens that arrived, those still queued included
    requests_per_s: float | None  # that arrived
    token_s: float | None  # busy seconds a computed token
    queued_tokens: float = 0.0  # at the end
    queue_age_s: float = 0.0  # of the oldest, at the end
    held_pages: float = 0.0  # of requests and leases
    rank_pages: float = 0.0  # that one rank has
    service_cv2: float = 1.0  # squared coefficient of variation of a prompt's service time


@dataclass(frozen=True, kw_only=True)
class DecodeSample:
    """The decode pool over a window: sums over its ranks unless said otherwise. None = could not be measured."""

    ranks: int
    tokens_per_s: float  # given
    line: StepLine | None  # step time against batch
    batch: float | None = None  # mean requests a step, of one rank
    step_s: float | None = None  # mean
    accept_length: float = 1.0  # tokens a request a step
    running: float = 0.0  # requests
    claims: float = 0.0
    used_pages: float = 0.0  # of running requests
    waiting_pages: float = 0.0  # leased on the prefill side, for requests that do not run yet
    rank_pages: float = 0.0  # that one rank has
    max_running: float = 0.0  # of one rank

    @property
    def waiting(self) -> float:
        """Requests whose prompts are computed and that no decode rank runs: their pages / pages a running request, claims at most."""
        if self.used_pages <= 0 or self.running <= 0:
            return min(self.claims, self.waiting_pages)
        return min(self.claims, self.waiting_pages * self.running / self.used_pages)

    @property
    def demand_per_s(self) -> float:
        """Tokens a second, if those that wait ran as those that run do."""
        return self.tokens_per_s * (1.0 + self.waiting / self.running) if self.running > 0 else self.tokens_per_s


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What a pool should do. `binding`: the bound that asks for most, or why there is none: idle, minimum, lacks data."""

    role: str
    ranks: int
    wanted: int
    binding: str
    reason: str  # a sentence
    has_data: bool = True
    predicted_s: float | None = None  # TTFT or ITL at `wanted` ranks under the measured load; None = not measured, or over capacity
    utilisation: float | None = None  # at `wanted` ranks: busy share of prefill, share of decode's greatest throughput


@dataclass(frozen=True)
class _Bound:
    """`value(ranks, times)`, under `times` the load, must not exceed `limit`; it never grows with ranks nor shrinks with load."""

    name: str
    value: Callable[[int, float], float]
    limit: float
    is_time: bool = False
    note: str = ""  # on the limit

    def fewest(self, times: float, most: int) -> int:
        """Ranks that keep the bound; `most` where none do."""
        return bisect.bisect_left(range(1, most), True, key=lambda ranks: self.value(ranks, times) <= self.limit) + 1

    def show(self, ranks: int, times: float) -> str:
        value = self.value(ranks, times)
        if not self.is_time:
            return f"{100 * value:.0f} %"
        if math.isinf(value):
            return "without end"
        if value >= 10:
            return f"{value:.0f} s"
        return f"{1000 * value:.0f} ms" if value > 0 else "less"


def recommend(prefill: PrefillSample, decode: DecodeSample, targets: Targets) -> tuple[Advice, Advice]:
    """Both pools: decode first, because a decode pool that is short fills prefill's pages."""
    decode_advice = size_decode(decode, targets)
    return size_prefill(prefill, targets, decode_is_short=decode_advice.wanted > decode.ranks), decode_advice


def size_prefill(sample: PrefillSample, targets: Targets, *, decode_is_short: bool = False) -> Advice:
    """The prefill pool; `decode_is_short`: its leases wait for decode ranks to come, and more prefill would only add to them."""
    if sample.ranks < 1:
        return _lacking("prefill", sample.ranks, "no rank of it was measured")
    if not (sample.tokens_per_s > 0 or sample.queued_tokens > 0 or sample.held_pages > 0):
        return _idle("prefill", sample.ranks, targets)
    if sample.token_s is None:
        what = f"{sample.queued_tokens:.0f} tokens wait (the oldest {sample.queue_age_s:.1f} s) and {sample.held_pages:.0f} pages are held"
        what += ", but no token was computed"
        return _lacking("prefill", sample.ranks, what)
    backlog = max(0.0, sample.queued_tokens - sample.tokens_per_s * targets.ttft_s)  # Little's law: what may wait within the target
    clearing = min(backlog / max(DRAIN_S, targets.ttft_s) * sample.token_s, sample.ranks)  # as many ranks again at most
    load = sample.tokens_per_s * sample.token_s + clearing  # ranks kept busy
    bounds = [_Bound("compute", lambda ranks, times: times * load / ranks, 1.0)]
    predict = None
    if sample.requests_per_s is not None and sample.requests_per_s > 0:
        service_s = sample.tokens_per_s / sample.requests_per_s * sample.token_s

        def ttft_s(ranks: int, times: float) -> float:
            return service_s + wait_quantile(ranks, times * load, service_s, targets.quantile, sample.service_cv2)

        bounds.append(_time_bound("TTFT", ttft_s, targets.ttft_s, service_s))
        predict = ttft_s
    if sample.rank_pages > 0 and not decode_is_short:
        bounds.append(_Bound("KV pages", lambda ranks, times: times * sample.held_pages / (ranks * sample.rank_pages), 1.0))
    return _settle("prefill", sample.ranks, bounds, targets, predict, lambda ranks: load / ranks)


def size_decode(sample: DecodeSample, targets: Targets) -> Advice:
    """The decode pool."""
    if sample.ranks < 1:
        return _lacking("decode", sample.ranks, "no rank of it was measured")
    if not (sample.tokens_per_s > 0 or sample.running > 0 or sample.claims > 0 or sample.waiting_pages > 0):
        return _idle("decode", sample.ranks, targets)
    if not sample.batch or sample.step_s is None:
        return _lacking("decode", sample.ranks, f"{sample.running:.0f} requests run and {sample.claims:.0f} wait, but no step was seen")
    line = sample.line or steepest_line(sample.batch, sample.step_s)

    def itl_s(ranks: int, times: float) -> float:
        return line.itl_s(times * sample.demand_per_s / ranks, sample.accept_length)

    bounds = [_itl_bound(sample, itl_s, targets, line)]
    now_s = itl_s(sample.ranks, 1.0)

    def stretch(ranks: int) -> float:
        """Fewer ranks step more slowly, and so more requests run at a time: Little's law."""
        return max(1.0, itl_s(ranks, 1.0) / now_s) if math.isfinite(now_s) else 1.0

    def occupied(held: float, places: float) -> Callable[[int, float], float]:
        return lambda ranks, times: times * held * stretch(ranks) / (ranks * places)

    if sample.rank_pages > 0:
        bounds.append(_Bound("KV pages", occupied(sample.used_pages + sample.waiting_pages, sample.rank_pages), 1.0))
    if sample.max_running > 0:
        bounds.append(_Bound("max_running", occupied(sample.running + sample.waiting, sample.max_running), 1.0))
    predict = itl_s if sample.line is not None else None
    return _settle("decode", sample.ranks, bounds, targets, predict,
                   lambda ranks: line.share(sample.demand_per_s / ranks, sample.accept_length) if sample.line is not None else None)


def _itl_bound(sample: DecodeSample, itl_s: Callable[[int, float], float], targets: Targets, line: StepLine) -> _Bound:
    if sample.line is not None:
        return _time_bound("ITL", itl_s, targets.itl_s, line.lone_s(sample.accept_length))
    measured_s = (sample.step_s or 0.0) / sample.accept_length

    def without_slope(ranks: int, times: float) -> float:
        """What is certain where batches did not vary: fewer ranks at worst, the present ones as seen, and that one more is better."""
        if ranks >= sample.ranks:
            return measured_s if ranks == sample.ranks else 0.0
        return max(measured_s, itl_s(ranks, times))

    is_lone = (sample.batch or 0.0) <= _LONE_BATCH
    note = " (how steps grow with batches was not to be seen: nothing is promised but the direction)"
    return _time_bound("ITL", without_slope, targets.itl_s, measured_s if is_lone else 0.0, note)


def _time_bound(name: str, value: Callable[[int, float], float], target_s: float, lone_s: float, note: str = "") -> _Bound:
    """`lone_s`: what the latency is with nobody else there. A target below, or hardly above, is out of any pool's reach."""
    within_reach_s = _REACH * lone_s
    if target_s >= within_reach_s:
        return _Bound(name, value, target_s, is_time=True, note=note)
    note = f" (the target of {1000 * target_s:.0f} ms is out of reach: it takes {1000 * lone_s:.0f} ms with nobody else there)"
    return _Bound(name, value, within_reach_s, is_time=True, note=note)


def _settle(role: str, now: int, bounds: Sequence[_Bound], targets: Targets, predict: Callable[[int, float], float] | None,
            utilisation: Callable[[int], float | None]) -> Advice:
    """The size between the least that is bearable and the least that is comfortable, moved to at the pace that the head tells."""
    most = targets.most_ranks
    times = 1.0 / (1.0 - targets.headroom)
    bearable = max(bound.fewest(1.0 / (1.0 - targets.headroom / 2), most) for bound in bounds)
    comfortable, binding = max(((bound.fewest(times, most), bound) for bound in bounds), key=lambda found: found[0])
    is_short = any(bound.value(most, times) > bound.limit for bound in bounds)
    wanted = comfortable if now < bearable else min(max(comfortable, now - 1), now, most)
    at_wanted = predict(wanted, 1.0) if predict is not None else math.inf
    return Advice(
        role=role, ranks=now, wanted=wanted, binding=binding.name if comfortable > 1 else "minimum",
        reason=_reason(now, wanted, comfortable, binding, times) + (f"; the ceiling of {most} is too low" if is_short else ""),
        predicted_s=at_wanted if math.isfinite(at_wanted) else None, utilisation=utilisation(wanted),
    )


def _reason(now: int, wanted: int, comfortable: int, binding: _Bound, times: float) -> str:
    limit = f"{1000 * binding.limit:.0f} ms{binding.note}" if binding.is_time else "100 %"
    text = f"under {times:.2f} times this load {binding.name} is {binding.show(now, times)} with {_ranks(now)}"
    if wanted != now:
        text += f" and {binding.show(wanted, times)} with {wanted}"
    text += f", of at most {limit}"
    if wanted == now and comfortable > now:
        return f"{text}; part of the headroom is used, {comfortable} would have all of it"
    return f"{text}; down one at a time towards {comfortable}" if comfortable < wanted else text


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _idle(role: str, now: int, targets: Targets) -> Advice:
    return Advice(role=role, ranks=now, wanted=1, binding="idle", reason="nothing came, waited or ran", utilisation=0.0)


def _lacking(role: str, now: int, what: str) -> Advice:
    reason = f"{what}; the size is left as it is"
    return Advice(role=role, ranks=now, wanted=max(1, now), binding="lacks data", reason=reason, has_data=False)
