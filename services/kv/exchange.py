"""One rank's hand-offs, both directions, driven by one thread.

    exchange = Exchange(transport, kv.pages, lock, page_bytes)      lock: the engine's kv lock (threading.Lock)
    exchange.leases (as holder), exchange.pulls (as reader)         their methods are called with the lock held
    events = exchange.tick()                                        without the lock; never blocks; [LeaseEnded | PullCaughtUp | PullEnded]
    time.sleep(exchange.pause_s)                                    two ranks that poll without pause starve NIXL's progress threads

Order for a request: both sides add_peer as soon as the router names the other (prefill before it queues the request, so that it can answer
a renewal with "not admitted yet"), decode claims, prefill opens its lease at admission.

A fence (rank_kv.py): pulls.stop() posts nothing new, void() gives everything up and tells everybody, and from then on whatever still comes
to be here; then another exchange takes its place.
"""
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock

from proto.baton.v1 import common_pb2
from services.kv.lease import LEASE_TTL_S, LeaseEnded, LeaseTable
from services.kv.messages import Announce, Done, Ended, Message, Renew, RenewAnswer, decode
from services.kv.pages import PagePool
from services.kv.puller import PullCaughtUp, PullEnded, Puller
from services.kv.transport import Transport, tell
from services.runtime.telemetry import count_incident

# A tick costs some 30 us, in which a forward of the same process waits for the interpreter at its next op.
_READING_PAUSE_S = 0.0001
_CLAIMED_PAUSE_S = 0.0005
_SERVING_PAUSE_S = 0.001  # over TCP a peer's reads move only when this side polls
_IDLE_PAUSE_S = 0.005

# The state of the longest sequence (a million tokens and a vocabulary of penalties) has some 7 MB; nothing else comes near.
MAX_NOTIFICATION_BYTES = 16 * 2**20
MAX_NOTIFICATIONS_A_TICK = 256  # a few milliseconds under the lock
MAX_INBOX = 10_000  # beyond it a notification is thrown away, as if it were lost: renewals ask for what it said

_log = logging.getLogger(__name__)
HandoffEvent = LeaseEnded | PullCaughtUp | PullEnded


class Exchange:
    """Routes messages to leases and pulls, and moves reads on. `ended` is what another exchange left untold."""

    def __init__(
        self,
        transport: Transport,
        pool: PagePool,
        lock: Lock,
        page_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        ttl_s: float = LEASE_TTL_S,
        ended: Sequence[HandoffEvent] = (),
    ) -> None:
        self.transport = transport
        self.leases = LeaseTable(transport.instance_id, pool, partial(tell, transport), clock, ttl_s)
        self.pulls = Puller(pool, transport, page_bytes, clock, ttl_s)
        self.num_ignored = 0  # notifications that are no message of this version, or that nobody had room for
        self._inbox: deque[tuple[str, bytes]] = deque()
        self._untold = list(ended)
        self._void = ""  # why everything is given up
        self._lock = lock

    @property
    def pause_s(self) -> float:
        """How long to sleep before the next tick."""
        if self._void:
            return _IDLE_PAUSE_S
        if self._inbox:
            return 0.0
        if self.pulls.num_reads:
            return _READING_PAUSE_S
        if len(self.pulls):
            return _CLAIMED_PAUSE_S
        with self._lock:  # the main loop opens leases meanwhile
            return _SERVING_PAUSE_S if self.leases.is_serving else _IDLE_PAUSE_S

    def tick(self) -> list[HandoffEvent]:
        """Read messages, expire, renew, post, poll, verify; returns what ended."""
        if self._void:  # the transport is closed
            with self._lock:
                return self.take_void()
        self._receive()
        with self._lock:
            for _ in range(min(len(self._inbox), MAX_NOTIFICATIONS_A_TICK)):
                self._route(*self._inbox.popleft())
            if self.leases.is_serving:
                self.transport.hold()
            self.leases.tick()
        # A second turn at once when reads ended: it posts the epoch read of what is complete now.
        while self._move_reads():
            pass
        with self._lock:
            return self._take_ended()

    def void(self, message: str) -> None:
        """Give every lease and pull up as FENCED, the other sides told, for good. The caller holds the lock."""
        self._void = message
        self._untold = self.take_void()

    def take_void(self) -> list[HandoffEvent]:
        """What ended in a void exchange, leases that were opened since included. The caller holds the lock."""
        self.pulls.stop(self._void)
        self.leases.abort_all(common_pb2.FENCED, self._void)
        return self._take_ended()

    def _take_ended(self) -> list[HandoffEvent]:
        ended = [*self._untold, *self.leases.take_ended(), *self.pulls.take_ended()]
        self._untold = []
        return ended

    def _receive(self) -> None:
        for sender, payload in self.transport.notifications():
            if len(payload) > MAX_NOTIFICATION_BYTES:
                self._ignore(sender, payload, f"more than {MAX_NOTIFICATION_BYTES} bytes")
            elif len(self._inbox) >= MAX_INBOX:
                self._ignore(sender, payload, f"{MAX_INBOX} others wait to be read")
            else:
                self._inbox.append((sender, payload))

    def _move_reads(self) -> bool:
        with self._lock:
            reads = self.pulls.plan()
        self.pulls.post(reads)
        self.pulls.poll()
        with self._lock:
            return self.pulls.settle()

    def _route(self, sender: str, payload: bytes) -> None:
        try:
            message: Message = decode(payload)
        except ValueError as error:
            self._ignore(sender, payload, str(error))
            return
        match message:
            case Renew() | Done():
                self.leases.handle(sender, message)
            case Announce() | RenewAnswer():
                self.pulls.handle(sender, message)
            case Ended():
                side = self.leases if message.holder == self.transport.instance_id else self.pulls
                side.handle(sender, message)

    def _ignore(self, sender: str, payload: bytes, why: str) -> None:
        self.num_ignored += 1
        count_incident("notification ignored")
        _log.warning("rank %s ignores a notification of %d bytes from %s: %s", self.transport.instance_id, len(payload), sender, why)
