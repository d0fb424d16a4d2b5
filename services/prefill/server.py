"""The prefill front's gRPC service: each call becomes a command to the engine it names and is answered with the engine's event.

How a request ends is said in the reply's `outcome`; a gRPC status is for calls that no router of this version makes.
Cancelling the call (or its deadline passing) cancels the request; after the reply only the reader releases its pages.
"""
import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import grpc
import grpc.aio

from proto.baton.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from services.kv.messages import RequestKey
from services.prefill import messages
from services.prefill.messages import Cancel, Event, LeaseOver, RedirectDone, RequestEvent, RunDone, RunFailed
from services.prefill.wire import check_form, check_redirect_form, outcome, refused, to_redirect, to_reply, to_run
from services.runtime.errors import EngineError, HandoffError, InvalidRequest
from services.runtime.front import run_front
from services.runtime.ipc import Up
from services.runtime.serve import Server, abort
from services.runtime.supervisor import RankProcess
from services.runtime.telemetry import count_incident

SERVICE = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillReply]
RedirectContext = grpc.aio.ServicerContext[prefill_pb2.RedirectRequest, prefill_pb2.RedirectReply]
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, eq=False)
class _Pending(Generic[_Answer]):
    """A call that its engine has not answered yet. By its rank, not its instance id: a renewed agent changes that and keeps the process."""

    rank: RankProcess
    outcome: "asyncio.Future[_Answer]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def answer(self, answer: _Answer) -> bool:
        """Whether the caller is still there to hear it."""
        is_heard = not self.outcome.done()
        if is_heard:
            self.outcome.set_result(answer)
        return is_heard


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """See runtime.front.PoolService; everything here runs in the event loop."""

    def __init__(self) -> None:
        self._ranks: Sequence[RankProcess] = ()
        self._running: dict[RequestKey, _Pending[prefill_pb2.PrefillReply]] = {}  # until the engine's event, even when the caller has left
        self._redirecting: dict[RequestKey, _Pending[prefill_pb2.RequestOutcome]] = {}  # the same
        self._leased: dict[RequestKey, RankProcess] = {}  # one a choice, until LeaseOver
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
        elif isinstance(event, RedirectDone):
            self._redirected(event)
        else:
            self._ran(event)

    def _ran(self, event: RunDone | RunFailed) -> None:
        running = self._running.pop(event.key, None)
        if running is None:  # its engine was replaced meanwhile
            count_incident("event of a request that is over")
            return
        leased = [choice.key for choice in event.choices if choice.leased] if isinstance(event, RunDone) else []
        self._leased |= dict.fromkeys(leased, running.rank)
        if running.answer(_reply(event)):
            return
        for key in leased:  # the caller has left, and nobody else knows of them
            self._cancel(running.rank, key, common_pb2.CANCELLED, "the router left before the first token")

    def _redirected(self, event: RedirectDone) -> None:
        if event.former in self._leased:
            self._leased[event.key] = self._leased.pop(event.former)
        redirecting = self._redirecting.pop(event.key, None)
        if redirecting is None:
            count_incident("event of a request that is over")
            return
        if redirecting.answer(outcome(event.reason, event.message)):
            return
        if event.former is not None and not self._has_newer(event.key):  # the caller has left, and nobody may know of the reader
            self._cancel(redirecting.rank, event.key, common_pb2.CANCELLED, "the router cancelled the redirect")

    def _has_newer(self, key: RequestKey) -> bool:
        """Whether the hand-off is on its way to a further reader."""
        return any(
            (other.request_id, other.choice) == (key.request_id, key.choice) and other.attempt > key.attempt for other in self._redirecting
        )

    def on_down(self, rank: RankProcess, instance_id: str) -> None:
        """See PoolService."""
        died = f"prefill engine {instance_id} died with the request"
        self._leased = {key: holder for key, holder in self._leased.items() if holder is not rank}
        for key in [key for key, running in self._running.items() if running.rank is rank]:
            self._running.pop(key).answer(refused(common_pb2.ENGINE_DIED, died))
        for key in [key for key, redirecting in self._redirecting.items() if redirecting.rank is rank]:
            self._redirecting.pop(key).answer(outcome(common_pb2.ENGINE_DIED, died))

    def on_renewed(self, rank: RankProcess, former_instance_id: str) -> None:
        """See PoolService: nothing here is kept by instance id; the engine itself answers what was void."""

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
            if self._draining:
                raise HandoffError(common_pb2.DRAINING, "this prefill front takes no new work")
            rank, up = self._place(request.instance_id)
            run = to_run(request, up)
            running = self._start(rank, run)
        except InvalidRequest as error:
            await abort(context, error)
            raise
        except HandoffError as error:
            return refused(error.reason, str(error))
        return await self._outcome(run, running, request.deadline_us)

    async def Redirect(self, request: prefill_pb2.RedirectRequest, context: RedirectContext) -> prefill_pb2.RedirectReply:
        """Let another rank pull a hand-off; see prefill.proto. A front that drains still does: it holds the pages until they are read."""
        try:
            check_redirect_form(request)
            rank, up = self._place(request.instance_id)
            command = to_redirect(request, up)
            if command.key in self._redirecting:
                message = f"attempt {command.key.attempt} of request {command.key.request_id} is being redirected already"
                raise HandoffError(common_pb2.STALE_ATTEMPT, message)
            self._send(rank, command)
        except InvalidRequest as error:
            await abort(context, error)
            raise
        except HandoffError as error:
            return prefill_pb2.RedirectReply(outcome=outcome(error.reason, str(error)))
        redirecting = self._redirecting[command.key] = _Pending(rank)
        return prefill_pb2.RedirectReply(outcome=await redirecting.outcome)

    def _place(self, instance_id: str) -> tuple[RankProcess, Up]:
        """The rank meant; HandoffError when it is not here."""
        for rank in self._ranks:
            if rank.up is not None and rank.up.instance_id == instance_id:
                return rank, rank.up
            if rank.up is not None and instance_id and rank.up.former_instance_id == instance_id:
                message = f"instance {instance_id} has renewed its transfer agent and is {rank.up.instance_id} now"
                raise HandoffError(common_pb2.FENCED, message)
        ups = ", ".join(rank.up.instance_id for rank in self._ranks if rank.up is not None) or "none"
        raise HandoffError(common_pb2.STALE_INSTANCE, f"instance {instance_id or '(empty)'} is not up here; up are: {ups}")

    def _start(self, rank: RankProcess, run: messages.Run) -> _Pending[prefill_pb2.PrefillReply]:
        if run.key in self._running or not self._leased.keys().isdisjoint(run.keys):
            raise HandoffError(
                common_pb2.STALE_ATTEMPT, f"attempt {run.key.attempt} of request {run.key.request_id} is here already; raise the attempt"
            )
        self._send(rank, run)
        running = self._running[run.key] = _Pending(rank)
        return running

    async def _outcome(
        self, run: messages.Run, running: _Pending[prefill_pb2.PrefillReply], deadline_us: int
    ) -> prefill_pb2.PrefillReply:
        try:
            async with asyncio.timeout(deadline_us / 1e6 if deadline_us else None):
                return await running.outcome
        except TimeoutError:
            message = f"the deadline of {deadline_us} us passed before the first token"
            self._cancel(running.rank, run.key, common_pb2.DEADLINE, message)
            return refused(common_pb2.DEADLINE, message)
        except asyncio.CancelledError:
            self._cancel(running.rank, run.key, common_pb2.CANCELLED, "the router cancelled the call")
            raise

    @staticmethod
    def _send(rank: RankProcess, command: messages.Run | messages.Redirect) -> None:
        try:
            rank.send(command)
        except EngineError as error:
            raise HandoffError(common_pb2.ENGINE_DIED, str(error)) from None

    @staticmethod
    def _cancel(rank: RankProcess, key: RequestKey, reason: int, message: str) -> None:
        """Tell the engine, unless it is gone; one that has come in its place knows no such key."""
        if rank.up is not None:
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
