"""One prefill rank: a prompt becomes leased pages and a first token.

A request's states, and who moves it on:

1. QUEUED      Run has come, its readers are peers; it holds no page (`_queue`)
2. COMPUTING   admitted by the scheduler: all its pages are its own, cached ones pinned, a lease a choice is open; every step computes a
               chunk of it, announces the pages that became final and stores them in the prefix cache (`_admit`, `_commit`)
3. LEASED      first tokens sampled and told to the front, the last pages and the state announced: the leases alone hold pages (`_finish`).
               From here on each choice lives on its own: all share the prompt's pages but the last one, of which each has a copy
4. RELEASED    every reader said Done: the hand-off thread frees the pages at once, the main loop says LeaseOver (`_lease_ended`)
   EXPIRED     nobody renewed the lease for its ttl: the same; a request still COMPUTING fails when no choice is left
   ABORTED     cancelled, refused by the reader, its forward failed, the transfer agent renewed: the other side is told (`_fail`, `_cancel`)
5. FREE        from any of the three: nothing here knows the request any more

A request without a reader goes from COMPUTING to FREE with its first token, and so does a choice whose first token is its last. A redirect
gives a choice that is QUEUED, COMPUTING or LEASED another reader and a higher attempt (`_redirect`); its state stays.

Threads: the main loop (commands, schedule, forward, sample, announce, events), the hand-off thread (`handoffs.py`) and the heartbeat
(`runtime/engine.py`). `kv.lock` guards pages, prefix cache, leases and the scheduler; a forward runs without it.
"""
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from proto.baton.v1 import common_pb2
from services.kv.layout import PAGE_SIZE
from services.kv.lease import LeaseEnded
from services.kv.messages import RequestKey
from services.kv.rank_kv import RankKv
from services.prefill.first_token import FirstToken, FirstTokenSampler, run_done
from services.prefill.forward import PrefillChunk
from services.prefill.handoffs import Handoffs
from services.prefill.load import LoadReporter
from services.prefill.messages import Cancel, Command, Event, LeaseOver, Redirect, Run, RunFailed
from services.prefill.request import Request, Requests
from services.prefill.scheduler import Chunk, Plan, Scheduler
from services.prefill.startup import load
from services.runtime.config import Config, PrefillSection
from services.runtime.engine import StepClock, run_engine
from services.runtime.errors import HandoffError
from services.runtime.ipc import EngineChannel, Stop

logger = logging.getLogger(__name__)

_IDLE_S = 0.02  # a command ends the wait at once; ends of leases and load reports wait for it
_BLOCKED_S = 0.001  # prompts wait for pages that the hand-off thread may free at any time
_CHECK_S = 1.0  # at most one integrity check in this time


class Channel(Protocol):
    """The part of runtime.ipc.EngineChannel that the loop uses."""

    def receive(self, timeout_s: float) -> list[Command]: ...
    def send(self, event: Event) -> None: ...


class Forward(Protocol):
    """See services/prefill/forward.py: logits [number of chunks that want them, vocab] fp32."""

    def run(self, pages: torch.Tensor, batch: Sequence[PrefillChunk]) -> torch.Tensor: ...


