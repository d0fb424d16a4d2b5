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
from services.runtime.metrics import MetricsServer, serve_metrics
from services.runtime.process import die_with_parent, write_whole
from services.runtime.supervisor import is_stuck
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
        metrics = _serve_metrics(rank_address(config, role, arguments.rank), channel, clock)
        if arguments.metrics_file is not None and metrics.address:
            write_whole(arguments.metrics_file.with_name(f"{arguments.metrics_file.name}.{arguments.rank}"), metrics.address)
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


def rank_address(config: Config, role: str, rank: int) -> str:
    """Where a rank's metrics are served: at its front's port + 1 + rank, or at any free one, or nowhere ("")."""
    section = {"prefill": config.prefill, "decode": config.decode}.get(role)
    host, _, port = (section.metrics if section is not None else "").rpartition(":")
    return f"{host}:{int(port) + 1 + rank if int(port) else 0}" if host else ""


def _serve_metrics(address: str, channel: EngineChannel[Any, Any], clock: StepClock) -> MetricsServer:
    def is_live() -> str:
        beat = clock.beat()
        return f"a forward runs for {beat.step_s:.1f} s, a hand-off turn for {beat.handoff_s:.1f} s" if is_stuck(beat) else ""

    return serve_metrics(address, is_live, lambda: is_live() if channel.is_up else "the rank loads")
