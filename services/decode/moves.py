"""Requests of this rank that move to another: its side of "drain by pull" (DESIGN.md section 5). The main loop calls.

1 start     a lease for the reader under the attempt to come; final pages are announced at once, then each as it becomes final
2 pause     at a step's end the rest is announced with the decoding state                                   -> PAUSED
3 done      the reader has verified all of it and runs the request: it leaves, Failed(REPLACED)             -> ABORTED
  resume    the lease ended otherwise, the router says so, or PAUSE_S went by: it runs on, Resumed          -> RUNNING
  end       the request ended by itself before: the lease goes with it, and the reader is told
"""
import logging
from collections.abc import Callable

import msgspec

from proto.baton.v1 import common_pb2
from services.decode.messages import MoveCommand, MovePause, MoveResume, MoveStart, Paused, RequestEvent, Resumed
from services.decode.request import Request, RequestState
from services.decode.sampler import BatchSampler
from services.decode.scheduler import Scheduler
from services.kv.layout import num_pages_for
from services.kv.lease import LeaseEnded, LeaseState
from services.kv.messages import HandoffState, RequestKey
from services.kv.rank_kv import RankKv
from services.runtime.telemetry import count_incident

PAUSE_S = 2.0

_log = logging.getLogger(__name__)


class _Move:
    def __init__(self, request: Request, key: RequestKey) -> None:
        self.request, self.key = request, key  # the key is the lease's
        self.num_announced = 0  # pages
        self.paused_at = 0.0


class Moves:
    """All moves under way, one a request at most."""

    def __init__(
        self, kv: RankKv, scheduler: Scheduler, sampler: BatchSampler, emit: Callable[[RequestEvent], None], now: Callable[[], float]
    ) -> None:
        self._kv, self._scheduler, self._sampler, self._emit, self._now = kv, scheduler, sampler, emit, now
        self._moves: dict[tuple[int, int], _Move] = {}

    def __len__(self) -> int:
        return len(self._moves)

    def take(self, command: MoveCommand) -> None:
        """Act on a router's command; what does not fit is counted and without effect."""
        request = self._scheduler.get(command.session, command.handle)
        move = self._moves.get((command.session, command.handle))
        match command:
            case MoveStart() if request is not None and command.new_attempt > request.newest_attempt:
                self._start(request, command)
            case MovePause() if move is not None and self._is_meant(move, command) and move.request.state is not RequestState.PAUSED:
                self._pause(move)
            case MoveResume() if move is not None and self._is_meant(move, command):
                self._call_off(move, common_pb2.CANCELLED, "the router called the move off")
            case MoveStart() if request is not None and move is None:
                message = f"attempt {command.new_attempt} does not follow {request.newest_attempt}; an attempt is started once"
                self._emit(Resumed(command.session, command.handle, common_pb2.STALE_ATTEMPT, message))
            case _:
                count_incident("move command ignored")
                _log.info("%s of handle %d to attempt %d ignored", type(command).__name__, command.handle, command.new_attempt)

    def pages_final(self, request: Request) -> None:
        """Announce what became final, if the request moves. The caller holds the kv lock."""
        move = self._moves.get(request.id)
        if move is not None and move.num_announced < len(request.digests):
            self._kv.leases.announce(move.key, self._next_pages(move, len(request.digests)))

    def end(self, request: Request, reason: int, message: str) -> None:
        """The request leaves, FINISHED (0) or for another reason; the reader is told. The caller holds the kv lock."""
        move = self._moves.pop(request.id, None)
        if move is None:
            return
        if reason == common_pb2.REASON_UNSPECIFIED:
            self._kv.leases.finish(move.key)
        else:
            self._kv.leases.abort(move.key, reason, message)

    def lease_ended(self, ended: LeaseEnded) -> Request | None:
        """The request that the lease's reader runs from now on; None when it runs on here, or when nothing moves under this key."""
        move = next((move for move in self._moves.values() if move.key == ended.key), None)
        if move is None:
            return None
        if ended.state is LeaseState.RELEASED and move.request.state is RequestState.PAUSED:
            del self._moves[move.request.id]
            return move.request
        self._resume(move, ended.reason or common_pb2.INTERNAL, ended.message or "the reader was done before it had all pages")
        return None

    def check_pauses(self) -> None:
        """Whoever is paused for too long runs on."""
        now = self._now()
        for move in [move for move in self._moves.values() if move.request.state is RequestState.PAUSED]:
            if now >= move.paused_at + PAUSE_S:
                self._call_off(move, common_pb2.DEADLINE, f"the reader was not ready {PAUSE_S:g} s after the pause")
            if move.request.state is RequestState.PAUSED and now >= move.paused_at + 2 * PAUSE_S:
                self._resume(move, common_pb2.INTERNAL, "the lease ended but its end was not heard of")

    # ---- inside

    def _is_meant(self, move: _Move, command: MoveCommand) -> bool:
        return command.new_attempt == move.key.attempt

    def _start(self, request: Request, command: MoveStart) -> None:
        request.newest_attempt = command.new_attempt  # a lease's end names its attempt, and must not be taken for another lease's
        with self._kv.lock:
            self.end(request, common_pb2.REPLACED, f"attempt {command.new_attempt} follows")
            self._scheduler.resume(request)
            if not self._kv.transport.has_peer(command.reader.instance_id):  # closed, or the agent renewed, since it was met
                message = f"reader {command.reader.instance_id} is a peer no more; move the request again"
                self._emit(Resumed(command.session, command.handle, common_pb2.PEER_GONE, message))
                return
            move = self._moves[request.id] = _Move(request, msgspec.structs.replace(request.key, attempt=command.new_attempt))
            self._kv.leases.open(move.key, [command.reader.instance_id])
            self._kv.leases.announce(move.key, self._next_pages(move, len(request.digests)))

    def _pause(self, move: _Move) -> None:
        request = move.request
        state = self._state(request)
        with self._kv.lock:
            if self._kv.leases.state(move.key) is not LeaseState.COMPUTING:
                return  # it has ended: lease_ended() is about to hear of it
            self._kv.leases.announce(move.key, self._next_pages(move, num_pages_for(request.position)), state)
        self._scheduler.pause(request)
        move.paused_at = self._now()
        self._emit(Paused(request.session, request.handle, request.num_output_tokens))

    def _next_pages(self, move: _Move, stop: int) -> list[tuple[int, int]]:
        start, move.num_announced = move.num_announced, stop
        return [(index, move.request.pages[index]) for index in range(start, stop)]

    def _state(self, request: Request) -> HandoffState:
        """Where decoding goes on: the last token known has no KV yet."""
        assert request.handoff is not None
        return msgspec.structs.replace(
            request.handoff, first_token=request.token_ids[-1], first_logprob=request.latest.logprob, top_ids=request.latest.top_ids,
            top_logprobs=request.latest.top_logprobs, output_ids=tuple(request.output_ids[:-1]), penalties=self._sampler.counts(request),
            num_prompt_tokens=request.position, num_output_tokens=request.num_output_tokens,
        )

    def _call_off(self, move: _Move, reason: int, message: str) -> None:
        with self._kv.lock:
            if self._kv.leases.state(move.key) is None:
                return  # it has ended: lease_ended() is about to hear how
            self._kv.leases.abort(move.key, reason, message)
        self._resume(move, reason, message)

    def _resume(self, move: _Move, reason: int, message: str) -> None:
        request = move.request
        del self._moves[request.id]
        self._scheduler.resume(request)
        _log.info("move ended: %s", message, extra={"request_id": request.key.request_id, "reason": reason})
        self._emit(Resumed(request.session, request.handle, reason, message))
