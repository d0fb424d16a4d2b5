"""The main loop of one decode rank: READY requests join at the next step, each step gives every running request one token.

Whatever fails in a step fails its requests, typed, and nothing else; whoever leaves gives all pages back but what the prefix cache holds.
"""
import logging
import queue
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from proto.baton.v1 import common_pb2
from services.decode.forward import DecodeBatch
from services.decode.messages import (
    Cancel,
    Failed,
    Finished,
    MovePause,
    MoveResume,
    MoveStart,
    RequestEvent,
    SessionLost,
    StepOut,
    Stop,
)
from services.decode.metrics import PREEMPTIONS, stepped
from services.decode.moves import Moves
from services.decode.request import Logprobs, Request, RequestState
from services.decode.sampler import BatchSampler, Chosen
from services.decode.scheduler import Scheduler, finish_reason
from services.kv.lease import LeaseEnded
from services.kv.messages import FINISHED
from services.kv.metrics import BUSY_SECONDS
from services.kv.pages import Holder, HolderKind
from services.kv.rank_kv import RankKv
from services.runtime.engine import StepClock
from services.runtime.errors import EngineError

_IDLE_S = 0.05  # without work for so long: prove the pool once
_PAUSED_S = 0.01  # how often the time of paused requests is looked at when nobody else runs

_log = logging.getLogger(__name__)

Item = Request | Cancel | SessionLost | MoveStart | MovePause | MoveResume | LeaseEnded | Stop | Exception


class Forward(Protocol):
    """See services/decode/forward.py: logits [b, vocab] fp32."""

    def run(self, pages: torch.Tensor, batch: DecodeBatch) -> torch.Tensor: ...


