"""The router's one stream to a decode rank: it carries everything about all requests there, in both directions.

1 a rank joins: the session is dialled;  2 `opened`: the rank may be chosen;  3 submit and cancel go out in order, replies are given to the
requests by handle;  4 the stream breaks: every request of it is told SESSION_LOST and a new session is dialled, until close().
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc.aio

from proto.baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from services.router.mailbox import Mailbox, RankFailed, StepSlice
from services.runtime.serve import WIRE_VERSION, cancel

logger = logging.getLogger(__name__)

_REDIAL_S = 0.2
_END: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue] (missing from the stubs)


class _Broken(Exception):
    """The peer does not keep to the protocol; the session starts anew."""


class Session:
    """Stays connected to one decode rank until closed. All methods belong to the event loop's thread."""

    def __init__(self, channel: grpc.aio.Channel, router_id: str, rank: common_pb2.Rank, on_change: Callable[[], None]) -> None:
        """`on_change` is called whenever `is_open` changes."""
        self._stub = decode_pb2_grpc.DecodeStub(channel)
        self._router_id = router_id
        self._rank = rank
        self._on_change = on_change
        self._requests: dict[int, tuple[Mailbox, int]] = {}  # handle -> where replies go, attempt
        self._outbox: deque[decode_pb2.SessionRequest] = deque()
        self._outbox_filled = asyncio.Event()
        self._next_handle = 1  # never reused, not even by the next session
        self._next_sequence = 1
        self._task = asyncio.create_task(self._stay_connected())
        self.is_open = False
        self.num_ignored = 0  # replies to handles that are no more

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def submit(self, submit: decode_pb2.Submit, mailbox: Mailbox) -> int:
        """Book `submit` (its handle is filled in here) and send what becomes of it to `mailbox`. Returns the handle."""
        handle = self._next_handle
        self._next_handle += 1
        submit.handle = handle
        self._requests[handle] = (mailbox, submit.key.attempt)
        if self.is_open:
            self._send(decode_pb2.SessionRequest(submit=submit))
        else:
            self._lose(handle, "the session is not open")
        return handle

    def cancel(self, handle: int, reason: common_pb2.Reason) -> None:
        """Want nothing more of this request; without effect once it has ended."""
        if self._requests.pop(handle, None) is not None and self.is_open:
            self._send(decode_pb2.SessionRequest(cancel=decode_pb2.Cancel(handle=handle, reason=reason)))

    async def close(self) -> None:
        """The rank is gone: tell every request and stop."""
        await cancel(self._task)

    def _send(self, request: decode_pb2.SessionRequest) -> None:
        self._outbox.append(request)
        self._outbox_filled.set()

    async def _stay_connected(self) -> None:
        while True:
            message = "the rank left the pool"
            try:
                message = await self._connect()
            finally:
                self._broke(message)
            await asyncio.sleep(_REDIAL_S)

    async def _connect(self) -> str:
        """One session, until it breaks. Returns why."""
        call: Any = self._stub.Session()
        writer: asyncio.Task[None] | None = None
        try:
            await call.write(decode_pb2.SessionRequest(open=decode_pb2.SessionOpen(
                router_id=self._router_id, instance_id=self._rank.instance_id, wire_version=WIRE_VERSION,
            )))
            self._next_sequence = 1
            writer = asyncio.create_task(self._write(call))
            while (reply := await call.read()) is not _END:
                self._receive(reply)
            return "the decode rank ended the session"
        except grpc.aio.AioRpcError as error:
            return error.details() or error.code().name
        except (_Broken, asyncio.InvalidStateError) as error:
            return str(error)
        finally:
            call.cancel()
            if writer is not None:
                await cancel(writer)

    async def _write(self, call: Any) -> None:
        while True:
            await self._outbox_filled.wait()
            while self._outbox:
                await call.write(self._outbox.popleft())
            self._outbox_filled.clear()

    def _receive(self, reply: decode_pb2.SessionReply) -> None:
        if reply.sequence != self._next_sequence:
            raise _Broken(f"session message {self._next_sequence} is missing: {reply.sequence} came")
        self._next_sequence += 1
        kind = reply.WhichOneof("message")
        if kind == "step":
            self._spread(reply.step)
        elif kind == "opened":
            self.is_open = True
            self._on_change()
        elif kind in ("claimed", "ready", "finished", "failed"):
            self._deliver(getattr(reply, kind), is_last=kind in ("finished", "failed"))
        # draining reaches the router through the registry as well; granted and paused belong to moves, which nobody starts yet

    def _deliver(self, event: Any, is_last: bool) -> None:
        entry = self._requests.pop(event.handle, None) if is_last else self._requests.get(event.handle)
        if entry is None:
            self.num_ignored += 1
        else:
            entry[0].put(event)

    def _spread(self, step: decode_pb2.StepTokens) -> None:
        """Give each request its columns. The columns become lists once for all of them."""
        ids, logprobs, tops = list(step.token_ids), list(step.logprobs), list(step.top_logprobs)
        drafts = step.num_accepted_drafts or [0] * len(step.handles)
        columns = (step.attempts, step.first_index, step.num_tokens, drafts)
        if {len(column) for column in columns} != {len(step.handles)} or sum(step.num_tokens) != len(ids):
            raise _Broken(f"a step's columns differ in length: {len(step.handles)} handles, {len(ids)} tokens")
        if any(column and len(column) != len(ids) for column in (logprobs, tops)):
            raise _Broken(f"a step has {len(ids)} tokens but {len(logprobs)} logprobs and {len(tops)} top_logprobs")
        start = 0
        for handle, attempt, first_index, num_tokens, num_drafts in zip(step.handles, *columns, strict=True):
            end = start + num_tokens
            entry = self._requests.get(handle)
            if entry is None:
                self.num_ignored += 1
            else:
                entry[0].put(StepSlice(attempt, first_index, ids[start:end], logprobs[start:end], tops[start:end], num_drafts))
            start = end

    def _broke(self, message: str) -> None:
        was_open, self.is_open = self.is_open, False
        self._outbox.clear()
        level = logging.WARNING if self._requests else logging.INFO
        logger.log(level, "session to decode rank %s ended with %d requests: %s", self._rank.instance_id, len(self._requests), message)
        for handle in list(self._requests):
            self._lose(handle, message)
        if was_open:
            self._on_change()

    def _lose(self, handle: int, message: str) -> None:
        mailbox, attempt = self._requests.pop(handle)
        mailbox.put(RankFailed(attempt, "decode", common_pb2.SESSION_LOST, message))
