"""One choice of a request, event by event: which leg an event is about, and what follows for its output.

Its legs: a Prefill.Run (perhaps shared with the other choices), a decode rank, and while it moves the target and for a moment the source
that it left. Whatever names none of these is ignored and counted. What follows a Failure is dispatch.py's decision.
"""

import asyncio
import time
from collections.abc import Sequence

from proto.baton.v1 import common_pb2, decode_pb2
from services.router.legs import DecodeLeg, Failure, PrefillLeg, Ticket
from services.router.mailbox import Draining, Event, PrefillDone, RankFailed, RedirectDone, StepSlice, TimerFired
from services.router.move import Move
from services.router.output import Ending, Gap
from services.router.pairing import Pair, choose_reader, need_of
from services.router.rank_state import RankState
from services.runtime.telemetry import count_incident

# The rank, or its part of the hand-off, is lost, but the pages may still wait at prefill for another reader.
_LOST_READER = frozenset({
    common_pb2.ENGINE_DIED, common_pb2.SESSION_LOST, common_pb2.PEER_GONE, common_pb2.DRAINING, common_pb2.OVERLOADED,
    common_pb2.STALE_INSTANCE, common_pb2.FENCED, common_pb2.TOO_LARGE, common_pb2.INTERNAL,
})
_DRAINED = frozenset({common_pb2.ENGINE_DIED, common_pb2.SESSION_LOST, common_pb2.PEER_GONE})  # from a rank that was to leave anyway


