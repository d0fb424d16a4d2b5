"""The holder's side of hand-offs: a promise to keep a request's pages for its readers while they renew it.

QUEUED -> COMPUTING -> LEASED -> RELEASED; from any state -> ABORTED -> FREE; a lease nobody renews -> EXPIRED -> FREE.
QUEUED holds no page and never expires: the scheduler has the request. A lease begins at admission and is LEASED from its last
announcement on. Each choice of a request has a lease of its own: pages that they share have one holder a lease.

    leases = LeaseTable(instance_id, pool, send=transport.notify, clock=time.monotonic)
    leases.queue(key, readers=[decode_instance])      known, not admitted: its readers (peers of the transport already) may refuse it
    leases.open(key, readers=[decode_instance])       at admission, queued before or not
    leases.announce(key, [(index, page), ...])        final pages, held by the caller; chunk by chunk
    leases.announce(key, pages, state)                the last ones (may be none) and where decoding goes on
    leases.finish(key)                                first token ends the request: readers are told that nothing is to be pulled
    leases.abort(key, reason, message)                readers are told why; abort_all(reason, message) for every lease there is
    leases.redirect(key, new_key, readers)            others read it from here on, from the first announcement
    leases.refuse(key, readers, reason, message)      abort for what was never queued
    leases.newest(request_id, choice)                 the key with the highest attempt of this choice that is queued or leased
    leases.handle(sender, message); leases.tick()     driven by Exchange
    leases.take_ended()                               [LeaseEnded] since the last call, whoever ended them but `redirect`: the engine drops
                                                      its own holders, or its queue entry

The table takes a LEASE holder on every announced page and drops it in every end. Guarded by the kv lock. Bounds: a lease ends once, so
what take_ended() has is bounded by the leases; of leases that ended, and of refusals of what is not here, the newest MAX_GRAVES of the
last ttl are remembered.
"""
import logging
import math
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum

import msgspec

from proto.baton.v1 import common_pb2
from services.kv.messages import (
    FINISHED,
    Announce,
    AnnouncedPage,
    Done,
    Ended,
    HandoffState,
    Message,
    Renew,
    RenewAnswer,
    RequestKey,
    encode,
)
from services.kv.pages import Holder, HolderKind, PagePool
from services.runtime.errors import EngineError
from services.runtime.telemetry import count_incident

LEASE_TTL_S = 30.0
MAX_GRAVES = 10_000
"""Ended leases whose end a late renewal still hears; the oldest give way, and their readers hear "unknown"."""

_log = logging.getLogger(__name__)


class LeaseState(StrEnum):
    """Words of DESIGN.md section 5."""

    QUEUED = "queued"
    COMPUTING = "computing"
    LEASED = "leased"
    RELEASED = "released"
    ABORTED = "aborted"
    EXPIRED = "expired"


class LeaseEnded(msgspec.Struct, frozen=True):
    """A lease is over; `reason` is FINISHED (0) when it was released."""

    key: RequestKey
    state: LeaseState
    reason: int
    message: str


class _Lease:
    __slots__ = ("announcements", "deadline", "readers", "state", "waiting")

    def __init__(self, state: LeaseState, readers: Sequence[str], deadline: float) -> None:
        self.state = state
        self.readers = tuple(readers)
        self.waiting = set(readers)  # readers that have not said Done
        self.announcements: list[tuple[tuple[AnnouncedPage, ...], HandoffState | None]] = []
        self.deadline = deadline