class DecodeLoop:
    """`inbox` takes READY requests, commands about them, ends of their leases, and an exception that ended the handoff thread.

    It is bounded by those who fill it: a request holds a page, a lease belongs to a request, and commands are taken from the front only
    while few wait here.
    """

    def __init__(
        self, forward: Forward, kv: RankKv, *, max_running: int, eos_token_ids: tuple[int, ...],
        emit: Callable[[RequestEvent], None], clock: StepClock, num_claims: Callable[[], int], now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.scheduler = Scheduler(max_running)
        self.num_forwards = 0
        self.num_query_tokens = 0
        self.step_s = 0.0  # of the latest step
        self._forward, self._kv, self._emit, self._clock = forward, kv, emit, clock
        self._num_claims, self._now = num_claims, now
        self._eos_token_ids = eos_token_ids
        self._sampler = BatchSampler(eos_token_ids)
        self._moves = Moves(kv, self.scheduler, self._sampler, emit, now)
        self._proved = False  # the pool, since the last work

    @property
    def num_moves(self) -> int:
        """Requests that move away."""
        return len(self._moves)

    @property
    def num_penalty_states(self) -> int:
        """Requests whose penalty counts are kept."""
        return len(self._sampler)

    def warm_up(self) -> None:
        """Run a forward on a page of our own, so that the first request finds everything allocated."""
        holder = Holder(HolderKind.REQUEST, "warm-up")
        with self._kv.lock:
            (page,) = self._kv.pool.take(1, holder)
        self._forward.run(self._kv.memory.pages, DecodeBatch([0], [0], [[page]]))
        with self._kv.lock:
            self._kv.pool.release(holder)

    def run(self) -> None:
        """Step until Stop; whoever is still here then is to be replayed elsewhere."""
        while self._take_next() and self.take_waiting():
            self.step()
        for request in self.scheduler.requests:
            self._fail(request, common_pb2.DRAINING, f"the decode rank stops after {request.num_output_tokens} output tokens")

    def take_waiting(self) -> bool:
        """Act on what is in the inbox now; False on Stop."""
        while True:
            try:
                item = self.inbox.get_nowait()
            except queue.Empty:
                return True
            if not self._take(item):
                return False

    def _take_next(self) -> bool:
        """Wait for an item unless there is a step to do; False on Stop."""
        if not self.scheduler.is_idle:
            return True
        if not len(self.scheduler):
            return self._take(self._wait())
        try:
            return self._take(self.inbox.get(timeout=_PAUSED_S))
        except queue.Empty:
            return True

    def _wait(self) -> Item:
        """The next item; when none comes for a while, the idle rank proves its pool and says what it did."""
        while not self._proved:
            try:
                return self.inbox.get(timeout=_IDLE_S)
            except queue.Empty:
                self._proved = self._num_claims() == 0
                if self._proved:
                    self._kv.check_integrity()
                    self._log_counters()
        return self.inbox.get()

    def _take(self, item: Item) -> bool:
        self._proved = False
        if isinstance(item, Stop):
            return False
        if isinstance(item, Exception):
            raise EngineError("the handoff thread ended") from item
        match item:
            case Request():
                self._sampler.add(item)
                self.scheduler.add(item)
                self._finish_if_over(item)
            case Cancel():
                if (request := self.scheduler.get(item.session, item.handle)) is not None:
                    self._leave(request, item.reason or common_pb2.CANCELLED, "cancelled by the router")
            case SessionLost():
                for request in self.scheduler.requests:
                    if request.session == item.session:
                        self._leave(request, common_pb2.SESSION_LOST, "the router's session broke")
            case LeaseEnded():
                if (request := self._moves.lease_ended(item)) is not None:
                    self._fail(request, common_pb2.REPLACED, f"moved to attempt {item.key.attempt}, which goes on from here")
            case _:
                self._moves.take(item)
        return True

    # ---- one step

    def step(self) -> None:
        """One token for every running request. Whatever fails, fails these requests and nothing else."""
        self._fail_late()
        self._moves.check_pauses()
        self.scheduler.admit()
        self._take_pages()
        batch = self.scheduler.batch()
        if batch:
            began = self._now()
            self._step(batch)
            BUSY_SECONDS.inc(self._now() - began)

    def _step(self, batch: Sequence[Request]) -> None:
        try:
            chosen = self._compute(batch)
        except Exception as error:
            _log.exception("a forward failed", extra={"request_ids": [request.key.request_id for request in batch]})
            for request in batch:
                self._fail(request, common_pb2.INTERNAL, f"a decode step failed: {error!r:.200}")
            return
        rows: list[tuple[Request, Chosen]] = []
        for request, token in zip(batch, chosen, strict=True):
            if token is None:
                self._fail(request, common_pb2.INTERNAL, "the model gave NaN logits for this request")
            else:
                rows.append((request, token))
        self._append(rows)
        self._say(rows)
        stepped([request for request, _ in rows], self._now(), self.step_s)
        for request, _ in rows:
            self._finish_if_over(request)

    def _take_pages(self) -> None:
        """A page for everybody whose next token begins one, preempting while they are too few."""
        with self._kv.lock:
            while (victim := self.scheduler.victim(self._kv.pool.num_available)) is not None:
                self._preempt(victim)
            for request in self.scheduler.lacking_page():
                request.pages += self._kv.pool.take(1, request.holder)

    def _compute(self, batch: Sequence[Request]) -> list[Chosen | None]:
        self._clock.begin(max(self.step_s, 0.1))
        try:
            inputs = DecodeBatch(
                token_ids=[request.token_ids[-1] for request in batch],
                positions=[request.position for request in batch],
                page_tables=[request.pages for request in batch],
            )
            logits = self._forward.run(self._kv.memory.pages, inputs)
            self.num_forwards += 1
            self.num_query_tokens += len(batch)
            return self._sampler.sample(logits, batch)
        finally:
            self.step_s = self._clock.end()

    def _append(self, rows: Sequence[tuple[Request, Chosen]]) -> None:
        final = [request for request, token in rows if request.append(token.token_id)]
        for request, token in rows:
            if request.params.logprobs >= 0:
                request.latest = Logprobs(token.logprob, tuple(token.top_ids), tuple(token.top_logprobs))
        if final:
            with self._kv.lock:
                for request in final:
                    self._kv.pool.insert(request.digests, request.pages[: len(request.digests)], request.token_ids)
                    self._moves.pages_final(request)

    def _say(self, rows: Sequence[tuple[Request, Chosen]]) -> None:
        """One message a session."""
        sessions: dict[int, list[tuple[Request, Chosen]]] = {}
        for request, token in rows:
            sessions.setdefault(request.session, []).append((request, token))
        for session, mine in sessions.items():
            wants_logprobs = any(request.params.logprobs >= 0 for request, _ in mine)
            wants_top = any(request.params.logprobs > 0 for request, _ in mine)
            self._emit(StepOut(
                session=session,
                handles=[request.handle for request, _ in mine],
                first_index=[request.num_output_tokens - 1 for request, _ in mine],
                num_tokens=[1] * len(mine),
                token_ids=[token.token_id for _, token in mine],
                logprobs=[token.logprob for _, token in mine] if wants_logprobs else [],
                top_ids=[token.top_ids for _, token in mine] if wants_top else [],
                top_logprobs=[token.top_logprobs for _, token in mine] if wants_top else [],
                step_us=int(self.step_s * 1e6),
            ))

    # ---- ends

    def _finish_if_over(self, request: Request) -> None:
        reason = finish_reason(request, self._eos_token_ids)
        if reason == common_pb2.FINISH_UNSPECIFIED:
            return
        self._leave(request, FINISHED, "")
        stop_token_id = request.token_ids[-1] if reason == common_pb2.STOP else 0
        decode_us = int((self._now() - request.ready_at) * 1e6)
        self._emit(Finished(request.session, request.handle, reason, request.num_output_tokens, stop_token_id, decode_us))

    def _fail_late(self) -> None:
        now = self._now()
        for request in self.scheduler.requests:
            if request.deadline is not None and now >= request.deadline:
                self._fail(request, common_pb2.DEADLINE, f"the request's deadline passed after {request.num_output_tokens} output tokens")

    def _fail(self, request: Request, reason: int, message: str) -> None:
        self._leave(request, reason, message)
        self._emit(Failed(request.session, request.handle, reason, message))

    def _preempt(self, request: Request) -> None:
        """Its final pages stay in the prefix cache, evictable; the caller holds the lock."""
        message = f"preempted after {request.num_output_tokens} output tokens: no page was free for the requests admitted before it"
        self._release(request, common_pb2.PREEMPTED, message)
        PREEMPTIONS.inc()
        self._emit(Failed(request.session, request.handle, common_pb2.PREEMPTED, message))

    def _leave(self, request: Request, reason: int, message: str) -> None:
        with self._kv.lock:
            self._release(request, reason, message)

    def _release(self, request: Request, reason: int, message: str) -> None:
        """The request is over here: nothing of it stays but what the prefix cache holds. The caller holds the lock."""
        self.scheduler.remove(request)
        self._sampler.forget(request)
        request.state = RequestState.FINISHED if reason == FINISHED else RequestState.ABORTED
        self._moves.end(request, reason, message)
        self._kv.pool.release(request.holder)

    def _log_counters(self) -> None:
        stats = self._kv.transport.stats
        _log.info("counters", extra={
            "num_forwards": self.num_forwards, "num_query_tokens": self.num_query_tokens, "num_pages_read": stats.num_pages,
            "num_words_read": stats.num_words, "num_bytes_read": stats.num_bytes, "num_reads_failed": stats.num_failed, "ucx": stats.ucx,
        })
