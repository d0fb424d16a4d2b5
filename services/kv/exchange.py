"""One rank's hand-offs, both directions, driven by one thread.

    exchange = Exchange(transport, kv.pages, lock, page_bytes)      lock: the engine's kv lock (threading.Lock)
    exchange.leases (as holder), exchange.pulls (as reader)         their methods are called with the lock held
    events = exchange.tick()                                        without the lock; never blocks; [LeaseEnded | PullCaughtUp | PullEnded]
    time.sleep(exchange.pause_s)                                    two ranks that poll without pause starve NIXL's progress threads

Order for a request: both sides add_peer as soon as the router names the other (prefill before it queues the request, so that it can answer
a renewal with "not admitted yet"), decode claims, prefill opens its lease at admission.
"""
import logging
import time
from collections.abc import Callable
from threading import Lock

from services.kv.lease import LEASE_TTL_S, LeaseEnded, LeaseTable
from services.kv.messages import Announce, Done, Ended, Message, Renew, RenewAnswer, decode
from services.kv.pages import PagePool
from services.kv.puller import PullCaughtUp, PullEnded, Puller
from services.kv.transport import Transport

# A tick costs some 30 us, in which a forward of the same process waits for the interpreter at its next op.
_READING_PAUSE_S = 0.0001
_CLAIMED_PAUSE_S = 0.0005
_SERVING_PAUSE_S = 0.001  # over TCP a peer's reads move only when this side polls
_IDLE_PAUSE_S = 0.005

_log = logging.getLogger(__name__)


class Exchange:
    """Routes messages to leases and pulls, and moves reads on."""

    def __init__(
        self,
        transport: Transport,
        pool: PagePool,
        lock: Lock,
        page_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        ttl_s: float = LEASE_TTL_S,
    ) -> None:
        self.transport = transport
        self.leases = LeaseTable(transport.instance_id, pool, transport.notify, clock, ttl_s)
        self.pulls = Puller(pool, transport, page_bytes, clock, ttl_s)
        self.num_ignored = 0  # notifications that are no message of this version
        self._lock = lock

    @property
    def pause_s(self) -> float:
        """How long to sleep before the next tick."""
        if self.pulls.num_reads:
            return _READING_PAUSE_S
        if len(self.pulls):
            return _CLAIMED_PAUSE_S
        return _SERVING_PAUSE_S if self.leases.is_serving else _IDLE_PAUSE_S

    def tick(self) -> list[LeaseEnded | PullCaughtUp | PullEnded]:
        """Read messages, expire, renew, post, poll, verify; returns what ended."""
        messages = self.transport.notifications()
        with self._lock:
            for sender, payload in messages:
                self._route(sender, payload)
            self.leases.tick()
        # A second turn at once when reads ended: it posts the epoch read of what is complete now.
        while self._move_reads():
            pass
        with self._lock:
            return [*self.leases.take_ended(), *self.pulls.take_ended()]

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
            self.num_ignored += 1
            _log.warning("rank %s ignores a notification of %d bytes from %s: %s", self.transport.instance_id, len(payload), sender, error)
            return
        match message:
            case Renew() | Done():
                self.leases.handle(sender, message)
            case Announce() | RenewAnswer():
                self.pulls.handle(sender, message)
            case Ended():
                side = self.leases if message.holder == self.transport.instance_id else self.pulls
                side.handle(sender, message)
