"""One prefill rank: a prompt becomes leased pages and a first token.

A request's states, and who moves it on:

1. QUEUED      Run has come, its reader is a peer; it holds no page (`_queue`)
2. COMPUTING   admitted by the scheduler: all its pages are its own, cached ones pinned, the lease is open; every step computes a chunk of
               it, announces the pages that became final and stores them in the prefix cache (`_admit`, `_commit`)
3. LEASED      first token sampled and told to the front, the last pages and the state announced: the lease alone holds pages (`_finish`)
4. RELEASED    every reader said Done: the hand-off thread frees the pages at once, the main loop says LeaseOver (`_lease_ended`)
   EXPIRED     nobody renewed the lease for its ttl: the same, and a request still COMPUTING fails
   ABORTED     cancelled, refused by the reader, or its forward failed: the other side is told why (`_fail`, `_cancel`)
5. FREE        from any of the three: nothing here knows the request any more

A request without a reader goes from COMPUTING to FREE with its first token, and so does one whose first token is its last.

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
from services.prefill.first_token import FirstToken, FirstTokenSampler, handoff_state
from services.prefill.forward import PrefillChunk
from services.prefill.handoffs import Handoffs
from services.prefill.load import LoadReporter
from services.prefill.messages import Cancel, Command, Event, LeaseOver, Run, RunDone, RunFailed
from services.prefill.request import Request
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
        self.handoffs = Handoffs(kv)
        self.scheduler = Scheduler(
            kv.pool, chunk_tokens=section.chunk_tokens, max_running=section.max_running, max_queued=section.max_queued
        )
        self._load = LoadReporter(kv, self.scheduler, channel.send, clock, token_s)
        self._requests: dict[RequestKey, Request] = {}  # QUEUED and COMPUTING
        self._leased: set[RequestKey] = set()
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
        for request in list(self._requests.values()):
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
        self._requests[run.key] = request
        self._unchecked = True
        try:
            if run.reader is not None:
                self.handoffs.add_reader(run.reader)
            with self._kv.lock:
                self.scheduler.add(request.prompt)
        except HandoffError as error:
            self._fail(request, error.reason, str(error))

    def _cancel(self, cancel: Cancel) -> None:
        """Any state -> ABORTED -> FREE; a LEASED one is reported as LeaseOver like every other end of a lease."""
        request = self._requests.get(cancel.key)
        if request is not None:
            self._fail(request, cancel.reason, cancel.message)
        elif cancel.key in self._leased:
            with self._kv.lock:
                self._kv.leases.abort(cancel.key, cancel.reason, cancel.message)

    def _fail(self, request: Request, reason: int, message: str) -> None:
        """QUEUED or COMPUTING -> ABORTED -> FREE."""
        key = request.run.key
        with self._kv.lock:
            self.scheduler.remove(key)
            self.handoffs.tell(key, request.run.reader, reason, message)
        self._forget(request, RunFailed(key, reason, message))

    def _forget(self, request: Request, event: RunFailed) -> None:
        del self._requests[request.run.key]
        self._channel.send(event)

    def _lease_ended(self, ended: LeaseEnded) -> None:
        """Done, refusal or expiry, as the hand-off thread saw it. Ends of our own making are reported already."""
        self._unchecked = True
        request = self._requests.get(ended.key)
        if request is not None:
            with self._kv.lock:
                self.scheduler.remove(ended.key)
            # A reader that says Done before it heard the last announcement has lost count of its requests.
            message = ended.message or "the reader was done before the prompt was computed"
            self._forget(request, RunFailed(ended.key, ended.reason or common_pb2.INTERNAL, message))
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
        reader = request.run.reader
        if reader is not None:
            self._kv.leases.open(request.run.key, [reader.instance_id])
            self._announce(request, request.num_stored)

    def _compute(self, plan: Plan) -> None:
        last = [self._requests[chunk.prompt.key] for chunk in plan.chunks if chunk.is_last]
        self._step_clock.begin(self._load.predicted_s(plan))
        try:
            logits = self._forward.run(self._kv.memory.pages, [self._chunk(chunk) for chunk in plan.chunks])
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

    def _commit(self, chunk: Chunk) -> None:
        """A chunk is computed: its full pages are final."""
        request = self._requests[chunk.prompt.key]
        self.scheduler.advance(chunk)
        request.store(self._kv.pool)
        if not chunk.is_last:
            self._announce(request, chunk.prompt.num_computed // PAGE_SIZE)

    def _announce(self, request: Request, num_pages: int) -> None:
        pages = request.new_pages(num_pages)
        if pages and request.run.reader is not None:
            self._kv.leases.announce(request.run.key, pages)

    def _finish(self, request: Request, token: FirstToken | None) -> None:
        """COMPUTING -> LEASED, or -> FREE when nobody reads on."""
        if token is None:
            self._fail(request, common_pb2.INTERNAL, "the model gave NaN logits for this prompt")
            return
        key, reader = request.run.key, request.run.reader
        with self._kv.lock:
            if reader is not None and self._kv.leases.state(key) is None:
                return  # it ended during the forward: the hand-off thread's report, still on its way, fails the request
            done = self._done(request, token)
            self._channel.send(done)  # before all that follows: the client waits for this token
            request.store(self._kv.pool, token.token_id)
            if done.leased:
                state = handoff_state(
                    request.run, token, num_cached_tokens=done.num_cached_tokens, queue_us=done.queue_us, compute_us=done.compute_us
                )
                self._kv.leases.announce(key, request.new_pages(len(request.prompt.pages)), state)
                self._leased.add(key)
            elif reader is not None:
                self._kv.leases.finish(key)
            self.scheduler.remove(key)
        del self._requests[key]

    def _done(self, request: Request, token: FirstToken) -> RunDone:
        goes_on = token.finish_reason == common_pb2.FINISH_UNSPECIFIED
        return RunDone(
            key=request.run.key, token_id=token.token_id, logprob=token.logprob, top_ids=token.top_ids, top_logprobs=token.top_logprobs,
            finish_reason=token.finish_reason, leased=goes_on and request.run.reader is not None,
            num_cached_tokens=request.prompt.num_cached, queue_us=request.queue_us, compute_us=request.compute_us,
        )

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
    engine.start()
    channel.send(loaded.up(config.prefill.max_running))
    while engine.turn():
        pass
    engine.close()
    loaded.kv.close()


if __name__ == "__main__":
    run_engine("prefill", Command, serve)
