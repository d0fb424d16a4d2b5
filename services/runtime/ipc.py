"""ZMQ between a front and one engine: typed msgspec messages over two one-way unix sockets, never pickle.

commands   front PUSH  -> engine PULL
events     engine PUSH -> front PULL     (several engine threads send, so a lock guards the socket)

Both directions are bounded: `send` of a full queue raises, since a peer that lags by `_QUEUE_BOUND` messages is no longer alive.
"""

import fcntl
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from services.runtime.errors import EngineError

_QUEUE_BOUND = 100_000
MAX_FRAME_BYTES = 32 * 2**20  # twice what a gRPC message may hold: ZMQ drops the connection of whoever sends more
_DIRECTORY_PREFIX = "baton-ipc-"
_YOUNG_S = 5.0
Command = TypeVar("Command")
Event = TypeVar("Event")


class Up(msgspec.Struct, frozen=True, tag=True):
    """First event of an engine: it can serve. `peer` is its transport's metadata, opaque here.

    Again whenever it has renewed its transfer agent: `former_instance_id` is who it was until now.
    """

    instance_id: str
    peer: bytes
    fingerprint: str
    max_model_len: int
    vocab_size: int
    page_size: int
    num_pages: int
    max_running: int
    former_instance_id: str = ""
    kv_events_port: int = 0  # of its ZMQ sockets for KV events and their replay; 0 = it publishes none
    kv_replay_port: int = 0


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """Only event of an engine that cannot start; `message` is a sentence for the user."""

    message: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The engine lives. `step_s` = age of the forward now running (0 = idle), `predicted_s` = what it should take.

    `handoff_s` = age of the hand-off thread's present turn, which takes milliseconds, or `handoff_predicted_s` when it renews the agent.
    """

    step_s: float
    predicted_s: float
    handoff_s: float = 0.0
    handoff_predicted_s: float = 0.0


class RankLoad(msgspec.Struct, frozen=True, tag=True):
    """What the routers' policies see of a rank; units as in registry.proto's Load."""

    num_free_pages: int
    num_claims: int
    num_running: int
    num_queued_tokens: int
    num_leased_pages: int
    step_us: int
    num_running_tokens: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Command: leave the process now."""


class SocketDirectory:
    """A fresh folder for a front's sockets, locked while the front lives: the next one removes those whose fronts were killed."""

    def __init__(self) -> None:
        _sweep()
        self._folder = tempfile.TemporaryDirectory(prefix=_DIRECTORY_PREFIX)
        self.name = self._folder.name
        self._lock = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def cleanup(self) -> None:
        """Remove it."""
        self._folder.cleanup()
        os.close(self._lock)


def _sweep() -> None:
    """A lock ends with its process, whatever ends that and wherever it ran; a folder this young may not be locked yet."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_DIRECTORY_PREFIX}*"):
        try:
            if time.time() - folder.stat().st_mtime < _YOUNG_S or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # another front has just removed it
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:  # its front lives
            pass
        finally:
            os.close(lock)


def _checked(frame: bytes) -> bytes:
    if len(frame) > MAX_FRAME_BYTES:
        raise EngineError(f"a message between front and engine has {len(frame)} bytes but at most {MAX_FRAME_BYTES} are taken")
    return frame


class FrontChannel(Generic[Command, Event]):
    """The front's end; binds both sockets below `address`, e.g. "ipc:///tmp/x/rank0"."""

    def __init__(self, address: str, event_type: Any) -> None:
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.PULL)
        self._send_context = zmq.Context()
        self._commands = self._send_context.socket(zmq.PUSH)
        for socket, name in ((self._commands, "commands"), (self._events, "events")):
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            socket.set_hwm(_QUEUE_BOUND)
            socket.bind(f"{address}.{name}")
        self._decoder = msgspec.msgpack.Decoder(event_type)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, command: Command) -> None:
        """Queue `command`. Raises EngineError when the engine reads no more, or would not take as much."""
        frame = _checked(self._encoder.encode(command))
        try:
            self._commands.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise EngineError(f"the engine is gone, or left {_QUEUE_BOUND} commands unread; it is restarted") from None

    async def receive(self) -> Event:
        """Next event. Raises EngineError on bytes that are no event."""
        frame = await self._events.recv()
        try:
            return self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise EngineError(f"the engine sent an event that cannot be read: {error}") from None

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._send_context.destroy(linger=0)


class EngineChannel(Generic[Command, Event]):
    """The engine's end. One thread receives; any thread sends."""

    def __init__(self, address: str, command_type: Any) -> None:
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._events = self._context.socket(zmq.PUSH)
        for socket, name in ((self._commands, "commands"), (self._events, "events")):
            socket.set(zmq.LINGER, 1000)
            socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            socket.set_hwm(_QUEUE_BOUND)
            socket.connect(f"{address}.{name}")
        self._decoder = msgspec.msgpack.Decoder(command_type)
        self._encoder = msgspec.msgpack.Encoder()
        self._send_lock = threading.Lock()
        self.is_up = False  # Up was sent

    def send(self, event: Event) -> None:
        """Send `event`; thread-safe. Raises EngineError when the front reads no more, or would not take as much."""
        self.is_up = self.is_up or isinstance(event, Up)
        frame = _checked(self._encoder.encode(event))
        with self._send_lock:
            try:
                self._events.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                raise EngineError(f"the front left {_QUEUE_BOUND} events unread") from None

    def receive(self, timeout_s: float) -> list[Command]:
        """All commands now waiting; waits up to `timeout_s` for the first (0 = not at all)."""
        if not self._commands.poll(int(timeout_s * 1000)):
            return []
        commands: list[Command] = []
        while True:
            try:
                commands.append(self._decoder.decode(self._commands.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return commands

    def close(self) -> None:
        self._commands.close()
        self._events.close()
        self._context.term()
