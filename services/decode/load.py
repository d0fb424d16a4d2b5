"""What routers and Prometheus hear about a decode rank's load."""
import time
from collections.abc import Callable

from services.decode.fetch import Fetcher
from services.decode.loop import DecodeLoop
from services.decode.metrics import CLAIMS, RUNNING, RUNNING_TOKENS, USED_PAGES
from services.kv.metrics import RANK
from services.kv.pages import HolderKind
from services.kv.rank_kv import RankKv
from services.runtime.ipc import RankLoad

_REPORT_S = 0.1  # at most one report in this time


class LoadReporter:
    """Looks now and then, reports when something changed. Used by the hand-off thread: what it sees of the loop may be a step old."""

    def __init__(self, kv: RankKv, fetcher: Fetcher, loop: DecodeLoop, send: Callable[[RankLoad], None]) -> None:
        self._kv, self._fetcher, self._loop, self._send = kv, fetcher, loop, send
        self._said: RankLoad | None = None
        self._looked_at = 0.0

    def report(self) -> None:
        """To be called often."""
        now = time.monotonic()
        if now - self._looked_at < _REPORT_S:
            return
        self._looked_at = now
        load = self._look()
        if load != self._said:
            self._said = load
            self._send(load)

    def _look(self) -> RankLoad:
        scheduler, pool, num_claims = self._loop.scheduler, self._kv.pool, self._fetcher.num_claims
        with self._kv.lock:
            num_available, num_leased, pages = pool.num_available, pool.pages.num_holds(HolderKind.LEASE), pool.pages.counts
        num_here, num_ready, num_tokens = len(scheduler), len(scheduler.ready), scheduler.num_running_tokens
        RANK.show(pages, num_claims + num_ready, num_here - num_ready)
        CLAIMS.set(num_claims)
        RUNNING.set(num_here)
        RUNNING_TOKENS.set(num_tokens)
        USED_PAGES.set(pages.used)
        return RankLoad(
            num_free_pages=num_available, num_claims=num_claims, num_running=num_here, num_queued_tokens=0, num_leased_pages=num_leased,
            step_us=int(self._loop.step_s * 1e6), num_running_tokens=num_tokens,
        )
