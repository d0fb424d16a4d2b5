"""A rank's KV events into the prefix index: exact while they are in step, and said to be only guesses whenever they are not.

1 SUBSCRIBED  to the rank's PUB socket; what comes waits there
2 CATCHING UP from its replay socket: every batch from the next one on, or the whole cache in one batch where that is no longer kept
3 IN STEP     the index believes the rank's events alone; each batch must be the next one. Quiet for a while: back to 2, in case the last
              batch was lost. A batch missing: the index guesses again, a gap is counted, back to 2
4 OUT OF STEP the rank does not answer, or what it says cannot be true: counted by reason, the index guesses, back to 1 after a pause

In the router's own event loop, in small bites: 20,000 pages a second cost streams a few tenths of a millisecond at p99 (R-BURST). A thread
was tried: it cost them about as much, since it shares the interpreter, and would have to share the index with every choice.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import zmq
import zmq.asyncio

from proto.baton.v1 import common_pb2
from services.kv.event_messages import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    DigestBatch,
    decode_digests,
    max_payload_bytes,
    sequence_frame,
    sequence_of,
)
from services.router.metrics import KV_EVENT_GAPS
from services.router.prefix_index import PrefixIndex
from services.runtime.errors import ConfigError
from services.runtime.security import Security
from services.runtime.serve import cancel
from services.runtime.telemetry import count_incident, reason_name

logger = logging.getLogger(__name__)

QUIET_S = 2.0  # without a batch; then the rank is asked for more
ANSWER_S = 5.0  # it answers by then, and goes on answering, or counts as silent
PAUSE_S = 0.5  # before another try, doubled by each one that fails, up to 64 times that
_BITE_PAGES = 256  # put into the index at a time, about 0.1 ms
_BITE_BATCHES = 64
_REST_S = 0.005  # between two bites: waking up for every batch of a burst costs more than taking it


class Source(NamedTuple):
    """Where a rank's events are to be had, as its front says; and the pages that it can hold."""

    endpoint: str
    replay_endpoint: str
    max_pages: int


class _OutOfStep(Exception):
    """Events cannot be followed. `anew`: nothing that was believed of them can be kept."""

    def __init__(self, reason: common_pb2.Reason, what: str, *, anew: bool = True) -> None:
        super().__init__(what)
        self.reason, self.anew = reason, anew


class _Gap(Exception):
    """A batch is not the next one."""


