"""What one choice of a request holds at its ranks, each under an attempt number: a call at prefill, a handle at decode.

Events name the attempt; what names no leg of now is ignored and counted by choice.py.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio

from proto.baton.v1 import common_pb2, decode_pb2, prefill_pb2
from services.model.params import SamplingParams
from services.router.mailbox import Event, Mailbox, PrefillDone, RankFailed, RedirectDone
from services.router.output import Output
from services.router.pool import Pool
from services.router.rank_state import RankState
from services.router.timeline import TimelineRecord
from services.router.validate import Request
from services.runtime.telemetry import reason_name

_REASONS: dict[grpc.StatusCode, common_pb2.Reason] = {
    grpc.StatusCode.UNAVAILABLE: common_pb2.PEER_GONE,
    grpc.StatusCode.DEADLINE_EXCEEDED: common_pb2.DEADLINE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: common_pb2.OVERLOADED,
    grpc.StatusCode.INVALID_ARGUMENT: common_pb2.INVALID,
    grpc.StatusCode.FAILED_PRECONDITION: common_pb2.STALE_INSTANCE,
}
_REDIRECT_S = 3.0  # a holder answers between two steps; one that stands still is known as gone by then


class Failure(Exception):
    """An attempt is over without the choice's end; `role` = "prefill" or "decode", the side that failed.

    `is_told`: that side says so itself; otherwise the router could not reach it.
    `is_redirect`: the holder would not, or could not, give the pages to another reader.
    `is_drained`: the rank was about to leave: nobody's fault.
    """

    def __init__(
        self, role: str, reason: common_pb2.Reason, message: str, *, is_told: bool = True, is_redirect: bool = False,
        is_drained: bool = False,
    ) -> None:
        super().__init__(f"{role}: {reason_name(reason)}: {message}")
        self.role, self.reason = role, reason
        self.is_told, self.is_redirect, self.is_drained = is_told, is_redirect, is_drained


class PrefillLeg:
    """One Prefill.Run, of one choice or of several that began together: each leaves by itself, the last one to leave cancels it."""

    def __init__(self, state: RankState, number: int, num_sent: int, num_uncached_tokens: int) -> None:
        """`number`: attempt that Run is called under; `num_sent`: output tokens that were known before, so the first token's index."""
        self.state, self.rank, self.number, self.num_sent = state, state.rank, number, num_sent
        self._num_tokens = num_uncached_tokens
        self._waiting: dict[int, Mailbox] = {}  # by choice, while Run has not returned
        self._task: asyncio.Task[None] | None = None

    def call(self, run: prefill_pb2.PrefillRequest, mailboxes: dict[int, Mailbox]) -> None:
        """Send Run; what becomes of it goes to each of `mailboxes`, by choice."""
        assert self.state.prefill is not None
        call: Any = self.state.prefill.Run(run)
        self.state.begin(self._num_tokens)
        self._waiting = dict(mailboxes)
        self._task = asyncio.create_task(self._await(call))

    async def _await(self, call: Any) -> None:
        """Cancelling this task cancels the call, and so the request at prefill."""
        try:
            event: Event = PrefillDone(self.number, await call)
        except grpc.aio.AioRpcError as error:
            reason = _REASONS.get(error.code(), common_pb2.INTERNAL)
            event = RankFailed(self.number, "prefill", reason, error.details() or error.code().name)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            event = RankFailed(self.number, "prefill", common_pb2.PEER_GONE, "the rank left the pool")  # its channel was closed
        mailboxes = list(self._waiting.values())
        self._over()
        for mailbox in mailboxes:
            mailbox.put(event)

    def leave(self, choice: int) -> None:
        """This choice wants nothing more of Run. May be called again."""
        if self._waiting.pop(choice, None) is not None and not self._waiting:
            assert self._task is not None
            self._task.cancel()
            self._over()

    def _over(self) -> None:
        self._waiting = {}
        self.state.end(self._num_tokens)


class DecodeLeg:
    """A place at one decode rank, booked or running, under one attempt number."""

    def __init__(self, state: RankState, number: int, num_tokens: int) -> None:
        """Counts at the rank from now on, until cancel()."""
        self.state, self.rank, self.number = state, state.rank, number
        self._num_tokens = num_tokens
        self._handle: int | None = None
        self.is_live = True  # the rank has it, or is about to
        self.is_ready = False  # the request runs there
        self.is_draining = False
        state.begin(num_tokens)

    def submit(self, submit: decode_pb2.Submit, mailbox: Mailbox) -> None:
        assert self.state.session is not None
        self._handle = self.state.session.submit(submit, mailbox)

    def move(self, step: decode_pb2.Move.Step, target: "DecodeLeg") -> None:
        """Tell this rank, a move's source, the next step of the move to `target`."""
        if self._handle is not None and self.is_live and self.state.session is not None:
            is_start = step == decode_pb2.Move.START
            self.state.session.move(
                self._handle, step, target.number, reader=target.rank if is_start else None,
                fingerprint=target.state.fingerprint if is_start else "",
            )

    def cancel(self, reason: common_pb2.Reason) -> None:
        """Want nothing more of it; a rank that has forgotten it by itself hears nothing. May be called again."""
        if self.is_live and self._handle is not None and self.state.session is not None:
            self.state.session.cancel(self._handle, reason)
        if self.is_live:
            self.is_live = False
            self.state.end(self._num_tokens)


