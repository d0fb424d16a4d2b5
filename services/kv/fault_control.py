"""Faults steered while a cluster runs, through two small files a rank beside `control`, the path prefix of [faults].

    <control>.<role>.<rank>.json     {"rates": {"drop": 0.1, ...}, "arm": {"on": "fetching", "signal": 9, "pid": 0}}
    <control>.<role>.<rank>.fired    {"on": ..., "signal": ..., "pid": ..., "key": [request id, choice, attempt]}

The first is looked at every LOOK_S, by its time of change; write it whole (rename). An armed signal is sent once, to process `pid` (0 =
this one), when its moment comes, after the second file was written:
    fetching          a read of pages was posted
    verifying         a read of epoch words was posted
    announced_last    an announcement with the decoding state was sent or heard
    paused_announce   the same of a request that ran already: a move's last one
"""
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from services.kv.faults import FaultPlan
from services.kv.messages import Announce, Message, RenewAnswer, RequestKey
from services.runtime.config import FaultRates, FaultsSection
from services.runtime.process import write_whole

LOOK_S = 0.02
_MAX_KNOWN = 100_000  # remote pages whose request is remembered

Moment = Literal["fetching", "verifying", "announced_last", "paused_announce"]
_log = logging.getLogger(__name__)


class Arm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Send `signal` to `pid` at the first moment `on`."""

    on: Moment
    signal: int
    pid: int = 0


class Control(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file says. No `rates` = those of the configuration; `arm` is armed anew whenever the file changes."""

    rates: FaultRates | None = None
    arm: Arm | None = None


class FaultControl:
    """See faults.Watch. `send_signal` is os.kill."""

    def __init__(
        self, path: Path, configured: FaultRates, clock: Callable[[], float] = time.monotonic,
        send_signal: Callable[[int, int], None] = os.kill,
    ) -> None:
        self._path, self._configured, self._clock, self._send_signal = path, configured, clock, send_signal
        self._looked_at, self._changed_ns = float("-inf"), 0
        self._arm: Arm | None = None
        self._keys: dict[tuple[str, int], RequestKey] = {}  # (holder, page) -> the request that it was announced for last

    def rates(self) -> FaultRates | None:
        """Rates as of now; None when nothing is to change."""
        now = self._clock()
        if now - self._looked_at < LOOK_S:
            return None
        self._looked_at = now
        try:
            changed_ns = self._path.stat().st_mtime_ns
            if changed_ns == self._changed_ns:
                return None
            self._changed_ns = changed_ns
            control = msgspec.json.decode(self._path.read_bytes(), type=Control)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            _log.error("%s cannot be used: %s", self._path, error)
            return None
        self._arm = control.arm
        return control.rates or self._configured

    def said(self, peer: str, message: Message) -> None:
        """A message was sent."""
        self._announced(message)

    def heard(self, peer: str, message: Message) -> None:
        """A message came."""
        for announce in message.announcements if isinstance(message, RenewAnswer) else [message]:
            if isinstance(announce, Announce):
                if len(self._keys) > _MAX_KNOWN:
                    self._keys.clear()
                self._keys |= {(peer, page.page): announce.key for page in announce.pages}
                self._announced(announce)

    def reading(self, peer: str, remote_pages: Sequence[int], *, of_epochs: bool) -> None:
        """A read was posted."""
        self._moment("verifying" if of_epochs else "fetching", self._keys.get((peer, remote_pages[0])))

    def _announced(self, message: Message) -> None:
        if isinstance(message, Announce) and message.state is not None:
            self._moment("announced_last", message.key)
            if message.state.num_output_tokens > 1 and message.state.output_ids:
                self._moment("paused_announce", message.key)

    def _moment(self, moment: Moment, key: RequestKey | None) -> None:
        arm = self._arm
        if arm is None or arm.on != moment:
            return
        self._arm = None
        fired = msgspec.to_builtins(arm) | {"key": msgspec.to_builtins(key)}
        write_whole(self._path.with_suffix(".fired"), json.dumps(fired))
        _log.warning("armed fault: signal %d to process %d at %s of %s", arm.signal, arm.pid or os.getpid(), moment, key,
                     extra={"request_id": "" if key is None else key.request_id})
        self._send_signal(arm.pid or os.getpid(), arm.signal)


def fault_plan(section: FaultsSection, role: str, rank: int) -> FaultPlan | None:
    """What a rank injects; None when nothing is asked for."""
    if not section.is_on:
        return None
    _log.warning("faults are injected on purpose into %s rank %d: %s", role, rank, section)
    watch = FaultControl(Path(f"{section.control}.{role}.{rank}.json"), section.rates) if section.control else None
    return FaultPlan(section.rates, f"{section.seed}/{role}/{rank}", watch)