class Follower:
    """Follows one rank until closed."""

    def __init__(self, index: PrefixIndex, instance_id: str, source: Source, context: zmq.asyncio.Context, security: Security) -> None:
        self.instance_id = instance_id  # changes when the rank goes on under another one
        self.source = source
        self._index, self._context, self._security = index, context, security
        self._next = 0  # sequence number of the batch to come
        self._last_live = -1
        self._has_caught_up = False
        self._task = asyncio.create_task(self._run())

    def stop(self) -> "asyncio.Task[None]":
        """Read nothing more; the sockets are closed when the task that comes back is over."""
        self._task.cancel()
        return self._task

    async def _run(self) -> None:
        num_failures = 0
        while True:
            live, replay = self._socket(zmq.SUB), self._socket(zmq.DEALER)
            self._has_caught_up = False
            try:
                live.subscribe(b"")
                self._security.connect_zmq(live, self.source.endpoint)
                self._security.connect_zmq(replay, self.source.replay_endpoint)
                await self._follow(live, replay)
            except ConfigError as error:
                count_incident("KV events that may not be read")
                logger.error("KV events of %s are not read, its prefixes are guessed: %s", self.instance_id, error)
                return
            except _OutOfStep as error:
                num_failures = 1 if self._has_caught_up else num_failures + 1
                self._fall_out(error)
            finally:
                self._index.set_exact(self.instance_id, False)
                live.close(0)
                replay.close(0)
            await asyncio.sleep(PAUSE_S * 2 ** min(num_failures - 1, 6))

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, max_payload_bytes(self.source.max_pages))
        return socket

    def _fall_out(self, error: _OutOfStep) -> None:
        """State 4."""
        count_incident("KV events out of step", error.reason)
        reason = reason_name(error.reason)
        logger.warning("KV events of %s are out of step (%s), its prefixes are guessed: %s", self.instance_id, reason, error)
        if error.anew:
            self._next = 0

    async def _follow(self, live: zmq.asyncio.Socket, replay: zmq.asyncio.Socket) -> None:
        """States 2 and 3. Raises _OutOfStep."""
        self._last_live = -1
        await self._catch_up(replay)
        waiting = zmq.Socket.shadow(live)  # the same socket, without a future for every message
        while True:
            if not await live.poll(round(1000 * QUIET_S)):
                await self._catch_up(replay)
                continue
            try:
                for frames in _received(waiting):
                    await self._take_live(frames)
            except _Gap as gap:
                self._index.set_exact(self.instance_id, False)
                KV_EVENT_GAPS.inc()
                logger.warning("KV events of %s: %s; asking for what is between", self.instance_id, gap)
                await self._catch_up(replay)
            await asyncio.sleep(_REST_S)

    async def _catch_up(self, replay: zmq.asyncio.Socket) -> None:
        """State 2, from the next batch on; then in step. Raises _OutOfStep."""
        await replay.send(sequence_frame(self._next))
        while True:
            if not await replay.poll(round(1000 * ANSWER_S)):
                raise _OutOfStep(common_pb2.PEER_GONE, f"no answer from {self.source.replay_endpoint} in {ANSWER_S:g} s", anew=False)
            frames = await replay.recv_multipart()
            if frames[0] == END_OF_REPLAY:
                break
            sequence, payload = _parsed(frames)
            if sequence < self._next:  # it has not come that far: the one before it had
                what = f"its newest batch is {sequence}, but {self._next} was to come: another engine publishes there"
                raise _OutOfStep(common_pb2.STALE_INSTANCE, what)
            try:
                await self._take(sequence, payload)
            except _Gap as gap:
                raise _OutOfStep(common_pb2.INVALID, f"a replay has a hole: {gap}") from None
        if self._next == 0:
            self._index.cleared(self.instance_id)  # nothing was published yet, so what another try brought is void
        self._has_caught_up = True
        self._index.set_exact(self.instance_id, True)

    async def _take_live(self, frames: Sequence[bytes]) -> None:
        """A batch as published. Raises _Gap, _OutOfStep."""
        sequence, payload = _parsed(frames[1:])
        if sequence <= self._last_live:  # a publisher only ever counts up
            raise _OutOfStep(common_pb2.STALE_INSTANCE, f"batch {sequence} came after {self._last_live}: another engine publishes there")
        self._last_live = sequence
        await self._take(sequence, payload)

    async def _take(self, sequence: int, payload: bytes) -> None:
        """Apply the batch unless it is old. Raises _Gap, _OutOfStep."""
        if sequence < self._next:
            return
        try:
            batch = decode_digests(payload)
        except msgspec.MsgspecError as error:
            raise _OutOfStep(common_pb2.INVALID, f"batch {sequence} cannot be read: {error}") from None
        is_whole = bool(batch.events) and isinstance(batch.events[0], AllBlocksCleared)
        if sequence > self._next and not is_whole:
            raise _Gap(f"batch {sequence} came where {self._next} was to come")
        if self._next == 0:
            self._index.cleared(self.instance_id)  # of another try
        await self._apply(batch)
        self._next = sequence + 1

    async def _apply(self, batch: DigestBatch) -> None:
        """In bites: a batch may hold a whole cache. Raises _OutOfStep."""
        num_pages = 0
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._index.cleared(self.instance_id)
                continue
            hashes = event.block_hashes
            for start in range(0, len(hashes), _BITE_PAGES):
                bite = hashes[start : start + _BITE_PAGES]
                if isinstance(event, BlockRemoved):
                    self._index.removed(self.instance_id, bite)
                else:
                    self._index.stored(self.instance_id, bite)
                num_pages += len(bite)
                if num_pages >= _BITE_PAGES:
                    num_pages = 0
                    await asyncio.sleep(0)
        held = self._index.num_pages(self.instance_id, "events")
        if held > self.source.max_pages:
            raise _OutOfStep(common_pb2.TOO_LARGE, f"{held} pages would be cached, but the rank has {self.source.max_pages}")


def _received(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """What is there already, up to a bite."""
    for _ in range(_BITE_BATCHES):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


def _parsed(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Sequence number and payload. Raises _OutOfStep."""
    if len(frames) != 2 or len(frames[0]) != len(END_OF_REPLAY) or (sequence := sequence_of(frames[0])) < 0:
        sizes = [len(frame) for frame in frames]
        raise _OutOfStep(common_pb2.INVALID, f"a message has frames of {sizes} bytes, but they must be a number of 8 and a batch")
    return sequence, frames[1]


class KvEvents:
    """The followers of all ranks of a router. All methods belong to the event loop's thread."""

    def __init__(self, index: PrefixIndex, security: Security) -> None:
        self._index, self._security = index, security
        self._context: zmq.asyncio.Context | None = None
        self._followers: dict[str, Follower] = {}  # by instance id
        self._stopping: set[asyncio.Task[None]] = set()

    def follow(self, instance_id: str, source: Source | None) -> None:
        """What the rank's front says, again and again: None = it publishes nothing, and is guessed."""
        follower = self._followers.get(instance_id)
        if (None if follower is None else follower.source) == source:
            return
        if follower is not None:
            self.forget(instance_id)
            self._index.cleared(instance_id)
        if source is not None:
            self._context = self._context or zmq.asyncio.Context()
            self._followers[instance_id] = Follower(self._index, instance_id, source, self._context, self._security)

    def rename(self, former_id: str, instance_id: str) -> None:
        """The rank goes on under a new id, and so do its events."""
        follower = self._followers.pop(former_id, None)
        if follower is not None:
            follower.instance_id = instance_id
            self._followers[instance_id] = follower

    def forget(self, instance_id: str) -> None:
        """The rank is gone, or publishes no longer."""
        follower = self._followers.pop(instance_id, None)
        if follower is not None:
            task = follower.stop()
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    async def close(self) -> None:
        for instance_id in list(self._followers):
            self.forget(instance_id)
        await cancel(*self._stopping)
        if self._context is not None:
            self._context.term()
