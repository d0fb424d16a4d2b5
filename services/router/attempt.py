"""One attempt: a prefill rank and a decode rank try to finish one request. dispatch.py decides what follows a failure."""

import asyncio
import time
from typing import Any

import grpc
import grpc.aio

from proto.baton.v1 import common_pb2, decode_pb2, prefill_pb2
from services.router.mailbox import Event, Mailbox, PrefillDone, RankFailed, StepSlice
from services.router.output import Ending, Gap, Output
from services.router.pairing import Pair
from services.router.prefix_index import PrefixIndex
from services.router.timeline import TimelineRecord
from services.router.validate import Request

_REASONS: dict[grpc.StatusCode, common_pb2.Reason] = {
    grpc.StatusCode.UNAVAILABLE: common_pb2.PEER_GONE,
    grpc.StatusCode.DEADLINE_EXCEEDED: common_pb2.DEADLINE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: common_pb2.OVERLOADED,
    grpc.StatusCode.INVALID_ARGUMENT: common_pb2.INVALID,
    grpc.StatusCode.FAILED_PRECONDITION: common_pb2.STALE_INSTANCE,
}


class Failure(Exception):
    """The attempt is over without the request's end; `role` = "prefill" or "decode", the side that failed.

    `is_told`: that side says so itself; otherwise the router could not reach it.
    """

    def __init__(self, role: str, reason: common_pb2.Reason, message: str, *, is_told: bool = True) -> None:
        name = common_pb2.Reason.Name(reason) if reason in common_pb2.Reason.values() else f"reason {reason}"  # a newer peer's
        super().__init__(f"{role}: {name}: {message}")
        self.role = role
        self.reason = reason
        self.is_told = is_told


