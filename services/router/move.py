"""A move: a running choice goes from a decode rank that drains to another one, which pulls its pages (Move in decode.proto).

1 WAITING   no target: there is none, or the last try failed and backs off
2 CLAIMED   the target booked it; `granted` = it has taken pages
3 STARTED   the source announces its pages to the target, still running; `caught_up` = all announced pages are read
4 PAUSING   the source stops at a step's end and announces the rest
5 READY     the target runs it. Tokens are the source's up to here, so the switch waits for those still under way

Failure of the target, or of the source to go through with it: the source runs on, back to 1. Failure of the source: the target decides if
the pause was over, for a moment; else the choice is replayed.
"""

import asyncio
import logging
import time
from typing import NamedTuple

from proto.baton.v1 import common_pb2, decode_pb2, generation_pb2
from services.router.legs import DecodeLeg, Failure, Ticket
from services.router.mailbox import Event, RankFailed, StepSlice, TimerFired
from services.router.pairing import choose_reader, need_of
from services.runtime.telemetry import count_incident, reason_name

logger = logging.getLogger(__name__)

RETRY_TIMER, ORPHAN_TIMER = "move", "orphan"
_BACKOFF_S = 0.05  # after the first failed try, doubled by each one after it, up to 32 times that
_RESUMED_S = 3.0  # a source that was told to resume says so by then, or is asked again all the same
_ORPHAN_S = 0.5  # how long a target may still get ready once its source is gone


class Switch(NamedTuple):
    """The target has it: what it said so far, in order, is to be taken as the choice's own from here on."""

    target: DecodeLeg
    events: list[Event]
    recovery: generation_pb2.Recovery
    paused_at: float
    is_source_running: bool  # it has resumed, not knowing that the target runs


