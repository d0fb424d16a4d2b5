"""Both directions of one session that survives its streams: numbers, acknowledgements, and what must be sent again.

Each side numbers what it sends from 1, keeps it until the other side has acknowledged it, and takes only the number that comes next. After
a break each says which number it expects, the other sends on from there: nothing is lost, nothing is taken twice.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, Protocol, TypeVar

from services.runtime.errors import InvalidRequest, Overloaded
from services.runtime.telemetry import count_incident

RESUME_S = 3.0  # how long a broken session waits for its router
MAX_UNACKED = 10_000  # messages; a peer that leaves more unread is no longer alive
ACK_EVERY = 256  # messages taken without one going the other way


class Numbered(Protocol):
    """What messages of both directions have."""

    sequence: int
    ack: int


M = TypeVar("M", bound=Numbered)


class ResumableStream(Generic[M]):
    """One side's end. `M` is what it sends; of what it receives only the numbers matter. Belongs to one event loop."""

    def __init__(self, new_message: Callable[[], M]) -> None:
        """`new_message()` makes an empty message, for acknowledgements that travel alone."""
        self._new_message = new_message
        self._unsent: deque[M] = deque()
        self._unacked: deque[M] = deque()  # sent on the present stream
        self._num_put = 0
        self._num_taken = 0
        self._num_told = 0  # of those taken, the last acknowledgement
        self.current = 0  # number of the present stream
        self._changed = asyncio.Event()
        self._is_over = False

    @property
    def next_expected(self) -> int:
        """Number of the first message of the other side that was not taken yet."""
        return self._num_taken + 1

    @property
    def num_unacked(self) -> int:
        """Messages put that the other side is not known to have taken."""
        return len(self._unacked) + len(self._unsent)

    def put(self, message: M) -> None:
        """Number `message` and queue it. Raises Overloaded when the other side has left too many unacknowledged."""
        if self.num_unacked >= MAX_UNACKED:
            raise Overloaded(f"the other side of the session left {MAX_UNACKED} messages unacknowledged")
        self._num_put += 1
        message.sequence = self._num_put
        self._unsent.append(message)
        self._changed.set()

    def take(self, sequence: int, ack: int) -> bool:
        """A message came: whether it is a numbered one that is new. Raises InvalidRequest for a gap or an impossible number."""
        last_sent = self._num_put - len(self._unsent)
        if ack > last_sent:
            raise InvalidRequest("ack", ack, f"only {last_sent} messages of this session were sent")
        self._forget(ack)
        if not sequence:
            return False
        if sequence > self.next_expected:
            raise InvalidRequest("sequence", sequence, f"the session's message {self.next_expected} is missing")
        if sequence < self.next_expected:
            count_incident("session message came twice")
            return False
        self._num_taken = sequence
        if self._num_taken - self._num_told >= ACK_EVERY:
            self._changed.set()
        return True

    def can_resume(self, next_message: int) -> bool:
        """Whether everything from number `next_message` on is still here."""
        return self._num_put - self.num_unacked < next_message <= self._num_put - len(self._unsent) + 1

    def begin(self, next_message: int) -> int:
        """A new stream replaces the one before: the other side expects `next_message`, for which can_resume() holds. Returns its number."""
        self._forget(next_message - 1)
        self._unsent.extendleft(reversed(self._unacked))
        self._unacked.clear()
        self.current += 1
        self._changed.set()
        return self.current

    async def outgoing(self, stream: int) -> AsyncIterator[M]:
        """What to write to `stream`, until it is replaced by the next one or the session is over."""
        while stream == self.current:
            if self._unsent:
                message = self._unsent.popleft()
                self._unacked.append(message)
            elif self._num_taken - self._num_told >= ACK_EVERY:
                message = self._new_message()
            elif self._is_over:
                return
            else:
                self._changed.clear()
                await self._changed.wait()
                continue
            message.ack = self._num_told = self._num_taken
            yield message

    def end(self, *, is_flushed: bool = True) -> None:
        """Nothing more is put; what is queued still goes out if `is_flushed`, then outgoing() ends."""
        self._is_over = True
        if not is_flushed:
            self._unsent.clear()
        self._changed.set()

    def _forget(self, acked: int) -> None:
        while self._unacked and self._unacked[0].sequence <= acked:
            self._unacked.popleft()