class Choice:
    """Owns the legs; close() frees them all, whatever happened."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.prefill: PrefillLeg | None = None
        self.decode: DecodeLeg | None = None
        self._move: Move | None = None
        self._left: DecodeLeg | None = None  # source of a move that is over, until it says so
        self._awaits_prefill = False
        self._redirect: asyncio.Task[None] | None = None
        self._finished: decode_pb2.RequestFinished | None = None

    @property
    def is_settled(self) -> bool:
        """Whether both sides are done with it; only asked after the output's end."""
        return not self._awaits_prefill and (self.decode is None or not self.decode.is_live)

    def on(self, event: Event) -> None:
        """Take one event. Raises Failure."""
        num_tokens = self.ticket.output.num_tokens
        try:
            if not self._route(event):
                count_incident("message of an old attempt ignored")
            self._after()
        except Gap as gap:
            raise Failure("decode", common_pb2.INTERNAL, str(gap)) from None
        finally:
            if self.ticket.output.num_tokens > num_tokens:
                self.ticket.record.progressed()

    def _route(self, event: Event) -> bool:
        """Give `event` to the leg that it is about; false when there is none."""
        if isinstance(event, TimerFired):
            if self._move is not None:
                self._move.on_timer(event)
            return True
        if isinstance(event, decode_pb2.Claimed):  # nothing hangs on it
            return True
        if isinstance(event, PrefillDone) or (isinstance(event, RankFailed) and event.role == "prefill"):
            return self._on_prefill(event)
        if isinstance(event, RedirectDone):
            return self._on_redirect(event)
        if self.decode is not None and event.attempt == self.decode.number:
            return self._on_decode(event)
        target = self._move.target if self._move is not None else None
        if self._move is not None and target is not None and event.attempt == target.number:
            if isinstance(event, Draining):
                target.is_draining = True
            else:
                self._move.on_target(event)
            return True
        return self._left is not None and event.attempt == self._left.number and self._on_left(self._left, event)

    def _on_prefill(self, event: PrefillDone | RankFailed) -> bool:
        prefill, ticket = self.prefill, self.ticket
        is_run = prefill is not None and self._awaits_prefill and event.attempt == prefill.number
        is_holder = isinstance(event, RankFailed) and self.decode is not None and event.attempt == self.decode.number
        if prefill is None or not (is_run or is_holder):
            return False
        if is_run:
            self._awaits_prefill = False
            prefill.leave(ticket.choice)  # of a holder that renewed its agent Run goes on, for nothing
        if isinstance(event, RankFailed):
            self._fail("prefill", event.reason, event.message, is_told=False)
            return True
        outcome = event.reply.outcome
        if not outcome.ok:
            self._fail("prefill", outcome.reason or common_pb2.INTERNAL, outcome.message)
            return True
        first = next((first for first in event.reply.first_tokens if first.choice == ticket.choice), None)
        if first is None:
            raise Failure("prefill", common_pb2.INTERNAL, f"its reply has no first token of choice {ticket.choice}")
        ticket.record.prefilled(event.reply, is_replay=prefill.num_sent > 0)
        ticket.pool.index.keep(prefill.rank.instance_id, ticket.request.digests)
        ticket.pool.computed(prefill.state, event.reply, len(ticket.request.prompt_ids) + prefill.num_sent)
        ticket.output.accept_one(prefill.num_sent, first.token)
        if first.finish_reason:
            prefill.state.cool_down.succeeded()  # else `ready` says whether its pages can be had
            ticket.output.end(Ending(first.finish_reason, first.token.id if first.finish_reason == common_pb2.STOP else None))
        elif self.decode is None and ticket.output.ending is None:
            raise Failure("prefill", common_pb2.INTERNAL, "its token was to be the last one but is not")
        return True

    def _on_redirect(self, event: RedirectDone) -> bool:
        if self._redirect is None or self.decode is None or event.attempt != self.decode.number:
            return False
        self._redirect = None
        if not event.outcome.ok and not self.decode.is_ready and self.ticket.output.ending is None:
            reason = event.outcome.reason or common_pb2.INTERNAL
            count_incident("redirect refused", reason)
            raise Failure("prefill", reason, event.outcome.message, is_redirect=True)
        return True

    def _on_decode(self, event: Event) -> bool:
        """`event` is of the decode rank that the choice is at."""
        leg, output = self.decode, self.ticket.output
        assert leg is not None
        if self._move is not None and self._move.on_source(event):
            return True
        if isinstance(event, StepSlice):
            self.ticket.record.drafts(event.num_accepted_drafts)
            output.accept(event.first_index, event.token_ids, event.logprobs, event.top_logprobs)
        elif isinstance(event, decode_pb2.Ready):
            self._on_ready(leg, event)
        elif isinstance(event, RankFailed | decode_pb2.RequestFailed):
            leg.cancel(event.reason)  # of a session's own finding the rank does not know
            is_told = not isinstance(event, RankFailed)
            is_drained = leg.is_draining and event.reason in _DRAINED
            self._fail("decode", event.reason or common_pb2.INTERNAL, event.message, is_told=is_told, is_drained=is_drained)
        elif isinstance(event, decode_pb2.RequestFinished):
            leg.cancel(common_pb2.CANCELLED)
            self._finished = event
        elif isinstance(event, Draining):
            leg.is_draining = True
            self._leave(leg)
        else:
            return False
        return True

    def _on_ready(self, leg: DecodeLeg, ready: decode_pb2.Ready) -> None:
        leg.is_ready = True
        self.ticket.record.ready(ready)
        leg.state.cool_down.succeeded()
        if self.prefill is not None and leg.number == self.prefill.number:
            self.prefill.state.cool_down.succeeded()
        self.ticket.pool.index.keep(leg.rank.instance_id, self.ticket.request.digests)
        self.ticket.output.accept_one(ready.position, ready.first_token)
        self._leave(leg)

    def _leave(self, leg: DecodeLeg) -> None:
        """Move away from a rank that drains, as soon as the request runs there."""
        is_draining = leg.is_draining or leg.state.is_leaving
        if is_draining and leg.is_ready and leg.is_live and self._move is None and self.ticket.output.ending is None:
            self._move = Move(self.ticket, leg)

    def _on_left(self, source: DecodeLeg, event: Event) -> bool:
        """The source of a move that went through."""
        if not isinstance(event, decode_pb2.Resumed | decode_pb2.RequestFailed | RankFailed | decode_pb2.RequestFinished):
            return not isinstance(event, StepSlice)  # nothing hangs on `paused` or `draining`, late as they are
        source.cancel(common_pb2.REPLACED)  # `resumed`: it has not heard that the target runs
        self._left = None
        return True

    def _fail(
        self, role: str, reason: common_pb2.Reason, message: str, *, is_told: bool = True, is_drained: bool = False
    ) -> None:
        """A side failed: no failure of the choice when it has all that it needed of it."""
        is_ready = self.decode is not None and self.decode.is_ready
        if self.ticket.output.ending is None and not (role == "prefill" and is_ready):
            raise Failure(role, reason, message, is_told=is_told, is_drained=is_drained)

    def _after(self) -> None:
        """What follows from the state rather than from one event."""
        output, finished = self.ticket.output, self._finished
        if output.ending is None and self._move is not None:
            self._switch(self._move)
            finished = self._finished
        if output.ending is None and finished is not None:
            is_whole = finished.num_output_tokens == output.num_tokens
            if not is_whole and not self._awaits_prefill:
                numbers = f"it ended after {finished.num_output_tokens} tokens but {output.num_tokens} came"
                raise Failure("decode", common_pb2.INTERNAL, numbers)
            if is_whole:
                output.end(Ending(finished.reason, finished.stop_token_id if finished.reason == common_pb2.STOP else None))
        if output.ending is not None:
            self._wind_up(output.ending)

    def _wind_up(self, ending: Ending) -> None:
        """The end: cancel whoever does not know of it by itself, or is not needed at all."""
        num_sent = self.prefill.num_sent if self.prefill is not None else 0
        self._close_move(common_pb2.CANCELLED)
        if self.decode is not None and (ending.stop_string or self.ticket.output.num_tokens <= num_sent + 1):
            self.decode.cancel(common_pb2.CANCELLED)

    def _switch(self, move: Move) -> None:
        """From the source of a move to its target, once that is ready and no token is between them."""
        switch = move.switch()
        if switch is None:
            return
        source = self.decode
        assert source is not None
        self._move = None
        if self._left is not None:  # of the move before: whoever it waits for, two moves have gone through since
            self._left.cancel(common_pb2.REPLACED)
        self._left = source if source.is_live else None
        if switch.is_source_running:
            source.cancel(common_pb2.REPLACED)
        self.decode = switch.target
        self.ticket.record.moved(switch.target.state)
        self.ticket.record.await_token(switch.recovery, switch.paused_at)
        for event in switch.events:
            self._on_decode(event)

    def can_redirect(self, failure: Failure) -> bool:
        """Whether prefill's pages may still be had by another decode rank."""
        prefill, decode = self.prefill, self.decode
        if prefill is None or decode is None or decode.is_ready or failure.role != "decode" or failure.reason not in _LOST_READER:
            return False
        if failure.reason == common_pb2.PEER_GONE and failure.is_told:  # its peer is this prefill rank
            return False
        is_member = self.ticket.pool.is_member(prefill.state, prefill.rank.instance_id)
        return is_member and self.ticket.output.num_tokens <= prefill.num_sent + 1

    def redirect(self, reader: RankState, reason: common_pb2.Reason) -> None:
        """Let `reader` pull in place of the present decode rank; Run, if it has not returned, goes on."""
        prefill, decode, ticket = self.prefill, self.decode, self.ticket
        assert prefill is not None and decode is not None
        decode.cancel(reason)
        if self._redirect is not None:
            self._redirect.cancel()
        self.decode = ticket.book(reader, ticket.next_number(), prefill.num_sent)
        self._redirect = asyncio.create_task(ticket.redirect(prefill, self.decode))
        ticket.submit(self.decode, prefill.rank, prefill.state.fingerprint, prefill.num_sent)
        ticket.record.moved(reader)

    def take(self, prefill: PrefillLeg, decode: DecodeLeg | None) -> None:
        """Begin anew with these legs."""
        self.prefill, self.decode, self._awaits_prefill, self._finished = prefill, decode, True, None

    def _close_move(self, reason: common_pb2.Reason) -> None:
        if self._move is not None:
            self._move.close(reason)
            self._move = None

    def close(self, reason: common_pb2.Reason) -> None:
        """Want nothing more of anybody. May be called again."""
        self._close_move(reason)
        if self._redirect is not None:
            self._redirect.cancel()
            self._redirect = None
        if self._left is not None:
            self._left.cancel(common_pb2.REPLACED)
            self._left = None
        if self.decode is not None:
            self.decode.cancel(reason)
        if self.prefill is not None and self._awaits_prefill:
            self.prefill.leave(self.ticket.choice)
            self._awaits_prefill = False