class Ticket:
    """What all legs of one choice have in common."""

    def __init__(self, *, pool: Pool, request: Request, choice: int, sampling: common_pb2.Sampling, output: Output,
                 record: TimelineRecord, mailbox: Mailbox, deadline: float | None) -> None:
        self.pool, self.request, self.choice, self.sampling = pool, request, choice, sampling
        self.output, self.record, self.mailbox = output, record, mailbox
        self._deadline = deadline
        self.num_attempts = 0
        self.num_preemptions = 0
        self.avoid: set[str] = set()  # instance ids that failed this choice

    def time_left(self) -> float:
        """Seconds of the client's deadline."""
        return float("inf") if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    @property
    def deadline_us(self) -> int:
        """As the pools are told it; 0 = none."""
        return 0 if self._deadline is None else max(int(self.time_left() * 1e6), 1)

    def next_number(self) -> int:
        """A fresh attempt number."""
        self.num_attempts += 1
        return self.num_attempts - 1

    def prompt(self, num_sent: int) -> common_pb2.Prompt:
        """The prompt and the first `num_sent` output tokens, these forced."""
        ids = [*self.request.prompt_ids, *self.output.token_ids[:num_sent]]
        return common_pb2.Prompt(token_ids=ids, num_output_tokens=num_sent, salt=self.request.salt)

    def book(self, state: RankState, number: int, num_sent: int) -> DecodeLeg:
        """A leg at `state` that counts there but is not submitted yet."""
        self.pool.index.expect(state.instance_id, self.request.digests, time.monotonic())
        return DecodeLeg(state, number, len(self.request.prompt_ids) + num_sent)

    def submit(self, leg: DecodeLeg, holder: common_pb2.Rank, fingerprint: str, num_sent: int, *, is_move: bool = False) -> None:
        """Send the claim of `leg`; `holder`, of `fingerprint`, announces."""
        leg.submit(decode_pb2.Submit(
            key=self.key(leg.number), prompt=self.prompt(num_sent), sampling=self.sampling, holder=holder,
            num_preemptions=self.num_preemptions, deadline_us=self.deadline_us, fingerprint=fingerprint, is_move=is_move,
        ), self.mailbox)

    def key(self, number: int) -> common_pb2.RequestKey:
        return common_pb2.RequestKey(request_id=self.request.request_id, choice=self.choice, attempt=number)

    def run_message(self, prefill: PrefillLeg, readers: Iterable[DecodeLeg], num_choices: int) -> prefill_pb2.PrefillRequest:
        """Run of `num_choices` choices from this one on."""
        return prefill_pb2.PrefillRequest(
            request_id=self.request.request_id, attempt=prefill.number, instance_id=prefill.rank.instance_id,
            prompt=self.prompt(prefill.num_sent), sampling=self.sampling, n=num_choices, first_choice=self.choice,
            readers=[leg.rank for leg in readers], fingerprint=prefill.state.fingerprint, deadline_us=self.deadline_us,
        )

    async def redirect(self, prefill: PrefillLeg, leg: DecodeLeg) -> None:
        """Ask the holder to let `leg` read; the answer goes to the mailbox."""
        assert prefill.state.prefill is not None
        request = prefill_pb2.RedirectRequest(
            key=self.key(leg.number), instance_id=prefill.rank.instance_id, reader=leg.rank, fingerprint=leg.state.fingerprint
        )
        try:
            call: Any = prefill.state.prefill.Redirect(request, timeout=_REDIRECT_S)
            outcome = (await call).outcome
        except grpc.aio.AioRpcError as error:
            reason = _REASONS.get(error.code(), common_pb2.INTERNAL)
            if reason == common_pb2.DEADLINE:  # ours, not the client's: the holder is busy, or it will be told gone by others
                reason = common_pb2.OVERLOADED
            outcome = prefill_pb2.RequestOutcome(reason=reason, message=error.details() or error.code().name)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            outcome = prefill_pb2.RequestOutcome(reason=common_pb2.PEER_GONE, message="the rank left the pool")
        self.mailbox.put(RedirectDone(leg.number, outcome))


def sampling_message(params: SamplingParams) -> common_pb2.Sampling:
    """`params` as the pools get it, the same in every attempt."""
    return common_pb2.Sampling(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p,
        frequency_penalty=params.frequency_penalty, presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty, min_tokens=params.min_tokens, max_tokens=params.max_tokens,
        stop_token_ids=params.stop_token_ids, ignore_eos=params.ignore_eos, seed=params.seed, logprobs=params.logprobs,
    )
