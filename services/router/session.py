"""The router's session with a decode rank: it carries everything about all requests there, in both directions, stream after stream.

1 a rank joins: a stream is dialled;  2 `opened`: the rank may be chosen;  3 submit, cancel and move go out in order, replies are given to
the requests by handle;  4 the stream breaks: nothing new goes there, requests wait while it is dialled again;  5 `opened` says resumed:
both sides send again what the other has not taken, back to 3;  6 not resumed, `resume_s` over, nobody listens there any more, or the rank
has left the pool: every request is told SESSION_LOST, and a new session is dialled, until close().
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from proto.baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from services.router.columns import slices_of
from services.router.mailbox import Draining, Mailbox, RankFailed
from services.runtime.errors import BatonError, Overloaded
from services.runtime.resume import RESUME_S, ResumableStream
from services.runtime.serve import ERROR_KEY, WIRE_VERSION, cancel, is_refused
from services.runtime.telemetry import count_incident

logger = logging.getLogger(__name__)

_REDIAL_S = 0.2
_END: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue] (missing from the stubs)
# What gRPC says of a connection that broke; any other status is the front's own word.
_BROKEN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN})
_LAST = frozenset({"finished", "failed"})
_TO_REQUEST = frozenset({"claimed", "ready", "granted", "caught_up", "paused", "resumed"}) | _LAST


class _Over(Exception):
    """The session cannot go on: the peer does not keep to the protocol, or has ended it."""


@dataclass
class _Entry:
    """A request that the rank has: where its replies go, and the two incarnations that its hand-off hangs on ("" once it is over)."""

    mailbox: Mailbox
    attempt: int
    holder_role: str
    holder_id: str
    reader_id: str


class Session:
    """Stays connected to one decode rank until closed. All methods belong to the event loop's thread."""

    def __init__(self, channel: grpc.aio.Channel, router_id: str, rank: common_pb2.Rank, on_change: Callable[[], None],
                 resume_s: float = RESUME_S) -> None:
        """`on_change` is called whenever `is_usable` changes."""
        self._stub = decode_pb2_grpc.DecodeStub(channel)
        self._router_id = router_id
        self._rank = rank
        self._on_change = on_change
        self._resume_s = resume_s
        self._requests: dict[int, _Entry] = {}  # by handle
        self._next_handle = 1  # never reused, not even by the next session
        self._stream = ResumableStream(decode_pb2.SessionRequest)
        self._is_begun = False  # the front has, or had, the other end
        self._expiry: asyncio.TimerHandle | None = None  # while broken
        self._streaming: asyncio.Task[tuple[str, bool]] | None = None  # the present stream
        self.is_open = False
        self.is_draining = False
        self.num_ignored = 0  # replies to handles that are no more
        self.num_resumed = 0
        self._task = asyncio.create_task(self._stay_connected())

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def is_usable(self) -> bool:
        """Whether new requests may be submitted."""
        return self.is_open and not self.is_draining

    def submit(self, submit: decode_pb2.Submit, mailbox: Mailbox) -> int:
        """Book `submit` (its handle is filled in here) and send what becomes of it to `mailbox`. Returns the handle."""
        handle = self._next_handle
        self._next_handle += 1
        submit.handle = handle
        holder = submit.holder
        self._requests[handle] = _Entry(mailbox, submit.key.attempt, holder.role, holder.instance_id, self._rank.instance_id)
        if self.is_open:
            self._send(decode_pb2.SessionRequest(submit=submit))
        else:
            self._lose(handle, "the session is not open")
        return handle

    def cancel(self, handle: int, reason: common_pb2.Reason) -> None:
        """Want nothing more of this request; without effect once it has ended."""
        if self._requests.pop(handle, None) is not None:
            self._send(decode_pb2.SessionRequest(cancel=decode_pb2.Cancel(handle=handle, reason=reason)))

    def move(self, handle: int, step: decode_pb2.Move.Step, new_attempt: int, *, reader: common_pb2.Rank | None = None,
             fingerprint: str = "") -> None:
        """A step of the move of a request that runs there (decode.proto's Move); `reader` and its fingerprint with START.

        Without effect once the request has ended. Answers go to its mailbox: `paused`, `failed` (REPLACED) or `resumed`.
        """
        if handle in self._requests:
            self._send(decode_pb2.SessionRequest(move=decode_pb2.Move(
                handle=handle, step=step, new_attempt=new_attempt, reader=reader, fingerprint=fingerprint,
            )))

    def renew(self, rank: common_pb2.Rank) -> None:
        """The rank goes on under the new instance id of `rank`, and so does the session."""
        self._rank = rank

    def fence(self, former_id: str) -> None:
        """The agent `former_id` is no more: hand-offs that hang on it, as holder or reader, are void."""
        for entry in self._requests.values():
            if former_id in (entry.holder_id, entry.reader_id):
                role = entry.holder_role if former_id == entry.holder_id else "decode"
                entry.holder_id = entry.reader_id = ""
                message = f"instance {former_id} has renewed its transfer agent; hand-offs under the old one are void"
                entry.mailbox.put(RankFailed(entry.attempt, role, common_pb2.FENCED, message))
                count_incident("hand-off void", common_pb2.FENCED)

    async def close(self) -> None:
        """The rank is gone: tell every request and stop."""
        self._begin_anew("the rank left the pool")
        await cancel(self._task)

    def _send(self, request: decode_pb2.SessionRequest) -> None:
        """Queue `request`, also while the stream is broken: it goes out once the session is resumed."""
        try:
            self._stream.put(request)
        except Overloaded as error:
            self._begin_anew(str(error))

    # ---- streams, one after another

    async def _stay_connected(self) -> None:
        while True:
            message, may_resume = await self._stream_once()
            was_open, self.is_open = self.is_open, False
            self._broke(message, may_resume)
            if was_open:
                self._on_change()
            else:
                await asyncio.sleep(_REDIAL_S)

    async def _stream_once(self) -> tuple[str, bool]:
        """As _connect(), in a task for _begin_anew() to cancel: a call cancelled while it connects leaves its writer waiting for ever."""
        self._streaming = asyncio.create_task(self._connect())
        try:
            await asyncio.wait([self._streaming])
        finally:
            await cancel(self._streaming)
        try:
            return self._streaming.result()
        except _Over as error:
            return str(error), False
        except asyncio.CancelledError:
            return "the session began anew", False

    async def _connect(self) -> tuple[str, bool]:
        """One stream, until it breaks. Returns why, and whether the session may be resumed. Raises _Over when it cannot."""
        call: Any = self._stub.Session()
        writer: asyncio.Task[None] | None = None
        try:
            await call.write(decode_pb2.SessionRequest(open=decode_pb2.SessionOpen(
                router_id=self._router_id, instance_id=self._rank.instance_id, wire_version=WIRE_VERSION,
                next_message=self._stream.next_expected if self._is_begun else 0,
            )))
            if (first := await call.read()) is not _END:
                writer = asyncio.create_task(self._write(call, self._opened(first)))
                while (reply := await call.read()) is not _END:
                    self._receive(reply)
            raise _Over("the decode rank ended the session")
        except grpc.aio.AioRpcError as error:
            return await self._why(error)
        except asyncio.InvalidStateError as error:
            return str(error), True
        except BatonError as error:  # numbers that cannot be
            raise _Over(str(error)) from None
        finally:
            call.cancel()
            if writer is not None:
                await cancel(writer)

    async def _why(self, error: grpc.aio.AioRpcError) -> tuple[str, bool]:
        message = error.details() or error.code().name
        is_own = any(key == ERROR_KEY for key, _ in error.trailing_metadata() or ())
        if is_own or error.code() not in _BROKEN or (not self.is_open and await is_refused(self._rank.pool_address)):
            raise _Over(message)
        return message, True

    async def _write(self, call: Any, stream: int) -> None:
        async for request in self._stream.outgoing(stream):
            await call.write(request)

    def _opened(self, reply: decode_pb2.SessionReply) -> int:
        """The front's first word on a stream. Returns the stream's number; raises _Over."""
        opened = reply.opened
        if reply.WhichOneof("message") != "opened":
            raise _Over("the first reply of a stream must be `opened`")
        if opened.resumed and not (self._is_begun and self._stream.can_resume(opened.next_request)):
            raise _Over(f"the session cannot be resumed at request {opened.next_request}")
        if not opened.resumed:
            self._lose_all("the decode rank has not kept the session")
        self.num_resumed += opened.resumed
        self._stop_expiry()
        self._is_begun = self.is_open = True
        stream = self._stream.begin(opened.next_request if opened.resumed else 1)
        self._on_change()
        return stream

    def _broke(self, message: str, may_resume: bool) -> None:
        level = logging.WARNING if self._requests else logging.INFO
        logger.log(level, "stream to decode rank %s broke with %d requests: %s", self._rank.instance_id, len(self._requests), message)
        if not may_resume:
            self._lose_all(message)
        elif self._is_begun and self._expiry is None:
            self._expiry = asyncio.get_running_loop().call_later(
                self._resume_s, self._begin_anew, f"not resumed within {self._resume_s:g} s: {message}"
            )

    def _begin_anew(self, message: str) -> None:
        """Give up the session, whatever its stream does."""
        self._lose_all(message)
        self.is_open = False
        self._on_change()
        if self._streaming is not None:
            self._streaming.cancel()

    def _lose_all(self, message: str) -> None:
        """Every request is lost; the next session starts from nothing."""
        self._stop_expiry()
        self._stream.end(is_flushed=False)
        self._stream = ResumableStream(decode_pb2.SessionRequest)
        self._is_begun = self.is_draining = False
        for handle in list(self._requests):
            self._lose(handle, message)

    def _stop_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _lose(self, handle: int, message: str) -> None:
        entry = self._requests.pop(handle)
        count_incident("request lost with its session", common_pb2.SESSION_LOST)
        entry.mailbox.put(RankFailed(entry.attempt, "decode", common_pb2.SESSION_LOST, message))

    # ---- replies

    def _receive(self, reply: decode_pb2.SessionReply) -> None:
        if not self._stream.take(reply.sequence, reply.ack):
            return
        kind = reply.WhichOneof("message")
        if kind == "step":
            for handle, columns in slices_of(reply.step):
                entry = self._requests.get(handle)
                if entry is None:
                    self._ignore("step")
                else:
                    entry.mailbox.put(columns)
        elif kind == "draining":
            self._drain(reply.draining.seconds_left)
        elif kind in _TO_REQUEST:
            self._deliver(getattr(reply, kind), kind)
        else:
            raise _Over(f"a session's reply is {kind}")

    def _drain(self, seconds_left: int) -> None:
        if not self.is_draining:
            self.is_draining = True
            logger.info("decode rank %s drains for %d s with %d requests", self._rank.instance_id, seconds_left, len(self._requests))
            for entry in self._requests.values():
                entry.mailbox.put(Draining(entry.attempt))
            self._on_change()

    def _deliver(self, event: Any, kind: str) -> None:
        entry = self._requests.pop(event.handle, None) if kind in _LAST else self._requests.get(event.handle)
        if entry is None:
            self._ignore(kind)
            return
        if kind == "ready":
            entry.holder_id = entry.reader_id = ""
        entry.mailbox.put(event)

    def _ignore(self, kind: str) -> None:
        """A reply has crossed the end of its request."""
        self.num_ignored += 1
        count_incident(f"{kind} of a request that is over")
