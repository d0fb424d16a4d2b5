"""One router's stream with one rank: what it asked for, and the replies it has not taken yet."""
import asyncio
from collections import deque
from collections.abc import AsyncIterator

from proto.baton.v1 import decode_pb2
from services.runtime.errors import BatonError, Overloaded
from services.runtime.supervisor import RankProcess

MAX_REPLIES = 10_000  # a router that leaves more unread is no longer alive


class RouterSession:
    """`requests` maps handle to attempt. Replies are numbered from 1 without gaps in the order of `push`."""

    def __init__(self, number: int, rank: RankProcess, instance_id: str, router_id: str) -> None:
        self.number, self.rank, self.instance_id, self.router_id = number, rank, instance_id, router_id
        self.requests: dict[int, int] = {}
        self._replies: deque[decode_pb2.SessionReply] = deque()
        self._sequence = 0
        self._changed = asyncio.Event()
        self._is_over = False
        self._error: BatonError | None = None

    def push(self, reply: decode_pb2.SessionReply) -> None:
        """Queue a reply; the router that leaves too many unread loses its session."""
        if self._is_over:
            return
        if len(self._replies) >= MAX_REPLIES:
            self._replies.clear()
            self.end(Overloaded(f"router {self.router_id} left {MAX_REPLIES} replies of its session unread"))
            return
        self._sequence += 1
        reply.sequence = self._sequence
        self._replies.append(reply)
        self._changed.set()

    def end(self, error: BatonError | None) -> None:
        """No more replies; those queued still go out, then `error` is raised to the stream."""
        if not self._is_over:
            self._is_over, self._error = True, error
            self._changed.set()

    async def replies(self) -> AsyncIterator[decode_pb2.SessionReply]:
        """Replies until the end. Raises the error that ended the session."""
        while True:
            while self._replies:
                yield self._replies.popleft()
            if self._is_over:
                if self._error is not None:
                    raise self._error
                return
            self._changed.clear()
            await self._changed.wait()
