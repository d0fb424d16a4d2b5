"""What routers and Prometheus hear about a prefill rank's load, and how long its next step should take."""
from collections.abc import Callable

from services.kv.metrics import BUSY_SECONDS, MAX_RUNNING, RANK, STEP_SECONDS
from services.kv.pages import HolderKind
from services.kv.rank_kv import RankKv
from services.prefill.metrics import COMPUTED_TOKENS, LEASED_PAGES, QUEUE_AGE, QUEUED_REQUESTS, QUEUED_TOKENS
from services.prefill.scheduler import Plan, Scheduler
from services.runtime.ipc import RankLoad

_REPORT_S = 0.05  # at most one report in this time
_STEP_TOKENS = 64  # a step costs about so many tokens' time before its first token
_SMOOTHING = 0.2  # weight of a newest step that was faster than predicted


class LoadReporter:
    """Reports when something changed; measures steps. `token_s` = seconds a token, as a first guess; `waiting_since`: when the oldest
    prompt that waits came, None = none does."""

    def __init__(
        self, kv: RankKv, scheduler: Scheduler, waiting_since: Callable[[], float | None], send: Callable[[RankLoad], None],
        clock: Callable[[], float], token_s: float,
    ) -> None:
        self._kv, self._scheduler, self._send, self._clock = kv, scheduler, send, clock
        self._step_us = 0
        self._token_s = token_s
        self._said: RankLoad | None = None
        self._said_at = -_REPORT_S
        self._busy_since: float | None = None
        self._waiting_since, self._oldest_at = waiting_since, waiting_since()
        MAX_RUNNING.set(scheduler.max_running)
        QUEUE_AGE.set_function(self._queue_age)

    def predicted_s(self, plan: Plan) -> float:
        """Seconds that this step, which begins now, should take, by what recent steps took a token."""
        self._busy_since = self._clock()
        return self._token_s * _num_tokens(plan)

    def stepped(self, plan: Plan, seconds: float) -> None:
        """A step is over. A slow one counts at once: an engine that beats its prediction is no fault, one that is late is restarted."""
        token_s = seconds / _num_tokens(plan)
        self._token_s = max(token_s, self._token_s + _SMOOTHING * (token_s - self._token_s))
        self._step_us = round(1e6 * seconds)
        STEP_SECONDS.observe(seconds)
        COMPUTED_TOKENS.inc(sum(chunk.num_tokens for chunk in plan.chunks))

    def report(self) -> None:
        """Send the load if it changed and the last report is old enough; a later call makes up for one that was not."""
        now = self._clock()
        if self._busy_since is not None:
            BUSY_SECONDS.inc(now - self._busy_since)
            self._busy_since = None
        if now - self._said_at < _REPORT_S:
            return
        load = self._now()
        if load != self._said:
            self._said, self._said_at = load, now
            self._send(load)

    def _now(self) -> RankLoad:
        scheduler, pool = self._scheduler, self._kv.pool
        with self._kv.lock:
            load = RankLoad(
                num_free_pages=pool.num_available, num_claims=0, num_running=scheduler.num_computing,
                num_queued_tokens=scheduler.num_queued_tokens, num_leased_pages=pool.pages.num_holds(HolderKind.LEASE),
                step_us=self._step_us, num_running_tokens=scheduler.num_computed_tokens,
            )
            pages, num_queued = pool.pages.counts, scheduler.num_queued
        self._oldest_at = self._waiting_since()
        RANK.show(pages, num_queued, load.num_running)
        LEASED_PAGES.set(pages.leased)
        QUEUED_REQUESTS.set(num_queued)
        QUEUED_TOKENS.set(load.num_queued_tokens)
        return load

    def _queue_age(self) -> float:
        """In the scrape's thread: a step may be long, and the queue ages meanwhile."""
        oldest_at = self._oldest_at
        return 0.0 if oldest_at is None else self._clock() - oldest_at


def _num_tokens(plan: Plan) -> int:
    return _STEP_TOKENS + sum(chunk.num_tokens for chunk in plan.chunks)
