"""Starts, watches and restarts the engine processes of one front.

A rank's life:  STARTING -> UP -> DOWN -> (back-off) STARTING ...
UP ends when the process exits, when no heartbeat came for `HEARTBEAT_S`, or when a forward, or a turn of the hand-off thread, takes longer
than the larger of `STEP_S` and ten times what the engine predicted for it. An engine says Up again when it has renewed its transfer agent.
"""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from services.runtime.errors import EngineError, SetupError
from services.runtime.ipc import FrontChannel, Heartbeat, SocketDirectory, StartFailed, Stop, Up

logger = logging.getLogger(__name__)

HEARTBEAT_S = 3.0
STEP_S = 5.0
START_S = 300.0  # loading 100 GB of weights takes minutes
_WATCH_S = 0.25
LEAVE_S = 5.0  # an engine that was asked to leave and has not by then is killed
_BACKOFF_S = (0.2, 1.0, 3.0, 10.0)


class RankProcess:
    """One engine process and its channel. `up` is set while the rank serves."""

    def __init__(self, rank: int, module: str, arguments: Sequence[str], directory: str, event_type: Any) -> None:
        self.rank = rank
        self.up: Up | None = None
        self.was_up = False
        self.num_starts = 0
        self._module = module
        self._arguments = arguments
        self._directory = directory
        self._event_type = event_type
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: FrontChannel[Any, Any] | None = None
        self._last_beat = 0.0
        self._stuck = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode if self._process is not None else None

    def send(self, command: Any) -> None:
        """Queue a command. Raises EngineError when the rank is down."""
        if self.up is None or self._channel is None:
            raise EngineError(f"rank {self.rank} is down")
        self._channel.send(command)

    async def live_once(
        self, on_event: Callable[["RankProcess", Any], None], on_down: Callable[["RankProcess"], None]
    ) -> None:
        """Start the engine, deliver its events, return when it is gone. Raises SetupError when it says that it cannot start.

        `on_down` runs as soon as the engine is given up, before it is killed: a process that hangs in the kernel may take its time.
        """
        self.num_starts += 1
        address = f"ipc://{self._directory}/rank{self.rank}.{self.num_starts}"
        self._channel = FrontChannel(address, self._event_type)
        command = [sys.executable, "-m", self._module, *self._arguments, "--rank", str(self.rank), "--ipc", address]
        self._process = _start_process([*command, "--die-with-parent", str(os.getpid())])
        self._last_beat, self._stuck = time.monotonic() + START_S, False
        reader = asyncio.create_task(self._read(self._channel, on_event))
        watcher = asyncio.create_task(self._watch())
        waiter = asyncio.create_task(asyncio.to_thread(self._process.wait))
        try:
            await asyncio.wait({reader, watcher, waiter}, return_when=asyncio.FIRST_COMPLETED)
            if waiter.done() and not reader.done():
                await asyncio.wait({reader}, timeout=0.2)  # its last words may still be in the socket
            if reader.done():
                reader.result()
        finally:
            self.up = None
            reader.cancel()  # nothing that it still says is heard
            try:
                on_down(self)
                await self.kill()
                for task in (reader, watcher, waiter):
                    task.cancel()
                await asyncio.gather(reader, watcher, waiter, return_exceptions=True)
            finally:
                self._channel.close()  # even when cancelled meanwhile: ZMQ waits for ever for a context that is only forgotten

    async def _read(self, channel: FrontChannel[Any, Any], on_event: Callable[["RankProcess", Any], None]) -> None:
        while True:
            event = await channel.receive()
            if isinstance(event, StartFailed):
                raise SetupError(event.message)
            if isinstance(event, Heartbeat):
                self._last_beat = time.monotonic()
                self._stuck = is_stuck(event)
                continue
            if isinstance(event, Up):
                self.up, self.was_up, self._last_beat = event, True, time.monotonic()
            on_event(self, event)

    async def _watch(self) -> None:
        while not self._stuck and time.monotonic() - self._last_beat < HEARTBEAT_S:
            asleep_at = time.monotonic()
            await asyncio.sleep(_WATCH_S)
            late_s = time.monotonic() - asleep_at - _WATCH_S
            self._last_beat += max(late_s, 0.0)  # while this process itself stood still it could not hear anybody

    def stop(self) -> None:
        """Ask the engine to leave; one that is not up listens to nobody yet and is left for kill()."""
        if self.up is not None:
            with contextlib.suppress(EngineError):  # it reads no more: kill() is what helps
                self.send(Stop())

    async def kill(self) -> None:
        """End the process whatever it does, and reap it."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


def is_stuck(beat: Heartbeat) -> bool:
    """Whether the engine's forward, or its hand-off thread's turn, takes too long."""
    pairs = (beat.step_s, beat.predicted_s), (beat.handoff_s, beat.handoff_predicted_s)
    return any(seconds > max(STEP_S, 10 * predicted_s) for seconds, predicted_s in pairs)


def _start_process(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    # Not the event loop's own way: a Popen is there as soon as its process is, so that no cancellation loses it.
    return subprocess.Popen(command, start_new_session=True)


class Supervisor:
    """All ranks of a front. `on_event(rank, event)` (Up among them) and `on_down(rank)` run in the event loop."""

    def __init__(self, *, num_ranks: int, module: str, arguments: Sequence[str], event_type: Any,
                 on_event: Callable[[RankProcess, Any], None], on_down: Callable[[RankProcess], None]) -> None:
        self._module = module
        self._directory = SocketDirectory()
        self.ranks = [RankProcess(index, module, arguments, self._directory.name, event_type) for index in range(num_ranks)]
        self._on_event = on_event
        self._on_down = on_down
        self._stopping = False

    async def run(self) -> None:
        """Keep every rank alive until stop(). Raises SetupError when a rank cannot start the very first time."""
        lives = [asyncio.create_task(self._keep_alive(rank)) for rank in self.ranks]
        try:
            done, _ = await asyncio.wait(lives, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in lives:
                task.cancel()
            await asyncio.gather(*lives, return_exceptions=True)
            self._directory.cleanup()

    async def _keep_alive(self, rank: RankProcess) -> None:
        failures = 0
        while not self._stopping:
            began = time.monotonic()
            try:
                await rank.live_once(self._on_event, self._on_down)
            except SetupError:
                if rank.num_starts == 1 and not self._stopping:
                    raise
            except EngineError as error:
                logger.error("rank %d is restarted: %s", rank.rank, error)
            if rank.num_starts == 1 and not rank.was_up and not self._stopping:
                raise SetupError(
                    f"rank {rank.rank}'s engine ({self._module}) exited with code {rank.exit_code} before it could serve; "
                    "see its output above"
                )
            failures = failures + 1 if time.monotonic() - began < 30 else 0
            if not self._stopping:
                await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])

    async def stop(self) -> None:
        """Ask every engine that is up to leave, kill those that are not or do not; run() returns when they are gone."""
        self._stopping = True
        for rank in self.ranks:
            rank.stop()
        deadline = time.monotonic() + LEAVE_S
        while any(rank.pid is not None and rank.up is not None for rank in self.ranks) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for rank in self.ranks:
            await rank.kill()