class LeaseTable:
    """All leases of one rank as holder."""

    def __init__(
        self, instance_id: str, pool: PagePool, send: Callable[[str, bytes], bool], clock: Callable[[], float], ttl_s: float = LEASE_TTL_S
    ) -> None:
        self.num_ignored = 0  # messages that matched nothing
        self._instance_id = instance_id
        self._pool = pool
        self._send = send
        self._clock = clock
        self._ttl_s = ttl_s
        self._leases: dict[RequestKey, _Lease] = {}
        self._graves: dict[RequestKey, tuple[float, LeaseEnded]] = {}  # oldest first; one ttl, so that a late renewal hears how it ended
        self._refused: dict[RequestKey, tuple[float, Ended]] = {}  # by readers that heard of it before this rank did; bounded as graves are
        self._ended: list[LeaseEnded] = []

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def is_serving(self) -> bool:
        """Whether any page is announced, so that peers may be reading."""
        return any(lease.announcements for lease in self._leases.values())

    def state(self, key: RequestKey) -> LeaseState | None:
        """Where the lease stands; None when there is none."""
        lease = self._leases.get(key)
        return lease.state if lease else None

    def newest(self, request_id: str, choice: int) -> RequestKey | None:
        """Of this choice's attempts that are queued or leased here, the highest."""
        keys = [key for key in self._leases if (key.request_id, key.choice) == (request_id, choice)]
        return max(keys, key=lambda key: key.attempt, default=None)

    def queue(self, key: RequestKey, readers: Sequence[str]) -> None:
        """A request is here but not admitted; renewals are answered with "unknown" until it is."""
        self._add(key, LeaseState.QUEUED, readers, math.inf)
        self._end_if_refused(key)

    def open(self, key: RequestKey, readers: Sequence[str]) -> None:
        """Begin a lease at admission; one reader a TP rank of the other side."""
        if self.state(key) is LeaseState.QUEUED:
            del self._leases[key]
        self._add(key, LeaseState.COMPUTING, readers, self._clock() + self._ttl_s)
        self._end_if_refused(key)

    def _end_if_refused(self, key: RequestKey) -> None:
        """A refusal may come before what it refuses: the router tells both sides at the same time."""
        _, refusal = self._refused.pop(key, (0.0, None))
        if refusal is not None and refusal.reader in self._leases[key].readers:
            self._end(key, LeaseState.ABORTED, refusal.reason, refusal.message, told=refusal.reader)

    def _add(self, key: RequestKey, state: LeaseState, readers: Sequence[str], deadline: float) -> None:
        if key in self._leases or not readers:
            raise EngineError(f"lease of {key} for readers {list(readers)}: it is here already or nobody would read it")
        self._graves.pop(key, None)
        self._leases[key] = _Lease(state, readers, deadline)

    def announce(self, key: RequestKey, pages: Sequence[tuple[int, int]], state: HandoffState | None = None) -> None:
        """Lease `(index in the request, page)` and tell the readers; with `state` these are the last. An ended lease is left alone."""
        lease = self._leases.get(key)
        if lease is None:
            return  # expired or refused while the chunk was computed; take_ended() says so
        if lease.state is not LeaseState.COMPUTING:
            raise EngineError(f"{key} announces pages but its lease is {lease.state}: only one that is computing may")
        self._pool.hold([page for _, page in pages], Holder(HolderKind.LEASE, key))
        announced = tuple(AnnouncedPage(index, page, self._pool.epoch(page)) for index, page in pages)
        lease.announcements.append((announced, state))
        if state is not None:
            lease.state = LeaseState.LEASED
        for reader in lease.readers:
            self._send(reader, encode(self._announcement(key, reader, lease, len(lease.announcements) - 1)))

    def redirect(self, key: RequestKey, new_key: RequestKey, readers: Sequence[str]) -> bool:
        """Give a lease, or a queued request, other readers and another key; False when there is none.

        The old readers hear REPLACED, and what they still say under the old key is ignored; the new ones hear every announcement.
        """
        old = self._leases.get(key)
        if old is None:
            return False
        queued = old.state is LeaseState.QUEUED
        self._add(new_key, old.state, readers, math.inf if queued else self._clock() + self._ttl_s)
        new = self._leases[new_key]
        new.announcements = old.announcements
        # The new holder first: no page is free in between.
        self._pool.hold(self._pool.pages_of(Holder(HolderKind.LEASE, key)), Holder(HolderKind.LEASE, new_key))
        self._pool.release(Holder(HolderKind.LEASE, key))
        del self._leases[key]
        message = f"attempt {new_key.attempt} takes the hand-off over"
        self._tell(old.waiting, LeaseEnded(key, LeaseState.ABORTED, common_pb2.REPLACED, message))
        count_incident("lease redirected", common_pb2.REPLACED)
        for sequence in range(len(new.announcements)):
            for reader in readers:
                self._send(reader, encode(self._announcement(new_key, reader, new, sequence)))
        self._end_if_refused(new_key)
        return True

    def finish(self, key: RequestKey) -> None:
        """The request ended with its first token: release, and tell the readers that there is nothing to pull."""
        self._end(key, LeaseState.RELEASED, FINISHED, "finished with its first token")

    def abort(self, key: RequestKey, reason: int, message: str) -> None:
        """Give the hand-off up and tell the readers why; no lease is no error."""
        self._end(key, LeaseState.ABORTED, reason, message)

    def abort_all(self, reason: int, message: str) -> None:
        """Give every hand-off up, queued ones too."""
        for key in list(self._leases):
            self._end(key, LeaseState.ABORTED, reason, message)

    def refuse(self, key: RequestKey, readers: Sequence[str], reason: int, message: str) -> None:
        """Tell the readers of a request that was never queued that no lease will come, now and when they renew."""
        self._tell(readers, LeaseEnded(key, LeaseState.ABORTED, reason, message))

    def handle(self, sender: str, message: Message) -> None:
        """A reader's message."""
        lease = self._leases.get(message.key)
        if message.holder != self._instance_id or message.reader != sender or (lease and sender not in lease.readers):
            self._ignore(sender, message)
        elif isinstance(message, Renew):
            self._renew(message, lease)
        elif lease is None:
            self._ignore(sender, message)
            if isinstance(message, Ended):
                self._remember_refusal(message)
        elif isinstance(message, Done) and lease.state is not LeaseState.QUEUED:
            lease.waiting.discard(sender)
            if not lease.waiting:
                self._end(message.key, LeaseState.RELEASED, FINISHED, "", told=sender)
        elif isinstance(message, Ended):
            self._end(message.key, LeaseState.ABORTED, message.reason, message.message, told=sender)
        else:
            self._ignore(sender, message)

    def tick(self) -> None:
        """End what nobody renewed; forget what ended a ttl ago."""
        now = self._clock()
        for key in [key for key, lease in self._leases.items() if lease.deadline <= now]:
            message = f"lease expired: no renewal for {self._ttl_s:g} s"
            self._end(key, LeaseState.EXPIRED, common_pb2.LEASE_EXPIRED, message)
        for key in [key for key, (until, _) in self._graves.items() if until <= now]:
            del self._graves[key]
        for key in [key for key, (until, _) in self._refused.items() if until <= now]:
            del self._refused[key]

    def _remember_refusal(self, refusal: Ended) -> None:
        self._refused[refusal.key] = (self._clock() + self._ttl_s, refusal)
        if len(self._refused) > MAX_GRAVES:
            del self._refused[next(iter(self._refused))]
            count_incident("refusal forgotten early")

    def take_ended(self) -> list[LeaseEnded]:
        """Leases that ended since the last call, whoever ended them."""
        ended, self._ended = self._ended, []
        return ended

    def _announcement(self, key: RequestKey, reader: str, lease: _Lease, sequence: int) -> Announce:
        pages, state = lease.announcements[sequence]
        return Announce(key=key, holder=self._instance_id, reader=reader, sequence=sequence, pages=pages, state=state)

    def _renew(self, message: Renew, lease: _Lease | None) -> None:
        key, reader = message.key, message.reader
        answer: RenewAnswer | Ended
        if lease and lease.state is not LeaseState.QUEUED:
            lease.deadline = self._clock() + self._ttl_s
            missing = range(message.next_sequence, len(lease.announcements))
            announcements = tuple(self._announcement(key, reader, lease, sequence) for sequence in missing)
            answer = RenewAnswer(key=key, holder=self._instance_id, reader=reader, known=True, announcements=announcements)
        elif key in self._graves:
            answer = self._ended_message(self._graves[key][1], reader)
        else:
            answer = RenewAnswer(key=key, holder=self._instance_id, reader=reader, known=False)
        self._send(reader, encode(answer))

    def _ended_message(self, ended: LeaseEnded, reader: str) -> Ended:
        return Ended(key=ended.key, holder=self._instance_id, reader=reader, reason=ended.reason, message=ended.message)

    def _end(self, key: RequestKey, state: LeaseState, reason: int, message: str, *, told: str = "") -> None:
        """End a lease, if there is one; readers hear of it, but for `told`, who said so, and those that are done."""
        lease = self._leases.pop(key, None)
        if lease is None:
            return
        self._pool.release(Holder(HolderKind.LEASE, key))
        ended = LeaseEnded(key, state, reason, message)
        self._ended.append(ended)
        if state is not LeaseState.RELEASED:
            count_incident(f"lease {state}", reason)
        self._tell([reader for reader in lease.readers if reader in lease.waiting and reader != told], ended)

    def _tell(self, readers: Collection[str], ended: LeaseEnded) -> None:
        if readers:
            self._graves.pop(ended.key, None)  # the order is that of their ends
            self._graves[ended.key] = (self._clock() + self._ttl_s, ended)
        if len(self._graves) > MAX_GRAVES:
            del self._graves[next(iter(self._graves))]
            count_incident("end of a lease forgotten early")
        for reader in readers:
            self._send(reader, encode(self._ended_message(ended, reader)))

    def _ignore(self, sender: str, message: Message) -> None:
        self.num_ignored += 1
        count_incident("message to a holder ignored")
        _log.info("holder %s ignores %s of %s from %s", self._instance_id, type(message).__name__, message.key, sender,
                  extra={"request_id": message.key.request_id})