def begin(choices: Sequence[Choice], pair: Pair) -> None:
    """Call prefill once for all of `choices` (consecutive, at the same attempt), submit a claim for each. Neither waits for the other."""
    first = choices[0].ticket
    number = max([choice.ticket.next_number() for choice in choices])  # all the same
    num_sent = first.output.num_tokens
    need = need_of(first.request, num_sent, pair.prefill.model, first.avoid)
    prefill = PrefillLeg(pair.prefill, number, num_sent, pair.num_uncached_tokens)
    legs: list[DecodeLeg] = []
    for choice in choices:
        decode = None
        if pair.decode is not None:
            state = pair.decode if not legs else choose_reader(first.pool, need, ()) or pair.decode
            decode = choice.ticket.book(state, number, num_sent)
            legs.append(decode)
        choice.take(prefill, decode)
        choice.ticket.record.called(pair._replace(decode=decode.state if decode is not None else None))
    # Run goes out first: the first token waits for it, and not for the claims
    prefill.call(first.run_message(prefill, legs, len(choices)), {choice.ticket.choice: choice.ticket.mailbox for choice in choices})
    first.pool.index.expect(pair.prefill.instance_id, first.request.digests, time.monotonic())
    for choice in choices:
        if choice.decode is not None:
            choice.ticket.submit(choice.decode, prefill.rank, pair.prefill.fingerprint, num_sent)