class PrefillEngine:
    """Main loop of a rank. `start()`, then `turn()` until it is false, then `close()`."""

    def __init__(
        self, *, kv: RankKv, forward: Forward, sampler: FirstTokenSampler, section: PrefillSection, channel: Channel,
        step_clock: StepClock, token_s: float = 0.0, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kv, self._forward, self._sampler, self._channel = kv, forward, sampler, channel
        self._step_clock, self._clock = step_clock, clock
        self.handoffs = Handoffs(kv, step_clock)
        self.scheduler = Scheduler(
            kv.pool, chunk_tokens=section.chunk_tokens, max_running=section.max_running, max_queued=section.max_queued
        )
        self._requests = Requests()  # QUEUED and COMPUTING
        self._load = LoadReporter(kv, self.scheduler, self._requests.waiting_since, channel.send, clock, token_s)
        self._leased: set[RequestKey] = set()  # a choice each
        self._busy = False  # the last turn ran a forward
        self._unchecked = False  # something happened since the last integrity check
        self._checked_at = -_CHECK_S

    @property
    def num_requests(self) -> int:
        """QUEUED and COMPUTING."""
        return len(self._requests)

    @property
    def num_leased(self) -> int:
        """LEASED, and ended leases that the front has not heard of."""
        return len(self._leased)

    def start(self) -> None:
        """Start the hand-off thread."""
        self.handoffs.start()

    def turn(self) -> bool:
        """Commands, ended leases, one step. False once told to stop."""
        for command in self._channel.receive(self._patience_s()):
            if isinstance(command, Stop):
                return False
            if isinstance(command, Run):
                self._queue(command)
            elif isinstance(command, Redirect):
                self._redirect(command)
            else:
                self._cancel(command)
        for ended in self.handoffs.take_ended():
            self._lease_ended(ended)
        self._step()
        self._load.report()
        return True

    def close(self) -> None:
        """Give everything up, each side told, and end the hand-off thread. The caller closes `kv`."""
        self.handoffs.stop()
        for request in self._requests.all():
            self._fail(request, common_pb2.DRAINING, "the prefill rank stops")
        with self._kv.lock:
            for key in self._leased:
                self._kv.leases.abort(key, common_pb2.DRAINING, "the prefill rank stops")

    def _patience_s(self) -> float:
        if self._busy or self.scheduler.num_computing:
            return 0.0
        return _BLOCKED_S if self.scheduler.num_queued else _IDLE_S

    # ---- commands and ended leases

    def _queue(self, run: Run) -> None:
        """-> QUEUED, or refused."""
        request = Request.of(run, self._clock)
        self._unchecked = True
        try:
            self.handoffs.add_readers(run.readers)
            with self._kv.lock:
                if run.readers:
                    self.handoffs.check_instance(run.instance_id)
                if self._requests.of_run(run.key) or any(self.handoffs.knows(key) for key in run.keys):
                    message = f"attempt {run.key.attempt} of a choice of request {run.key.request_id} is here already; raise the attempt"
                    raise HandoffError(common_pb2.STALE_ATTEMPT, message)
                self.scheduler.add(request.prompt)
                self.handoffs.queue(request.choices)
        except HandoffError as error:
            with self._kv.lock:
                self.handoffs.refuse(request.choices, error.reason, str(error))
            self._channel.send(RunFailed(run.key, error.reason, str(error)))
            return
        self._requests.add(request)

    def _cancel(self, cancel: Cancel) -> None:
        """Any state -> ABORTED -> FREE; a choice's lease is reported by the hand-off thread like every other end of a lease."""
        request = self._requests.of_run(cancel.key)
        if request is not None:
            self._fail(request, cancel.reason, cancel.message)
        else:
            with self._kv.lock:
                self._kv.leases.abort(cancel.key, cancel.reason, cancel.message)

    def _redirect(self, command: Redirect) -> None:
        """Another reader for a choice, whatever its state."""
        done = self.handoffs.redirect(command)
        if done.former is not None and not self._requests.redirect(done.former, done.key, command.reader):
            self._leased.remove(done.former)
            self._leased.add(done.key)
        self._channel.send(done)

    def _fail(self, request: Request, reason: int, message: str) -> None:
        """QUEUED or COMPUTING -> ABORTED -> FREE."""
        with self._kv.lock:
            self.scheduler.remove(request.run.key)
            self.handoffs.abort(request.choices, reason, message)
        self._requests.remove(request)
        self._channel.send(RunFailed(request.run.key, reason, message))

    def _lease_ended(self, ended: LeaseEnded) -> None:
        """Done, refusal, expiry or a renewed agent, as the hand-off thread saw it. Ends of our own making are reported already."""
        self._unchecked = True
        request = self._requests.of_choice(ended.key)
        if request is not None:
            with self._kv.lock:
                is_over = self.handoffs.are_over(request.choices)
            if is_over:  # else the other choices go on, and this one's reader or its end has told the router
                # A reader that says Done before it heard the last announcement has lost count of its requests.
                message = ended.message or "the reader was done before the prompt was computed"
                self._fail(request, ended.reason or common_pb2.INTERNAL, message)
        elif ended.key in self._leased:
            self._leased.remove(ended.key)
            self._channel.send(LeaseOver(ended.key, ended.reason, ended.message))

    # ---- steps

    def _step(self) -> None:
        with self._kv.lock:
            plan = self.scheduler.schedule()
            for prompt in plan.admitted:
                self._admit(self._requests[prompt.key])
        self._busy = bool(plan.chunks)
        if plan.chunks:
            self._compute(plan)
        elif not self._requests:
            self._check()

    def _admit(self, request: Request) -> None:
        """QUEUED -> COMPUTING; cached pages are final already."""
        request.admitted()
        self.handoffs.open(request.choices)
        self.handoffs.announce(request.choices, request.new_pages(request.num_stored))

    def _compute(self, plan: Plan) -> None:
        last = [self._requests[chunk.prompt.key] for chunk in plan.chunks if chunk.is_last]
        self._step_clock.begin(self._load.predicted_s(plan))
        try:
            logits = self._forward.run(self._kv.memory.pages, [self._chunk(chunk) for chunk in plan.chunks])
            self._copy_last_pages(last)  # before sampling, which waits for all that was launched
            tokens = self._sampler.sample(logits, [request.run for request in last])
        except Exception as error:  # whatever went wrong, the rank outlives it and only this batch pays
            logger.exception("a forward failed", extra={"request_ids": [chunk.prompt.key.request_id for chunk in plan.chunks]})
            self._step_clock.end()
            for chunk in plan.chunks:
                self._fail(self._requests[chunk.prompt.key], common_pb2.INTERNAL, f"the forward failed: {error!r:.200}")
            return
        self._load.stepped(plan, self._step_clock.end())
        with self._kv.lock:
            for chunk in plan.chunks:
                self._commit(chunk)
        for request, token in zip(last, tokens, strict=True):
            self._finish(request, token)

    def _chunk(self, chunk: Chunk) -> PrefillChunk:
        request, end = self._requests[chunk.prompt.key], chunk.start + chunk.num_tokens
        return PrefillChunk(
            token_ids=request.run.token_ids[chunk.start : end], start=chunk.start, page_table=chunk.prompt.pages, want_logits=chunk.is_last
        )

    def _copy_last_pages(self, requests: Sequence[Request]) -> None:
        """Each choice will write behind the prompt: a page a choice, whose sole holder is still the request."""
        pages = self._kv.memory.pages
        for prompt in [request.prompt for request in requests]:
            for copy in prompt.copies:
                pages[copy].copy_(pages[prompt.pages[-1]])

    def _commit(self, chunk: Chunk) -> None:
        """A chunk is computed: its full pages are final."""
        request = self._requests[chunk.prompt.key]
        self.scheduler.advance(chunk)
        request.store(self._kv.pool)
        if not chunk.is_last:
            self.handoffs.announce(request.choices, request.new_pages(chunk.prompt.num_computed // PAGE_SIZE))

    def _finish(self, request: Request, tokens: Sequence[FirstToken] | None) -> None:
        """COMPUTING -> LEASED, or -> FREE where nobody reads on."""
        if tokens is None:
            self._fail(request, common_pb2.INTERNAL, "the model gave NaN logits for this prompt")
            return
        with self._kv.lock:
            if self.handoffs.are_over(request.choices):
                return  # they ended during the forward: the hand-off thread's report, still on its way, fails the request
            done = run_done(request, tokens, self.handoffs.knows)
            self._channel.send(done)  # before all that follows: the client waits for these tokens
            for page, token in zip(request.last_pages, tokens, strict=False):  # without readers there are no copies
                request.store_last(self._kv.pool, page, token.token_id)
            if request.choices:
                self._leased |= self.handoffs.hand_over(request, done, tokens)
            self.scheduler.remove(request.run.key)
        self._requests.remove(request)

    def _check(self) -> None:
        """Prove the pool's invariants when there is time for it; EngineError ends the process."""
        now = self._clock()
        if self._unchecked and now - self._checked_at >= _CHECK_S:
            self._kv.check_integrity()
            self._unchecked, self._checked_at = False, now


def serve(config: Config, rank: int, channel: EngineChannel[Command, Event], step_clock: StepClock) -> None:
    """Load, say Up, run until told to stop."""
    torch.set_num_threads(config.prefill.threads)
    loaded = load(config, rank)
    sampler = FirstTokenSampler(loaded.model.eos_token_ids, loaded.max_model_len)
    engine = PrefillEngine(
        kv=loaded.kv, forward=loaded.forward, sampler=sampler, section=config.prefill, channel=channel, step_clock=step_clock,
        token_s=loaded.token_s,
    )
    engine.handoffs.on_renewed = lambda former: channel.send(loaded.up(config.prefill.max_running, former))
    engine.handoffs.on_turn = loaded.turn
    engine.start()
    channel.send(loaded.up(config.prefill.max_running))
    while engine.turn():
        pass
    engine.close()
    loaded.close()


if __name__ == "__main__":
    run_engine("prefill", Command, serve)
