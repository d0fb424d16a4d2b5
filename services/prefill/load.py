"""What routers hear about a prefill rank's load, and how long its next step should take."""
from collections.abc import Callable

from services.kv.pages import HolderKind
from services.kv.rank_kv import RankKv
from services.prefill.scheduler import Plan, Scheduler
from services.runtime.ipc import RankLoad

_REPORT_S = 0.05  # at most one report in this time
_STEP_TOKENS = 64  # a step costs about so many tokens' time before its first token
_SMOOTHING = 0.2  # weight of a newest step that was faster than predicted


class LoadReporter:
    """Reports when something changed; measures steps. `token_s` = seconds a token, as a first guess."""

    def __init__(
        self, kv: RankKv, scheduler: Scheduler, send: Callable[[RankLoad], None], clock: Callable[[], float], token_s: float
    ) -> None:
        self._kv, self._scheduler, self._send, self._clock = kv, scheduler, send, clock
        self._step_us = 0
        self._token_s = token_s
        self._said: RankLoad | None = None
        self._said_at = -_REPORT_S

    def predicted_s(self, plan: Plan) -> float:
        """Seconds that this step should take, by what recent steps took a token."""
        return self._token_s * _num_tokens(plan)

    def stepped(self, plan: Plan, seconds: float) -> None:
        """A step is over. A slow one counts at once: an engine that beats its prediction is no fault, one that is late is restarted."""
        token_s = seconds / _num_tokens(plan)
        self._token_s = max(token_s, self._token_s + _SMOOTHING * (token_s - self._token_s))
        self._step_us = round(1e6 * seconds)

    def report(self) -> None:
        """Send the load if it changed and the last report is old enough; a later call makes up for one that was not."""
        now = self._clock()
        if now - self._said_at < _REPORT_S:
            return
        load = self._now()
        if load != self._said:
            self._said, self._said_at = load, now
            self._send(load)

    def _now(self) -> RankLoad:
        with self._kv.lock:
            return RankLoad(
                num_free_pages=self._kv.pool.num_available, num_claims=0, num_running=self._scheduler.num_computing,
                num_queued_tokens=self._scheduler.num_queued_tokens, num_leased_pages=self._kv.pool.pages.num_holds(HolderKind.LEASE),
                step_us=self._step_us, num_running_tokens=self._scheduler.num_computed_tokens,
            )


def _num_tokens(plan: Plan) -> int:
    return _STEP_TOKENS + sum(chunk.num_tokens for chunk in plan.chunks)
