"""Steers a rank's fault proxy while it runs: rates of faults, and a signal at a moment of some request (services/kv/fault_control.py)."""

import json
import signal
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.kv.fault_control import Arm, Control, Moment
from services.runtime.config import FaultRates
from services.runtime.process import write_whole


@dataclass(frozen=True)
class RankControl:
    """The control files of the first rank of one front; `path` is its [faults] control."""

    path: Path
    role: str

    @property
    def setting(self) -> str:
        """--set of the front."""
        return f"faults.control={json.dumps(str(self.path.resolve()))}"

    def arm(self, moment: Moment, number: signal.Signals, pid: int = 0) -> None:
        """Have `number` sent to `pid` (0 = the engine) at the next `moment`, once."""
        self._fired.unlink(missing_ok=True)
        self._write(Control(arm=Arm(on=moment, signal=number, pid=pid)))

    def has_fired(self) -> bool:
        """Whether the moment has come since arm()."""
        return self._fired.exists()

    def rates(self, rates: FaultRates) -> None:
        """Inject at these rates until clear()."""
        self._write(Control(rates=rates))

    def clear(self) -> None:
        """Disarm, and rates of the configuration again."""
        self._write(Control())

    @property
    def _fired(self) -> Path:
        return self.path.with_name(f"{self.path.name}.{self.role}.0.fired")

    def _write(self, control: Control) -> None:
        write_whole(self.path.with_name(f"{self.path.name}.{self.role}.0.json"), msgspec.json.encode(control).decode())
