"""What both pools' engine processes do the same way: arguments, channel, heartbeat, one-sentence start-up errors."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from services.runtime.config import Config, argument_parser, load_config
from services.runtime.errors import SetupError
from services.runtime.ipc import EngineChannel, Heartbeat, StartFailed
from services.runtime.process import die_with_parent
from services.runtime.telemetry import setup_logging

_BEAT_S = 0.5


class StepClock:
    """Age of the forward now running and the time it should take; written by the main loop, read by the heartbeat."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._predicted_s = 0.0

    def begin(self, predicted_s: float) -> None:
        self._predicted_s, self._began = predicted_s, time.monotonic()

    def end(self) -> float:
        """Seconds that the forward took."""
        assert self._began is not None, "end() without begin()"
        seconds = time.monotonic() - self._began
        self._began = None
        return seconds

    def beat(self) -> Heartbeat:
        began = self._began
        return Heartbeat(step_s=0.0 if began is None else time.monotonic() - began, predicted_s=self._predicted_s)


def run_engine(role: str, command_type: Any, body: Callable[[Config, int, EngineChannel[Any, Any], StepClock], None]) -> None:
    """Parse the arguments that the supervisor gives, run `body(config, rank, channel, clock)` until it returns.

    `body` sends `Up` when it can serve and returns on `Stop`. A SetupError is sent to the front as StartFailed.
    """
    parser = argument_parser(f"One {role} rank; started by its front")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ipc", required=True)
    arguments = parser.parse_args()
    die_with_parent(signal.SIGKILL, arguments.die_with_parent)
    channel: EngineChannel[Any, Any] = EngineChannel(arguments.ipc, command_type)
    clock, over = StepClock(), threading.Event()
    heartbeat = threading.Thread(target=_beat, args=(channel, clock, over), daemon=True, name="heartbeat")
    exit_code = 0
    try:
        config = load_config(arguments.config, arguments.set)
        setup_logging(f"{role}/{arguments.rank}", config.log.level)
        heartbeat.start()
        body(config, arguments.rank, channel, clock)
    except SetupError as error:
        channel.send(StartFailed(str(error)))
        exit_code = 1
    over.set()
    if heartbeat.is_alive():
        heartbeat.join()
    channel.close()
    # Library threads (UCX progress, OpenMP) need no orderly end, and some take seconds over one.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _beat(channel: EngineChannel[Any, Any], clock: StepClock, over: threading.Event) -> None:
    while not over.wait(_BEAT_S):
        channel.send(clock.beat())
