"""A request's way through the cluster (DESIGN.md section 3): one prefill for its n choices, then one coroutine a choice for its whole life.

1 ADMITTED    validated, and let in by gate.py, perhaps after a wait; `started` tells the client its id and seed
2 PAIRED      policy chose a decode rank for each choice, and one prefill rank of the same fingerprint
3 SUBMITTED   each decode rank booked a claim, over its session (not when the next token is the last one)
4 PREFILLING  Prefill.Run names the decode ranks as readers of the pages
5 FIRST       the first token goes to the client from prefill's reply or decode's `ready`, whichever is first
6 STREAMING   every step's tokens, ordered and deduplicated by index and attempt, become text and go to the client
7 ENDED       EOS, a stop or a limit: what still runs is cancelled, the choice's last message carries usage and timeline
8 FAILED      an attempt failed, and while retries are left the next one, with a number above, begins
              REDIRECT  the decode rank was lost before it had the pages: another one pulls them, prefill goes on; to 4
              RETRY     no token was sent: another pair starts over; to 2
              REPLAY    prompt and sent tokens on a new pair, sampling unchanged; to 2
9 MOVING      beside 6: the decode rank drains, another one pulls the running request's pages (move.py); then 6 there

From 5 on a choice lives by itself: own decode rank, attempts, retries. A choice that fails for good ends the request for all of them.
A client that is gone, too slow or past its deadline leaves at any point; all sides are cancelled at once.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Sequence

from proto.baton.v1 import common_pb2, generation_pb2
from services.router.choice import Choice, begin
from services.router.gate import Gate
from services.router.legs import Failure, Ticket, sampling_message
from services.router.mailbox import Event, Mailbox, TimerFired
from services.router.output import Output
from services.router.pairing import Pair, choose_pair, choose_reader, need_of
from services.router.pool import Pool
from services.router.rank_state import RankState
from services.router.recovery import backoff_s, blame, final_error, is_free, is_hopeless
from services.router.timeline import TimelineRecord
from services.router.validate import Request
from services.runtime.config import RouterSection
from services.runtime.errors import DeadlineExceeded, NoMember, Overloaded

logger = logging.getLogger(__name__)

Write = Callable[[generation_pb2.GenerateReply], Awaitable[None]]

_SETTLE_S = 1.0  # after the last token: for figures still under way


class Dispatcher:
    """Runs requests against the pool; holds nothing but who runs and who waits."""

    def __init__(self, pool: Pool, section: RouterSection, token_bytes: Sequence[bytes]) -> None:
        self._pool = pool
        self._section = section
        self._token_bytes = token_bytes
        self._gate = Gate(pool, section)

    @property
    def num_requests(self) -> int:
        """Running; each choice counts as one."""
        return self._gate.num_running

    @property
    def num_queued(self) -> int:
        """Waiting, likewise."""
        return self._gate.num_queued

    def stop(self) -> None:
        """Nobody is let in any more: who waits is refused, what runs goes on."""
        self._gate.close()

    async def run(self, request: Request, write: Write, deadline_s: float | None = None) -> None:
        """Serve `request`, giving every message for the client to `write`; `deadline_s` from now.

        Raises a BatonError when it cannot be finished; tokens already written stay valid. Cancelling cancels it everywhere.
        """
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        admission = await self._gate.enter(request, deadline)
        write = write if request.n == 1 else _one_at_a_time(write)
        lives = [self._life(request, choice, write, deadline) for choice in range(request.n)]
        try:
            with _slow_client_ends([life.mailbox for life in lives], self._section.max_backlog_tokens):
                lives[0].check_deadline()
                begin([life.choice for life in lives], await lives[0].pair())  # waits for nobody: no token was sent
                admission.booked()
                await write(generation_pb2.GenerateReply(started=generation_pb2.Started(
                    request_id=request.request_id, seed=request.params.seed, num_prompt_tokens=len(request.prompt_ids),
                )))
                await _run_all(lives)
                self._gate.learn(request, lives[0].num_cached_tokens, sum(life.num_output_tokens for life in lives))
        finally:
            for life in lives:
                life.choice.close(common_pb2.CANCELLED)
            num_uncached_tokens = len(request.prompt_ids) - lives[0].num_cached_tokens
            admission.leave(num_uncached_tokens, sum(life.num_output_tokens for life in lives))

    def _life(self, request: Request, choice: int, write: Write, deadline: float | None) -> "_Life":
        output, record = Output(request, self._token_bytes, choice), TimelineRecord(request, choice)
        mailbox = Mailbox(self._section.max_backlog_tokens)
        ticket = Ticket(
            pool=self._pool, request=request, choice=choice, sampling=sampling_message(request.params), output=output, record=record,
            mailbox=mailbox, deadline=deadline,
        )
        return _Life(self._section, ticket, write)


async def _run_all(lives: Sequence["_Life"]) -> None:
    """All choices side by side; the first error ends the others. Raises what that one raised."""
    if len(lives) == 1:
        await lives[0].run()
        return
    try:
        async with asyncio.TaskGroup() as group:
            for life in lives:
                group.create_task(life.run())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


@contextlib.contextmanager
def _slow_client_ends(mailboxes: Sequence[Mailbox], limit: int) -> Generator[None]:
    """The block, of the task that takes from `mailboxes`, raises Overloaded when the client lets too many tokens pile up."""
    task = asyncio.current_task()
    assert task is not None
    for mailbox in mailboxes:
        mailbox.on_overflow = task.cancel
    try:
        yield
    except asyncio.CancelledError:
        if not any(mailbox.overflowed for mailbox in mailboxes) or task.uncancel():
            raise
        raise Overloaded(f"the client let more than {limit} tokens pile up") from None


def _one_at_a_time(write: Write) -> Write:
    """gRPC takes one message of a stream at a time."""
    lock = asyncio.Lock()

    async def locked(reply: generation_pb2.GenerateReply) -> None:
        async with lock:
            await write(reply)

    return locked


class _Life:
    """One choice across its attempts."""

    def __init__(self, section: RouterSection, ticket: Ticket, write: Write) -> None:
        self._section, self._ticket = section, ticket
        self._output, self._record = ticket.output, ticket.record
        self._num_new_pairs = 0
        self.mailbox = ticket.mailbox
        self._write = write
        self.choice = Choice(ticket)

    async def run(self) -> None:
        """States 5 to 9, begun in state 4."""
        reason: common_pb2.Reason = common_pb2.CANCELLED
        try:
            with _slow_client_ends([self.mailbox], self._section.max_backlog_tokens):
                while self._output.ending is None:
                    try:
                        await self._stream()
                    except Failure as failure:
                        await self._recover(failure, time.monotonic())
                self.choice.close(reason)
                await self._write(self._record.finished(self._output, self._output.ending))
        except DeadlineExceeded:
            reason = common_pb2.DEADLINE
            raise
        finally:
            self.choice.close(common_pb2.SLOW_CLIENT if self.mailbox.overflowed else reason)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt, as prefill told."""
        return self._record.num_cached_tokens

    @property
    def num_output_tokens(self) -> int:
        return self._output.num_tokens

    async def pair(self) -> Pair:
        """State 2. With no token sent nobody waits for a rank; a stream with tokens out waits `member_wait_s`."""
        give_up_at = time.monotonic() + self._section.member_wait_s
        while True:
            num_sent = self._output.num_tokens
            model = self.choice.prefill.state.model if num_sent and self.choice.prefill is not None else None
            need = need_of(self._ticket.request, num_sent, model, self._ticket.avoid)
            try:
                return choose_pair(self._ticket.pool, need)
            except NoMember:
                if not num_sent or time.monotonic() >= give_up_at:
                    raise
            try:
                await self._ticket.pool.wait_changed(min(give_up_at - time.monotonic(), self._ticket.time_left()))
            except TimeoutError:
                self.check_deadline()

    async def _stream(self) -> None:
        """States 5 to 7, 9: take events, show tokens, until the end is reached and both sides are done. Raises Failure."""
        call_later, left = asyncio.get_running_loop().call_later, self._ticket.time_left()
        timers = [call_later(left, self.mailbox.put, TimerFired("deadline"))] if left < float("inf") else []
        is_settling = False
        try:
            while True:
                events = await self.mailbox.take()
                if TimerFired("settle") in events:
                    return
                await self._take(events)
                if self._output.ending is None:
                    continue
                if self.choice.is_settled:
                    return
                if not is_settling:
                    is_settling = True
                    timers.append(call_later(_SETTLE_S, self.mailbox.put, TimerFired("settle")))
        finally:
            for timer in timers:
                timer.cancel()

    async def _take(self, events: Sequence[Event]) -> None:
        """Take `events` and show what they brought. Raises Failure; those after the one that failed wait for the next attempt."""
        try:
            for i, event in enumerate(events):
                if event == TimerFired("deadline"):
                    if self._output.ending is None:
                        raise DeadlineExceeded(f"the deadline passed after {self._output.num_tokens} tokens")
                    continue
                try:
                    self.choice.on(event)
                except Failure:
                    self.mailbox.put_back(events[i + 1 :])
                    raise
        finally:
            await self._show()

    async def _show(self) -> None:
        delta = self._output.take_delta()
        if delta is not None:
            try:
                await self._write(delta)
            finally:  # cut off while it writes, the client may have them all the same
                self._record.shown(len(delta.delta.token_ids))

    async def _recover(self, failure: Failure, failed_at: float) -> None:
        """State 8: returns when another attempt has begun, raises what the client gets otherwise."""
        ticket, choice, num_sent = self._ticket, self.choice, self._output.num_tokens
        logger.warning("attempt %d of choice %d failed after %d tokens: %s", ticket.num_attempts - 1, ticket.choice, num_sent, failure,
                       extra={"request_id": ticket.request.request_id})
        ticket.num_preemptions += failure.reason == common_pb2.PREEMPTED
        blame(ticket, failure, choice.prefill, choice.decode)
        costs_nothing = is_free(failure, ticket.num_attempts)
        if is_hopeless(failure) or (not costs_nothing and self._record.num_retries >= self._section.retries):
            choice.close(failure.reason)
            raise final_error(failure, ticket.request.request_id)
        reader = self._other_reader(failure)
        again = generation_pb2.Recovery.REPLAY if num_sent else generation_pb2.Recovery.RETRY
        path = again if reader is None else generation_pb2.Recovery.REDIRECT
        recovery = self._record.recover(path, failure.reason, failure.role, num_sent, is_free=costs_nothing)
        self._record.await_token(recovery, failed_at)
        if reader is not None:
            choice.redirect(reader, failure.reason)
        else:
            choice.close(failure.reason)
            await self._begin_anew(failure)

    def _other_reader(self, failure: Failure) -> RankState | None:
        """Who may pull the pages that wait at prefill, if they do and there is somebody who has not failed this choice."""
        choice, ticket = self.choice, self._ticket
        if not choice.can_redirect(failure) or choice.prefill is None or choice.decode is None:
            return None
        need = need_of(ticket.request, choice.prefill.num_sent, choice.prefill.state.model, ())
        return choose_reader(ticket.pool, need, {choice.decode.rank.instance_id, *ticket.avoid})

    async def _begin_anew(self, failure: Failure) -> None:
        """A new pair: at once the first time, and whenever the same ranks will do."""
        if failure.reason != common_pb2.PREEMPTED:
            await asyncio.sleep(min(backoff_s(self._num_new_pairs), self._ticket.time_left()))
            self._num_new_pairs += 1
        self.check_deadline()
        begin([self.choice], await self.pair())

    def check_deadline(self) -> None:
        """Raises DeadlineExceeded when the client's deadline has passed."""
        if self._ticket.time_left() <= 0.0:
            raise DeadlineExceeded(f"the deadline passed after {self._output.num_tokens} tokens")
