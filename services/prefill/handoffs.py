"""The holder's side of an engine: its readers as peers, and the thread that hears from them while forwards run.

    handoffs = Handoffs(kv); handoffs.start()
    handoffs.add_readers(run.readers)                 HandoffError when one may not be paired
    handoffs.redirect(command)                        what to answer
    with kv.lock:
        handoffs.queue / open / announce / hand_over / abort    a request's choices; see services/kv/lease.py
    ended = handoffs.take_ended()                     for the main loop; raises when the thread has failed
    handoffs.stop()

A lease that a reader is done with frees its pages right in this thread: nobody waits for a forward. Once the rank has renewed its transfer
agent `kv.leases` is another table, which knows no lease from before: so it is looked up at each use, and what it does not know has ended.
"""
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from proto.baton.v1 import common_pb2
from services.kv.lease import LeaseEnded, LeaseState
from services.kv.messages import PeerRank, RequestKey
from services.kv.peers import Peers
from services.kv.rank_kv import RankKv
from services.prefill.first_token import FirstToken, handoff_state
from services.prefill.messages import Redirect, RedirectDone, RunDone
from services.prefill.request import Choice, Request
from services.runtime.engine import StepClock
from services.runtime.errors import EngineError, HandoffError
from services.runtime.telemetry import count_incident

logger = logging.getLogger(__name__)


class Handoffs:
    """Peers, leases' events and thread of one rank."""

    def __init__(self, kv: RankKv, step_clock: StepClock) -> None:
        self.on_renewed: Callable[[str], None] = lambda former: None  # set before start(); runs when the transfer agent was renewed
        self.on_turn: Callable[[], None] = lambda: None  # set before start(); what else this thread does at each turn
        self._kv, self._step_clock = kv, step_clock
        self._peers = Peers(lambda: kv.transport)
        self._ended: deque[LeaseEnded] = deque()  # bounded: a lease ends once, and only the main loop, which takes these, begins any
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._drive, name="handoff", daemon=True)

    def add_readers(self, readers: Sequence[PeerRank]) -> None:
        """Make the readers peers, now rather than at their first announcement."""
        for reader in readers:
            self._peers.meet(reader)

    def redirect(self, command: Redirect) -> RedirectDone:
        """Give a hand-off another reader and a higher attempt, or tell that reader why not. Takes the lock itself."""
        try:
            self.add_readers([command.reader])
            with self._kv.lock:
                self.check_instance(command.instance_id)
                return RedirectDone(command.key, self._redirect(command.key, command.reader), 0, "")
        except HandoffError as error:
            count_incident("redirect refused", error.reason)
            with self._kv.lock:
                self.refuse([Choice(command.key, command.reader)], error.reason, str(error))
            return RedirectDone(command.key, None, error.reason, str(error))

    def _redirect(self, key: RequestKey, reader: PeerRank) -> RequestKey:
        """The key that the hand-off had."""
        former = self._kv.leases.newest(key.request_id, key.choice)
        if former is None:
            message = f"choice {key.choice} of request {key.request_id} is not here (any more); replay it"
            raise HandoffError(common_pb2.UNKNOWN_REQUEST, message)
        if former.attempt >= key.attempt:
            message = f"attempt {key.attempt} of request {key.request_id} is not above {former.attempt}, which is here; raise the attempt"
            raise HandoffError(common_pb2.STALE_ATTEMPT, message)
        self._kv.leases.redirect(former, key, [reader.instance_id])
        return former

    # ---- under the lock

    def check_instance(self, instance_id: str) -> None:
        """Refuse what was meant for the agent before the present one: its peers and claims are void."""
        if instance_id != self._kv.instance_id:
            message = f"instance {instance_id} has renewed its transfer agent and is {self._kv.instance_id} now; try again"
            raise HandoffError(common_pb2.FENCED, message)

    def knows(self, key: RequestKey) -> bool:
        """Whether the hand-off is queued or leased here."""
        return self._kv.leases.state(key) is not None

    def queue(self, choices: Sequence[Choice]) -> None:
        """-> QUEUED."""
        for choice in choices:
            self._kv.leases.queue(choice.key, [choice.reader.instance_id])

    def open(self, choices: Sequence[Choice]) -> None:
        """QUEUED -> COMPUTING; a hand-off that has ended meanwhile stays ended."""
        for choice in choices:
            if self._kv.leases.state(choice.key) is LeaseState.QUEUED:
                self._kv.leases.open(choice.key, [choice.reader.instance_id])

    def announce(self, choices: Sequence[Choice], pages: Sequence[tuple[int, int]]) -> None:
        """Final pages that the choices share; none is no news."""
        for choice in choices if pages else ():
            self._kv.leases.announce(choice.key, pages)

    def abort(self, choices: Sequence[Choice], reason: int, message: str) -> None:
        """End hand-offs in whatever state they are."""
        for choice in choices:
            self._kv.leases.abort(choice.key, reason, message)

    def refuse(self, choices: Sequence[Choice], reason: int, message: str) -> None:
        """Tell the readers of what was never queued; what another request has under the same key goes on."""
        for choice in choices:
            if self._kv.transport.has_peer(choice.reader.instance_id) and not self.knows(choice.key):
                self._kv.leases.refuse(choice.key, [choice.reader.instance_id], reason, message)

    def are_over(self, choices: Sequence[Choice]) -> bool:
        """Whether each of these hand-offs, and there are some, has ended."""
        return bool(choices) and not any(self.knows(choice.key) for choice in choices)

    def hand_over(self, request: Request, done: RunDone, tokens: Sequence[FirstToken]) -> set[RequestKey]:
        """COMPUTING -> LEASED with the last announcement of each choice that goes on, and returns their keys; the others are finished."""
        *shared, (index, _) = request.new_pages(len(request.prompt.pages))
        for choice, page, token in zip(done.choices, request.last_pages, tokens, strict=True):
            if choice.leased:
                state = handoff_state(
                    request.run, token, num_cached_tokens=done.num_cached_tokens, queue_us=done.queue_us, compute_us=done.compute_us
                )
                self._kv.leases.announce(choice.key, [*shared, (index, page)], state)
            else:
                self._kv.leases.finish(choice.key)
        return {choice.key for choice in done.choices if choice.leased}

    # ---- its thread

    def tick(self) -> None:
        """One turn of the thread: hear readers, expire leases, renew the agent when late reads have to be fenced."""
        self._step_clock.turn(self._kv.renewal_s if self._kv.fence_reason() else 0.0)
        for event in self._kv.exchange.tick():
            if isinstance(event, LeaseEnded):  # this rank pulls nothing, so there are no others
                self._ended.append(event)
        if former := self._kv.renew_if_due():
            self.on_renewed(former)
        self.on_turn()

    def take_ended(self) -> list[LeaseEnded]:
        """Leases that ended since the last call. Raises EngineError once the thread is dead: without it no lease ever ends."""
        if self._failure is not None:
            raise EngineError(f"the hand-off thread failed: {self._failure!r}") from self._failure
        ended: list[LeaseEnded] = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; leases stay as they are."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._step_clock.end_turns()

    def _drive(self) -> None:
        try:
            while not self._stopping.is_set():
                self.tick()
                time.sleep(self._kv.exchange.pause_s)
        except Exception as error:  # a bug of ours: the main loop ends the process over it
            logger.exception("the hand-off thread failed")
            self._failure = error
