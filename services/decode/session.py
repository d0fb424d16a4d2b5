"""One router's session with one rank: what it asked for, and the replies it has not taken yet. It outlives its streams by `resume_s`.

OPEN (a stream is attached) -> BROKEN (the stream is gone) -> OPEN ... -> OVER: told to the engine, nothing of it is left here.
"""
import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from proto.baton.v1 import decode_pb2
from services.runtime.errors import BatonError, Overloaded
from services.runtime.resume import ResumableStream
from services.runtime.supervisor import RankProcess
from services.runtime.telemetry import count_incident

logger = logging.getLogger(__name__)


class RouterSession:
    """`requests` maps handle to attempt. Replies are numbered from 1 without gaps in the order of `push`."""

    def __init__(self, *, number: int, rank: RankProcess, instance_id: str, router_id: str, resume_s: float,
                 on_over: Callable[["RouterSession"], None]) -> None:
        """`on_over(session)` is called once, when no stream can come any more."""
        self.number, self.rank, self.instance_id, self.router_id = number, rank, instance_id, router_id
        self.requests: dict[int, int] = {}
        self.stream: ResumableStream[decode_pb2.SessionReply] = ResumableStream(decode_pb2.SessionReply)
        self._resume_s, self._on_over = resume_s, on_over
        self._is_attached = False
        self._expiry: asyncio.TimerHandle | None = None
        self._is_ended = False
        self._is_over = False
        self._error: BatonError | None = None

    def can_resume(self, next_message: int) -> bool:
        """Whether a new stream may go on at reply `next_message`; 0 asks for a session of its own."""
        return not self._is_ended and next_message > 0 and self.stream.can_resume(next_message)

    def attach(self, next_message: int) -> int:
        """A stream carries it from now on, whatever became of the one before. Returns the stream's number."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._is_attached = True
        return self.stream.begin(next_message)

    def detach(self, stream: int) -> None:
        """`stream` is gone. Unless another has taken over, the router has `resume_s` to dial again."""
        if stream != self.stream.current or not self._is_attached:
            return
        self._is_attached = False
        if self._is_ended:
            self._finish()
        else:
            logger.info("session %d of router %s broke with %d requests", self.number, self.router_id, len(self.requests))
            self._expiry = asyncio.get_running_loop().call_later(self._resume_s, self.end, None)

    def push(self, reply: decode_pb2.SessionReply) -> None:
        """Queue a reply; the router that leaves too many untaken loses its session."""
        if self._is_ended:
            count_incident("reply of a session that is over")
            return
        try:
            self.stream.put(reply)
        except Overloaded as error:
            self.end(error)
            self.abandon()  # not flushed: the stream may hang in a write for long

    def end(self, error: BatonError | None) -> None:
        """No more replies; those queued still go out if there is a stream, then `error` is raised to it."""
        if self._is_ended:
            return
        self._is_ended, self._error = True, error
        self.stream.end()
        if not self._is_attached:
            self._finish()

    def abandon(self) -> None:
        """The router has begun anew: nothing more goes out, and a stream that still hangs on it ends."""
        self.end(None)
        self.stream.end(is_flushed=False)
        self._finish()

    def _finish(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self._expiry is not None:
                self._expiry.cancel()
            self._on_over(self)

    async def replies(self, stream: int) -> AsyncIterator[decode_pb2.SessionReply]:
        """Replies for `stream` until its end. Raises the error that ended the session."""
        async for reply in self.stream.outgoing(stream):
            yield reply
        if self._error is not None and stream == self.stream.current:
            raise self._error
