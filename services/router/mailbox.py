"""What a request's coroutine reads: everything that happens to it, in order, from sessions, calls and timers."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from proto.baton.v1 import common_pb2, decode_pb2, prefill_pb2


class StepSlice(NamedTuple):
    """One request's columns of a StepTokens message."""

    attempt: int
    first_index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]  # as token_ids, or empty
    top_logprobs: Sequence[common_pb2.TopLogprobs]  # as token_ids, or empty
    num_accepted_drafts: int


class PrefillDone(NamedTuple):
    """Prefill.Run has returned."""

    attempt: int  # that Run was called for; a redirect leaves it as it is
    reply: prefill_pb2.PrefillReply


class RedirectDone(NamedTuple):
    """Prefill.Redirect has returned, or failed: then `outcome` says how."""

    attempt: int  # the new one
    outcome: prefill_pb2.RequestOutcome


class RankFailed(NamedTuple):
    """A whole rank, or the way to it, failed this attempt."""

    attempt: int
    role: str
    reason: common_pb2.Reason
    message: str


class Draining(NamedTuple):
    """The decode rank that holds this attempt will leave: put once into the mailbox of every request of its session."""

    attempt: int


class TimerFired(NamedTuple):
    """A timer of the request itself; `name` is "deadline", "settle" or one of move.py's."""

    name: str
    number: int = 0  # what the timer is about: a move's newest attempt


MoveReply: TypeAlias = decode_pb2.Granted | decode_pb2.CaughtUp | decode_pb2.Paused | decode_pb2.Resumed
Reply: TypeAlias = decode_pb2.Claimed | decode_pb2.Ready | decode_pb2.RequestFinished | decode_pb2.RequestFailed | MoveReply
Event: TypeAlias = StepSlice | PrefillDone | RedirectDone | RankFailed | Draining | TimerFired | Reply


class Mailbox:
    """Events of one choice of a request. One coroutine takes them; putting never waits and never makes a task."""

    def __init__(self, max_tokens: int) -> None:
        """`on_overflow`, set by the taker, is called once, when more than `max_tokens` tokens wait to be taken."""
        self._events: list[Event] = []
        self._num_tokens = 0
        self._max_tokens = max_tokens
        self._waiter: asyncio.Future[None] | None = None
        self.on_overflow: Callable[[], object] | None = None
        self.overflowed = False

    def put(self, event: Event) -> None:
        self._events.append(event)
        if isinstance(event, StepSlice):
            self._num_tokens += len(event.token_ids)
            if self._num_tokens > self._max_tokens and not self.overflowed:
                self.overflowed = True
                if self.on_overflow is not None:
                    self.on_overflow()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Event]:
        """All events that wait; at least one."""
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events, self._num_tokens = self._events, [], 0
        return events

    def put_back(self, events: Sequence[Event]) -> None:
        """The taker stopped before these: they are the next."""
        self._events[:0] = events
        self._num_tokens += sum(len(event.token_ids) for event in events if isinstance(event, StepSlice))
