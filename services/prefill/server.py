"""The prefill front's gRPC service: each Run becomes a command to the engine it names and is answered with the engine's event.

How a request ends is said in `PrefillReply.outcome`; a gRPC status is for calls that no router of this version makes.
Cancelling the call (or its deadline passing) cancels the request; after the reply only the reader releases its pages.
"""
import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from proto.baton.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from services.kv.messages import RequestKey
from services.prefill import messages
from services.prefill.messages import Cancel, Event, LeaseOver, RequestEvent, RunDone, RunFailed
from services.prefill.wire import check_form, refused, to_reply, to_run
from services.runtime.errors import EngineError, HandoffError, InvalidRequest
from services.runtime.front import run_front
from services.runtime.serve import Server, abort
from services.runtime.supervisor import RankProcess

SERVICE = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillReply]


@dataclass(frozen=True, eq=False)
class _Running:
    """A call that its engine has not answered yet."""

    instance_id: str
    outcome: "asyncio.Future[prefill_pb2.PrefillReply]"


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """See runtime.front.PoolService; everything here runs in the event loop."""

    def __init__(self) -> None:
        self._ranks: Sequence[RankProcess] = ()
        self._running: dict[RequestKey, _Running] = {}  # until the engine's event, even when the caller has left
        self._leased: dict[RequestKey, str] = {}  # key -> instance id, until LeaseOver
        self._draining = False

    # ---- PoolService

    def register(self, server: Server) -> None:
        """See PoolService."""
        server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, self)

    def attach(self, ranks: Sequence[RankProcess]) -> None:
        """See PoolService."""
        self._ranks = ranks

    def on_event(self, rank: RankProcess, event: RequestEvent) -> None:
        """See PoolService."""
        if isinstance(event, LeaseOver):
            self._leased.pop(event.key, None)
            return
        running = self._running.pop(event.key, None)
        if running is None:
            return  # its engine was replaced meanwhile
        if isinstance(event, RunDone) and event.leased:
            self._leased[event.key] = running.instance_id
        if not running.outcome.done():
            running.outcome.set_result(_reply(event))

    def on_down(self, rank: RankProcess, instance_id: str) -> None:
        """See PoolService."""
        self._leased = {key: holder for key, holder in self._leased.items() if holder != instance_id}
        for key in [key for key, running in self._running.items() if running.instance_id == instance_id]:
            outcome = self._running.pop(key).outcome
            if not outcome.done():
                outcome.set_result(refused(common_pb2.ENGINE_DIED, f"prefill engine {instance_id} died with the request"))

    def drain(self) -> None:
        """See PoolService."""
        self._draining = True

    def num_active(self) -> int:
        """Requests that are computed, and those whose pages a reader may still want."""
        return len(self._running) + len(self._leased)

    # ---- gRPC

    async def Run(self, request: prefill_pb2.PrefillRequest, context: Context) -> prefill_pb2.PrefillReply:
        """Compute a prompt; see prefill.proto."""
        try:
            check_form(request)
            rank, run = self._place(request)
            running = self._start(rank, run)
        except InvalidRequest as error:
            await abort(context, error)
            raise
        except HandoffError as error:
            return refused(error.reason, str(error))
        return await self._outcome(rank, run, running, request.deadline_us)

    async def Redirect(self, request: prefill_pb2.RedirectRequest, context: Context) -> prefill_pb2.RedirectReply:
        """Refused until leases can change their reader."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this version hands a lease to no other reader; replay the request instead")
        raise AssertionError("abort() does not return")

    def _place(self, request: prefill_pb2.PrefillRequest) -> tuple[RankProcess, messages.Run]:
        """The rank meant and the command for it; HandoffError with the reason why not."""
        if self._draining:
            raise HandoffError(common_pb2.DRAINING, "this prefill front takes no new work")
        for rank in self._ranks:
            if rank.up is not None and rank.up.instance_id == request.instance_id:
                return rank, to_run(request, rank.up)
        ups = ", ".join(rank.up.instance_id for rank in self._ranks if rank.up is not None) or "none"
        raise HandoffError(common_pb2.STALE_INSTANCE, f"instance {request.instance_id or '(empty)'} is not up here; up are: {ups}")

    def _start(self, rank: RankProcess, run: messages.Run) -> _Running:
        if run.key in self._running or run.key in self._leased:
            raise HandoffError(
                common_pb2.STALE_ATTEMPT, f"attempt {run.key.attempt} of request {run.key.request_id} is here already; raise the attempt"
            )
        assert rank.up is not None, "_place chose a rank that is up"
        running = _Running(rank.up.instance_id, asyncio.get_running_loop().create_future())
        try:
            rank.send(run)
        except EngineError as error:
            raise HandoffError(common_pb2.ENGINE_DIED, str(error)) from None
        self._running[run.key] = running
        return running

    async def _outcome(self, rank: RankProcess, run: messages.Run, running: _Running, deadline_us: int) -> prefill_pb2.PrefillReply:
        try:
            async with asyncio.timeout(deadline_us / 1e6 if deadline_us else None):
                return await running.outcome
        except TimeoutError:
            message = f"the deadline of {deadline_us} us passed before the first token"
            self._cancel(rank, run.key, running, common_pb2.DEADLINE, message)
            return refused(common_pb2.DEADLINE, message)
        except asyncio.CancelledError:
            self._cancel(rank, run.key, running, common_pb2.CANCELLED, "the router cancelled the call")
            raise

    def _cancel(self, rank: RankProcess, key: RequestKey, running: _Running, reason: int, message: str) -> None:
        """Tell the engine, unless it is gone or another incarnation has taken its place."""
        if rank.up is not None and rank.up.instance_id == running.instance_id:
            with contextlib.suppress(EngineError):  # it reads no more commands: its supervisor is about to end it
                rank.send(Cancel(key, reason, message))


def _reply(event: RunDone | RunFailed) -> prefill_pb2.PrefillReply:
    """The engine's answer; one that no reply can hold fails its own request and nothing else. Its lease ends with the reader's claim."""
    try:
        return to_reply(event)
    except Exception as error:
        logger.exception("an engine's answer to %s is no reply", event.key, extra={"request_id": event.key.request_id})
        return refused(common_pb2.INTERNAL, f"the engine's {type(event).__name__} cannot be sent: {error}")


def main() -> None:
    """Run the front until a signal, then drain."""
    run_front("prefill", service=SERVICE, event_type=Event, pool=lambda _: PrefillService())
