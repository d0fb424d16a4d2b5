"""While a cluster is up: what ends by itself is started again, and `.run/metrics.json` says who serves /metrics."""

import asyncio
import signal
import time
from dataclasses import dataclass

from services.runtime.local_cluster import Cluster

_POLL_S = 0.2
_FIRST_DELAY_S = 1.0  # doubled by each end that follows soon
_MAX_DELAY_S = 30.0
_SOUND_S = 60.0  # who ran this long is as good as new


@dataclass
class _Fall:
    """How a process that ended by itself fares."""

    number: int = 0  # of ends in a row
    started_at: float = float("-inf")
    restart_at: float | None = None  # None = it runs


class Keeper:
    """A node's death ends nothing else: its requests go on elsewhere, and it comes back."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._falls: dict[str, _Fall] = {}

    async def run(self) -> None:
        """Until cancelled. Raises SetupError when `.run` cannot be written any more."""
        while True:
            self.look(time.monotonic())
            await asyncio.sleep(_POLL_S)

    def look(self, now: float) -> None:
        """One look at everything, at `now` seconds."""
        cluster = self._cluster
        self._falls = {name: fall for name, fall in self._falls.items() if name in cluster.processes}
        for name in cluster.ended():
            fall = self._falls.setdefault(name, _Fall())
            if fall.restart_at is None:
                self._ended(name, fall, now)
            elif now >= fall.restart_at:
                fall.restart_at, fall.started_at = None, now
                cluster.report(f"starting {name} again")
                cluster.restart(name)
        if cluster.run_folder is not None:
            cluster.run_folder.write_metrics(cluster.metrics_targets())

    def _ended(self, name: str, fall: _Fall, now: float) -> None:
        fall.number = 1 if now - fall.started_at >= _SOUND_S else fall.number + 1
        delay = min(_FIRST_DELAY_S * 2 ** (fall.number - 1), _MAX_DELAY_S)
        fall.restart_at = now + delay
        how = _how(self._cluster.processes[name].returncode)
        self._cluster.report(f"the {name} process ended by itself ({how}); the others go on, it is started again in {delay:g} s")


def _how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}; its own message, if any, is above"
