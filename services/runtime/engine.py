"""What both pools' engine processes do the same way: arguments, channel, heartbeat, one-sentence start-up errors."""

import logging
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
    """Ages of the forward and of the hand-off thread's turn now running, and the time that they should take.

    Written by the main loop and the hand-off thread, read by the heartbeat.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._predicted_s = 0.0
        self._turn: tuple[float, float] | None = None  # the hand-off thread's: since when, how long it should take

    def begin(self, predicted_s: float) -> None:
        self._predicted_s, self._began = predicted_s, time.monotonic()

    def end(self) -> float:
        """Seconds that the forward took."""
        assert self._began is not None, "end() without begin()"
        seconds = time.monotonic() - self._began
        self._began = None
        return seconds

    def turn(self, predicted_s: float = 0.0) -> None:
        """The hand-off thread begins its next turn."""
        self._turn = time.monotonic(), predicted_s

    def end_turns(self) -> None:
        """The hand-off thread was told to stop."""
        self._turn = None

    def beat(self) -> Heartbeat:
        """What the heartbeat says."""
        now, began = time.monotonic(), self._began
        turned, turn_predicted_s = self._turn or (now, 0.0)
        return Heartbeat(
            step_s=0.0 if began is None else now - began, predicted_s=self._predicted_s,
            handoff_s=now - turned, handoff_predicted_s=turn_predicted_s,
        )


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
    except Exception:  # the end must come at once: while other threads wind up, the heartbeat would go on telling that all is well
        logging.getLogger(__name__).exception("the engine ends")
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