class Move:
    """Owns the target; the source belongs to the choice."""

    def __init__(self, ticket: Ticket, source: DecodeLeg) -> None:
        self._ticket, self._source = ticket, source
        self._avoid: set[str] = set()
        self._reason: common_pb2.Reason = common_pb2.DRAINING  # why the next try is made
        self._num_failures = 0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._resuming = False  # `resumed` is still to come
        self._source_failure: Failure | None = None
        self.target: DecodeLeg | None = None
        self._begin()

    def _begin(self) -> None:
        """States 1 and 2."""
        self._is_started, self._ready, self._paused_at, self._asked_at = False, False, 0.0, 0.0
        self._held: list[Event] = []
        ticket, source = self._ticket, self._source
        num_sent = ticket.output.num_tokens
        need = need_of(ticket.request, num_sent, source.state.model, ticket.avoid | self._avoid)
        reader = choose_reader(ticket.pool, need, {source.state.instance_id})
        if reader is None:
            self._later(_BACKOFF_S)
            return
        self._recovery = ticket.record.recover(generation_pb2.Recovery.MOVE, self._reason, "decode", num_sent, is_free=True)
        self.target = ticket.book(reader, ticket.next_number(), num_sent)
        ticket.submit(self.target, source.state.rank, source.state.fingerprint, num_sent, is_move=True)

    def _later(self, seconds: float, name: str = RETRY_TIMER) -> None:
        if name in self._timers:
            self._timers[name].cancel()
        timer = TimerFired(name, self._ticket.num_attempts)
        self._timers[name] = asyncio.get_running_loop().call_later(seconds, self._ticket.mailbox.put, timer)

    def on_timer(self, timer: TimerFired) -> None:
        """A wait is over. Raises Failure."""
        if timer.number != self._ticket.num_attempts:  # of a try before this one
            return
        if timer.name == ORPHAN_TIMER and self._source_failure is not None:
            self.close(self._source_failure.reason)
            raise self._source_failure
        if timer.name == RETRY_TIMER and self.target is None:
            self._resuming = False
            self._begin()

    def on_target(self, event: Event) -> None:
        """States 2 to 5. Raises Failure when there is no source to go on with."""
        target = self.target
        assert target is not None
        if isinstance(event, decode_pb2.RequestFailed | RankFailed):
            target.cancel(event.reason)
            self._target_failed(event)
        elif isinstance(event, decode_pb2.Granted):
            self._is_started = True
            self._source.move(decode_pb2.Move.START, target)
        elif isinstance(event, decode_pb2.CaughtUp):
            self._asked_at = time.monotonic()
            self._source.move(decode_pb2.Move.PAUSE, target)
        elif isinstance(event, decode_pb2.Ready | decode_pb2.RequestFinished | StepSlice):
            self._ready = self._ready or isinstance(event, decode_pb2.Ready)
            self._held.append(event)

    def _target_failed(self, event: decode_pb2.RequestFailed | RankFailed) -> None:
        reason = event.reason or common_pb2.INTERNAL
        failure = self._source_failure or Failure("decode", reason, event.message, is_told=not isinstance(event, RankFailed))
        if self._ready or not self._source.is_live:  # it had taken over, or there is no other
            raise failure
        self._give_up(reason, event.message)

    def on_source(self, event: Event) -> bool:
        """Whether `event`, of the source, is the move's own. Raises Failure when the source is lost and the target cannot go on."""
        if isinstance(event, decode_pb2.Paused):
            self._paused_at = time.monotonic()
        elif isinstance(event, decode_pb2.Resumed):
            self._resumed(event)
        elif isinstance(event, decode_pb2.RequestFailed | RankFailed):
            self._source.cancel(event.reason)
            self._source_failed(event)
        else:
            return False
        return True

    def _resumed(self, event: decode_pb2.Resumed) -> None:
        was_started, self._is_started = self._is_started, False
        if self._resuming:  # as told
            self._resuming = False
            self._later(self._backoff_s())
        elif was_started and not self._ready:
            self._give_up(event.reason or common_pb2.INTERNAL, event.message)

    def _source_failed(self, event: decode_pb2.RequestFailed | RankFailed) -> None:
        reason = event.reason or common_pb2.INTERNAL
        is_told = not isinstance(event, RankFailed)
        failure = Failure("decode", reason, event.message, is_told=is_told, is_drained=not is_told or reason == common_pb2.ENGINE_DIED)
        if self.target is None or self._is_behind():
            raise failure
        self._source_failure = failure
        if not self._paused_at:  # REPLACED may be of the try before, given up meanwhile: nobody announces to this target
            raise failure
        if reason == common_pb2.REPLACED:  # the target has told the source that it runs it: its own session decides
            return
        self._later(_ORPHAN_S, ORPHAN_TIMER)

    def _is_behind(self) -> bool:
        """Whether the target is ready beyond what the source has sent."""
        return self._ready and not self._can_switch()

    def _can_switch(self) -> bool:
        ready = next((event for event in self._held if isinstance(event, decode_pb2.Ready)), None)
        return ready is not None and self._ticket.output.num_tokens >= ready.position

    def _give_up(self, reason: common_pb2.Reason, message: str) -> None:
        """This try failed; the source runs on."""
        target = self.target
        assert target is not None
        logger.warning("move to %s given up: %s: %s", target.state.name, reason_name(reason), message,
                       extra={"request_id": self._ticket.request.request_id})
        count_incident("move given up", reason)
        target.cancel(common_pb2.CANCELLED)
        self._avoid.add(target.rank.instance_id)
        self._num_failures += 1
        self._reason, self.target = reason, None
        if self._is_started:
            self._source.move(decode_pb2.Move.RESUME, target)
            self._resuming = True
        self._later(_RESUMED_S if self._resuming else self._backoff_s())

    def _backoff_s(self) -> float:
        return _BACKOFF_S * 2 ** min(self._num_failures - 1, 5)

    def switch(self) -> Switch | None:
        """State 5 reached: the move is over and the target is the caller's."""
        if self.target is None or not self._can_switch():
            return None
        target, self.target = self.target, None
        self.close(common_pb2.REPLACED)
        return Switch(target, self._held, self._recovery, self._paused_at or self._asked_at or time.monotonic(), not self._is_started)

    def close(self, reason: common_pb2.Reason) -> None:
        """Want nothing more of the target. May be called again."""
        for timer in self._timers.values():
            timer.cancel()
        if self.target is not None:
            self.target.cancel(reason)
            self.target = None
