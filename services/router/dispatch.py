"""A request's way through the cluster, in one coroutine for its whole life (DESIGN.md section 3).

1 ADMITTED    validated and within bounds; `started` tells the client its id and seed
2 PAIRED      policy chose a decode rank, then a prefill rank of the same fingerprint
3 SUBMITTED   the decode rank booked a claim, over its session (not when the next token is the last one)
4 PREFILLING  Prefill.Run names the decode rank as reader of the pages
5 FIRST       the first token goes to the client from prefill's reply or decode's `ready`, whichever is first
6 STREAMING   every step's tokens, ordered and deduplicated by index and attempt, become text and go to the client
7 ENDED       EOS, a stop or a limit: what still runs is cancelled, the last message carries usage and timeline
8 FAILED      an attempt failed: with no token sent another pair starts over; else REPLAY: prompt and sent tokens on a new pair,
              sampling unchanged. Back to 2, or the error goes to the client

A client that is gone, too slow or past its deadline leaves at any point; both sides are cancelled at once.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from proto.baton.v1 import common_pb2, generation_pb2
from services.model.params import SamplingParams
from services.router.attempt import Attempt, Failure
from services.router.mailbox import Mailbox, TimerFired
from services.router.output import Output
from services.router.pairing import Need, Pair, choose_pair
from services.router.pool import Pool
from services.router.timeline import TimelineRecord
from services.router.validate import Limits, Request
from services.runtime.config import RouterSection
from services.runtime.errors import BatonError, DeadlineExceeded, EngineError, HandoffError, InvalidRequest, NoMember, Overloaded

logger = logging.getLogger(__name__)

Write = Callable[[generation_pb2.GenerateReply], Awaitable[None]]

# nobody's fault: no retry is spent
_FREE = frozenset({common_pb2.PREEMPTED, common_pb2.STALE_INSTANCE, common_pb2.DRAINING, common_pb2.REPLACED})
# told by one side of a hand-off, but either may be the broken one
_BOTH = frozenset({common_pb2.PEER_GONE, common_pb2.READ_FAILED, common_pb2.READ_DEADLINE})
# the same ranks may do better
_NOBODY = frozenset({common_pb2.PREEMPTED, common_pb2.EPOCH_MISMATCH, common_pb2.LEASE_EXPIRED})
_MAX_ATTEMPTS = 64  # free ones included
_SETTLE_S = 1.0  # after the last token: for figures still under way
_BACKOFF_S = 0.05  # before the second retry, doubled for each one after, up to 32 times that


class Dispatcher:
    """Runs requests against the pool; holds nothing but the number of those in flight."""

    def __init__(self, pool: Pool, section: RouterSection, token_bytes: Sequence[bytes]) -> None:
        self._pool = pool
        self._section = section
        self._token_bytes = token_bytes
        self.num_requests = 0

    async def run(self, request: Request, write: Write, deadline_s: float | None = None) -> None:
        """Serve `request`, giving every message for the client to `write`; `deadline_s` from now.

        Raises a BatonError when it cannot be finished; tokens already written stay valid. Cancelling cancels it everywhere.
        """
        if self.num_requests >= self._section.max_requests:
            raise Overloaded(f"{self.num_requests} requests are in flight, the router's max_requests")
        self.num_requests += 1
        task = asyncio.current_task()
        assert task is not None
        mailbox = Mailbox(self._section.max_backlog_tokens, task.cancel)
        life = _Life(self._pool, self._section, request, write, mailbox, self._token_bytes, deadline_s)
        try:
            await life.run()
        except asyncio.CancelledError:
            if not mailbox.overflowed or task.uncancel():
                raise
            raise Overloaded(f"the client let more than {self._section.max_backlog_tokens} tokens pile up") from None
        finally:
            self.num_requests -= 1


class _Life:
    """One request's state across its attempts."""

    def __init__(self, pool: Pool, section: RouterSection, request: Request, write: Write, mailbox: Mailbox,
                 token_bytes: Sequence[bytes], deadline_s: float | None) -> None:
        self._pool, self._section, self._request, self._write, self._mailbox = pool, section, request, write, mailbox
        self._deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self._output = Output(request, token_bytes)
        self._record = TimelineRecord(request)
        self._sampling = sampling_message(request.params)
        self._avoid: set[str] = set()
        self._model: tuple[str, Limits] | None = None
        self._num_attempts = 0
        self._num_preemptions = 0

    async def run(self) -> None:
        """States 1 to 8."""
        while True:
            pair = await self._pair()
            try:
                await self._attempt(pair)
                break
            except Failure as failure:
                await self._recover(failure, pair)
        assert self._output.ending is not None
        await self._write(self._record.finished(self._output, self._output.ending))

    async def _say_started(self) -> None:
        """The stream's first message; prefill is called before it, since every wait here is a wait for the first token."""
        request = self._request
        if self._num_attempts == 1:
            await self._write(generation_pb2.GenerateReply(started=generation_pb2.Started(
                request_id=request.request_id, seed=request.params.seed, num_prompt_tokens=len(request.prompt_ids),
            )))

    async def _pair(self) -> Pair:
        """State 2. With no token sent nobody waits for a rank; a stream with tokens out waits `member_wait_s`."""
        give_up_at = time.monotonic() + self._section.member_wait_s
        while True:
            num_sent, params = self._output.num_tokens, self._request.params
            need = Need(
                self._request.digests, len(self._request.prompt_ids) + num_sent, len(self._request.prompt_ids) + params.max_tokens,
                params.max_tokens - num_sent > 1, self._model if num_sent else None, self._avoid,
            )
            try:
                pair = choose_pair(self._pool, need)
                self._model = pair.prefill.model
                return pair
            except NoMember:
                if not num_sent or time.monotonic() >= give_up_at:
                    raise
            try:
                await self._pool.wait_changed(min(give_up_at - time.monotonic(), self._time_left()))
            except TimeoutError:
                self._check_deadline()

    async def _attempt(self, pair: Pair) -> None:
        """States 3 to 7. Raises Failure, having cancelled both sides."""
        self._check_deadline()
        attempt = Attempt(
            request=self._request, sampling=self._sampling, pair=pair, number=self._num_attempts, output=self._output,
            mailbox=self._mailbox, index=self._pool.index, record=self._record,
        )
        self._num_attempts += 1
        reason: common_pb2.Reason = common_pb2.CANCELLED
        try:
            attempt.start(self._num_preemptions, 0 if self._deadline is None else max(int(self._time_left() * 1e6), 1))
            await self._say_started()
            await self._stream(attempt)
        except Failure as failure:
            reason = failure.reason
            raise
        except DeadlineExceeded:
            reason = common_pb2.DEADLINE
            raise
        finally:
            attempt.close(common_pb2.SLOW_CLIENT if self._mailbox.overflowed else reason)
            self._mailbox.clear()

    async def _stream(self, attempt: Attempt) -> None:
        """States 5 to 7: take events, show tokens, until the end is reached and both sides are done."""
        call_later = asyncio.get_running_loop().call_later
        timers = [call_later(self._time_left(), self._mailbox.put, TimerFired("deadline"))] if self._deadline is not None else []
        is_settling = False
        try:
            while True:
                failure: Failure | None = None
                for event in await self._mailbox.take():
                    if isinstance(event, TimerFired):
                        if event.name == "settle":
                            return
                        if self._output.ending is None:
                            raise DeadlineExceeded(f"the deadline passed after {self._output.num_tokens} tokens")
                        continue
                    try:
                        attempt.on(event)
                    except Failure as error:  # tokens before it were accepted and are shown
                        failure = error
                        break
                await self._show()
                if failure is not None:
                    raise failure
                if self._output.ending is not None:
                    if attempt.is_settled:
                        return
                    if not is_settling:
                        is_settling = True
                        timers.append(call_later(_SETTLE_S, self._mailbox.put, TimerFired("settle")))
        finally:
            for timer in timers:
                timer.cancel()

    async def _show(self) -> None:
        delta = self._output.take_delta()
        if delta is not None:
            await self._write(delta)
            self._record.shown()

    async def _recover(self, failure: Failure, pair: Pair) -> None:
        """State 8: returns when another attempt may start, raises what the client gets otherwise."""
        is_free = failure.reason in _FREE and self._num_attempts < _MAX_ATTEMPTS
        logger.warning("attempt %d failed after %d tokens: %s", self._num_attempts - 1, self._output.num_tokens, failure,
                       extra={"request_id": self._request.request_id})
        if failure.reason == common_pb2.PREEMPTED:
            self._num_preemptions += 1
        self._blame(failure, pair)
        is_hopeless = failure.reason in (common_pb2.INVALID, common_pb2.DEADLINE)
        if is_hopeless or (not is_free and self._record.num_retries >= self._section.retries):
            raise _final_error(failure, self._request.request_id)
        self._record.num_retries += not is_free
        if self._num_attempts > 1 and failure.reason != common_pb2.PREEMPTED:
            await asyncio.sleep(min(_BACKOFF_S * 2 ** min(self._num_attempts - 2, 5), self._time_left()))

    def _blame(self, failure: Failure, pair: Pair) -> None:
        """This request avoids whoever may have failed it; a rank that cannot be reached, by us or by its peer, is left alone by all."""
        failed, other = (pair.prefill, pair.decode) if failure.role == "prefill" else (pair.decode, pair.prefill)
        broken = (failed, other) if failure.reason in _BOTH and failure.is_told else (failed,)
        if failure.reason not in _NOBODY:
            self._avoid.update(state.instance_id for state in broken if state is not None)
        gone = other if failure.is_told else failed
        if failure.reason == common_pb2.PEER_GONE and gone is not None:
            gone.cool_down.failed(time.monotonic())

    def _time_left(self) -> float:
        return float("inf") if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def _check_deadline(self) -> None:
        if self._time_left() <= 0.0:
            raise DeadlineExceeded(f"the deadline passed after {self._output.num_tokens} tokens")


def _final_error(failure: Failure, request_id: str) -> BatonError:
    """What the client is told when no retry is left."""
    if failure.reason in (common_pb2.INVALID, common_pb2.TOO_LARGE):
        return InvalidRequest("request", request_id, f"{failure.role} refuses it: {failure}")
    if failure.reason == common_pb2.DEADLINE:
        return DeadlineExceeded(str(failure))
    if failure.reason == common_pb2.OVERLOADED:
        return Overloaded(str(failure))
    if failure.reason == common_pb2.INTERNAL:
        return EngineError(str(failure))
    return HandoffError(failure.reason, str(failure))


def sampling_message(params: SamplingParams) -> common_pb2.Sampling:
    """`params` as the pools get it, the same in every attempt."""
    return common_pb2.Sampling(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p,
        frequency_penalty=params.frequency_penalty, presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty, min_tokens=params.min_tokens, max_tokens=params.max_tokens,
        stop_token_ids=params.stop_token_ids, ignore_eos=params.ignore_eos, seed=params.seed, logprobs=params.logprobs,
    )