class Attempt:
    """Owns the call to prefill and the handle in decode's session; close() frees both, whatever happened."""

    def __init__(self, *, request: Request, sampling: common_pb2.Sampling, pair: Pair, number: int, output: Output, mailbox: Mailbox,
                 index: PrefixIndex, record: TimelineRecord) -> None:
        self._request, self._sampling, self._pair, self._number = request, sampling, pair, number
        self._output, self._mailbox, self._index, self._record = output, mailbox, index, record
        self._num_replayed = output.num_tokens
        self._num_decode_tokens = len(request.prompt_ids) + output.num_tokens
        self._handle: int | None = None  # while decode has it
        self._prefill: asyncio.Task[None] | None = None  # while Run has not returned
        self._finished: decode_pb2.RequestFinished | None = None
        self._is_ready = False

    def start(self, num_preemptions: int, deadline_us: int) -> None:
        """Call prefill and submit the claim. Neither waits for the other."""
        pair, request = self._pair, self._request
        prompt = common_pb2.Prompt(
            token_ids=[*request.prompt_ids, *self._output.token_ids], num_output_tokens=self._num_replayed, salt=request.salt
        )
        run = prefill_pb2.PrefillRequest(
            request_id=request.request_id, attempt=self._number, instance_id=pair.prefill.instance_id, prompt=prompt,
            sampling=self._sampling, n=1, fingerprint=pair.prefill.fingerprint, deadline_us=deadline_us,
        )
        if pair.decode is not None:
            run.readers.append(pair.decode.rank)
        assert pair.prefill.prefill is not None
        call: Any = pair.prefill.prefill.Run(run)  # goes out first: the first token waits for it, and not for the claim
        if pair.decode is not None:
            assert pair.decode.session is not None
            key = common_pb2.RequestKey(request_id=request.request_id, choice=0, attempt=self._number)
            pair.decode.begin(self._num_decode_tokens)
            self._handle = pair.decode.session.submit(decode_pb2.Submit(
                key=key, prompt=prompt, sampling=self._sampling, holder=pair.prefill.rank, num_preemptions=num_preemptions,
                deadline_us=deadline_us, fingerprint=pair.prefill.fingerprint,
            ), self._mailbox)
        pair.prefill.begin(pair.num_uncached_tokens)
        for state in (pair.prefill, pair.decode):
            if state is not None:
                self._index.expect(state.instance_id, request.digests, time.monotonic())
        self._record.called(pair)
        self._prefill = asyncio.create_task(self._await_prefill(call))

    async def _await_prefill(self, call: Any) -> None:
        """Puts what becomes of Run into the mailbox. Cancelling this task cancels the call, and so the request at prefill."""
        try:
            event: Event = PrefillDone(self._number, await call)
        except grpc.aio.AioRpcError as error:
            reason = _REASONS.get(error.code(), common_pb2.INTERNAL)
            event = RankFailed(self._number, "prefill", reason, error.details() or error.code().name)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            event = RankFailed(self._number, "prefill", common_pb2.PEER_GONE, "the rank left the pool")  # its channel was closed
        self._mailbox.put(event)

    @property
    def is_settled(self) -> bool:
        """Whether both sides are done with it; only asked after the output's end."""
        return self._handle is None and self._prefill is None

    def on(self, event: Event) -> None:
        """Take one event of this attempt; those of an older one are ignored. Raises Failure."""
        if getattr(event, "attempt", self._number) != self._number:
            return
        try:
            if isinstance(event, StepSlice):
                self._record.drafts(event.num_accepted_drafts)
                self._output.accept(event.first_index, event.token_ids, event.logprobs, event.top_logprobs)
            elif isinstance(event, decode_pb2.Ready):
                self._on_ready(event)
            elif isinstance(event, PrefillDone):
                self._on_prefill(event.reply)
            elif isinstance(event, RankFailed | decode_pb2.RequestFailed):
                self._on_failed(event)
            elif isinstance(event, decode_pb2.RequestFinished):
                self._drop_handle()
                self._finished = event
        except Gap as gap:
            raise Failure("decode", common_pb2.INTERNAL, str(gap)) from None
        self._after()

    def _on_ready(self, ready: decode_pb2.Ready) -> None:
        self._is_ready = True
        self._record.ready(ready)
        self._pair.prefill.cool_down.succeeded()
        if self._pair.decode is not None:
            self._pair.decode.cool_down.succeeded()
            self._index.keep(self._pair.decode.instance_id, self._request.digests)
        self._output.accept_one(ready.position, ready.first_token)

    def _on_prefill(self, reply: prefill_pb2.PrefillReply) -> None:
        self._drop_prefill()
        if not reply.outcome.ok:
            self._fail("prefill", reply.outcome.reason or common_pb2.INTERNAL, reply.outcome.message)
            return
        if len(reply.first_tokens) != 1:
            raise Failure("prefill", common_pb2.INTERNAL, f"its reply has {len(reply.first_tokens)} first tokens, not 1")
        self._record.prefilled(reply, is_replay=self._num_replayed > 0)
        self._index.keep(self._pair.prefill.instance_id, self._request.digests)
        first = reply.first_tokens[0]
        self._output.accept_one(self._num_replayed, first.token)
        if first.finish_reason:
            self._pair.prefill.cool_down.succeeded()  # else `ready` says whether its pages can be had
            self._output.end(Ending(first.finish_reason, first.token.id if first.finish_reason == common_pb2.STOP else None))
        elif self._pair.decode is None and self._output.ending is None:
            raise Failure("prefill", common_pb2.INTERNAL, "its token was to be the last one but is not")

    def _on_failed(self, event: RankFailed | decode_pb2.RequestFailed) -> None:
        role = event.role if isinstance(event, RankFailed) else "decode"
        if role == "prefill":
            self._drop_prefill()
        else:
            self._drop_handle()
        self._fail(role, event.reason or common_pb2.INTERNAL, event.message, is_told=not isinstance(event, RankFailed))

    def _fail(self, role: str, reason: common_pb2.Reason, message: str, *, is_told: bool = True) -> None:
        """A side failed: no failure of the attempt when the request has all that it needed of it."""
        if self._output.ending is None and not (role == "prefill" and self._is_ready):
            raise Failure(role, reason, message, is_told=is_told)

    def _after(self) -> None:
        """What follows from the state rather than from one event."""
        finished, output = self._finished, self._output
        if output.ending is None and finished is not None and (self._prefill is None or finished.num_output_tokens == output.num_tokens):
            if finished.num_output_tokens != output.num_tokens:
                numbers = f"it ended after {finished.num_output_tokens} tokens but {output.num_tokens} came"
                raise Failure("decode", common_pb2.INTERNAL, numbers)
            output.end(Ending(finished.reason, finished.stop_token_id if finished.reason == common_pb2.STOP else None))
        ending = output.ending
        if ending is not None and (ending.stop_string or output.num_tokens <= self._num_replayed + 1):
            self._cancel_decode(common_pb2.CANCELLED)  # decode does not know by itself, or is not needed at all

    def _cancel_decode(self, reason: common_pb2.Reason) -> None:
        if self._handle is not None and self._pair.decode is not None and self._pair.decode.session is not None:
            self._pair.decode.session.cancel(self._handle, reason)
            self._drop_handle()

    def _drop_handle(self) -> None:
        if self._handle is not None and self._pair.decode is not None:
            self._handle = None
            self._pair.decode.end(self._num_decode_tokens)

    def _drop_prefill(self) -> None:
        if self._prefill is not None:
            self._prefill = None
            self._pair.prefill.end(self._pair.num_uncached_tokens)

    def close(self, reason: common_pb2.Reason) -> None:
        """Want nothing more of either side. May be called again."""
        self._cancel_decode(reason)
        if self._prefill is not None:
            self._prefill.cancel()
            self._drop_prefill()
