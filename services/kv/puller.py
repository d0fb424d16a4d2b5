"""All hand-offs that one rank reads: claims, reads in flight, verification, and quarantine of reads that are late.

    pulls = Puller(pool, transport, clock=time.monotonic)
    pulls.claim(key, holder_instance)                 from the claim on the lease is renewed; the holder must be a peer (HandoffError)
    pulls.begin(key, {index: local_page}, accept)     destinations of the pages that are lacking, taken and held by the caller; `accept` may
                                                      refuse the decoding state (HandoffError) before the holder hears Done
    pulls.begin(..., room=n)                          of a request that its holder still runs: pages below n are read as they are announced
    pulls.cancel(key, reason, message)                gives up or refuses; the holder is told; nothing is reported
    pulls.take_ended()                                [PullEnded]: READY (`handoff`, `stats`) or ABORTED (`reason`, `message`);
                                                      and once, with `room`, PullCaughtUp: all that was announced is read
    pulls.stop(message); pulls.resume()               a fence is due: pulls fail, claims are refused, nothing is posted; and it is no more

While a read is in flight its pages carry a READ holder, and a QUARANTINE holder once it is late: the caller drops its own REQUEST holder at
any time, and a page that may still be written to stays out of free. Guarded by the kv lock, except `post` and `poll`, which Exchange
calls between its two turns under the lock and which touch nothing but the reads and the transport.
"""
import logging
from collections.abc import Callable, Mapping

import msgspec

from proto.baton.v1 import common_pb2
from services.kv.lease import LEASE_TTL_S
from services.kv.messages import Announce, Done, Ended, HandoffState, Message, Renew, RenewAnswer, RequestKey, encode
from services.kv.pages import PagePool
from services.kv.pull import Accept, Pull, PullState, PullStats, accept_any
from services.kv.reads import Read, Reads
from services.kv.transport import TransferState, Transport, tell
from services.runtime.errors import EngineError, HandoffError
from services.runtime.telemetry import count_incident

FIRST_RENEWAL_S = 0.05
OPEN_RENEWAL_S = 0.5  # of a request that its holder still runs: a pause lasts 2 s at most, and its one announcement may be lost
READ_GRACE_S = 5.0
READ_FLOOR_BYTES_PER_S = 100e6  # a read slower than this is late
EPOCH_BYTES = 8

_log = logging.getLogger(__name__)


class PullEnded(msgspec.Struct, frozen=True):
    """A hand-off is over on the reader's side: READY with `handoff`, or ABORTED with `reason` (0: finished at the holder)."""

    key: RequestKey
    state: PullState
    reason: int
    message: str
    handoff: HandoffState | None
    stats: PullStats


class PullCaughtUp(msgspec.Struct, frozen=True):
    """An open-ended pull has read all that its holder has announced; said once."""

    key: RequestKey


class Puller:
    """All pulls of one rank."""

    def __init__(
        self, pool: PagePool, transport: Transport, page_bytes: int, clock: Callable[[], float], ttl_s: float = LEASE_TTL_S
    ) -> None:
        self.num_ignored = 0  # messages that matched nothing
        self._transport = transport
        self._page_bytes = page_bytes
        self._clock = clock
        self._ttl_s = ttl_s
        self._pulls: dict[RequestKey, Pull] = {}
        self.reads = Reads(pool, clock)
        self._ended: list[PullEnded | PullCaughtUp] = []
        self._stopped = ""  # why nothing new is read

    def __len__(self) -> int:
        return len(self._pulls)

    @property
    def num_reads(self) -> int:
        """Reads in flight, late ones included."""
        return len(self.reads)

    def state(self, key: RequestKey) -> PullState | None:
        """Where the pull stands; None when it is over or never was."""
        pull = self._pulls.get(key)
        return pull.state if pull else None

    def is_announced(self, key: RequestKey) -> bool:
        """Whether the holder has announced any page: it has admitted the request, so all of it will come."""
        pull = self._pulls.get(key)
        return pull is not None and pull.heard_any

    # ---- for the engine

    def claim(self, key: RequestKey, holder: str) -> None:
        """Begin to listen and to renew."""
        if key in self._pulls:
            raise EngineError(f"{key} is being pulled already")
        if self._stopped:
            raise HandoffError(common_pb2.FENCED, self._stopped)
        if not self._transport.has_peer(holder):
            raise HandoffError(common_pb2.PEER_GONE, f"holder {holder} of {key.request_id} is no open peer of this rank; add it first")
        pull = self._pulls[key] = Pull(key, holder, self._clock())
        # The first renewal comes soon: what was announced before this claim was booked is asked for by nothing else.
        pull.last_renewed += FIRST_RENEWAL_S - self._ttl_s / 6

    def begin(self, key: RequestKey, local_pages: Mapping[int, int], accept: Accept = accept_any, *, room: int | None = None) -> None:
        """Give a claim its destination pages; one that has ended meanwhile is left alone (take_ended says so)."""
        pull = self._pulls.get(key)
        if pull is None:
            return
        if pull.state is not PullState.CLAIMED:
            raise EngineError(f"{key} is {pull.state}: it has its pages already")
        pull.begin(local_pages, accept, room)

    def cancel(self, key: RequestKey, reason: int, message: str) -> None:
        """Give a pull up and tell its holder; no pull is no error."""
        pull = self._pulls.get(key)
        if pull:
            self._forget(pull)
            self._send(pull, Ended(key=key, holder=pull.holder, reader=self._transport.instance_id, reason=reason, message=message))

    def refuse(self, key: RequestKey, holder: str, reason: int, message: str) -> None:
        """Tell a holder that a hand-off which was never claimed here will not be read."""
        ended = Ended(key=key, holder=holder, reader=self._transport.instance_id, reason=reason, message=message)
        tell(self._transport, holder, encode(ended))

    def stop(self, message: str) -> None:
        """Post nothing new: every pull fails as FENCED, its holder is told, and so does every claim from now on."""
        self._stopped = message
        for pull in list(self._pulls.values()):
            self._fail(pull, common_pb2.FENCED, message)

    def resume(self) -> None:
        """Late reads have ended by themselves: claims are welcome again."""
        self._stopped = ""

    def take_ended(self) -> list[PullEnded | PullCaughtUp]:
        """Pulls that ended or caught up since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # ---- for Exchange

    def handle(self, sender: str, message: Message) -> None:
        """A holder's message."""
        pull = self._pulls.get(message.key)
        if pull is None or pull.holder != sender or message.holder != sender or message.reader != self._transport.instance_id:
            self.num_ignored += 1
            count_incident("message to a reader ignored")
            _log.info("reader %s ignores %s of %s from %s", self._transport.instance_id, type(message).__name__, message.key, sender,
                      extra={"request_id": message.key.request_id})
            return
        now = self._clock()
        pull.silent_since = None
        if isinstance(message, Announce):
            self._announced(pull, message, now)
        elif isinstance(message, RenewAnswer):
            if not message.known and pull.heard_any:
                self._fail(pull, common_pb2.LEASE_EXPIRED, f"holder {sender} no longer knows the request")
            for announce in message.announcements:
                self._announced(pull, announce, now)
        elif isinstance(message, Ended):
            self._report(pull, PullState.ABORTED, message.reason, message.message)

    def plan(self) -> list[Read]:
        """Renew, give up on silent holders, and return the reads to post, their pages held."""
        now = self._clock()
        reads: list[Read] = []
        for pull in list(self._pulls.values()):
            self._renew(pull, now)
            if pull.state is PullState.ABORTED:
                continue
            if pull.is_outgrown:
                self._fail(pull, common_pb2.OVERLOADED, "the request outgrew the pages taken for it before its move was over; try again")
            elif pull.is_short:
                self._fail(pull, common_pb2.INTERNAL, "the holder's last announcement leaves out pages that this rank lacks")
            reads += [self.reads.begin(pull, batch, of_epochs=False) for batch in pull.next_batches(now)]
            if pull.catches_up():
                self._ended.append(PullCaughtUp(pull.key))
            if pull.is_complete:
                reads += self._verify(pull)
        return reads

    def post(self, reads: list[Read]) -> None:
        """Hand reads to the transport; not under the lock, since a backend may copy right here."""
        for read in reads:
            post = self._transport.read_epochs if read.of_epochs else self._transport.read_pages
            num_bytes = len(read.local_pages) * (EPOCH_BYTES if read.of_epochs else self._page_bytes)
            read.deadline = self._clock() + READ_GRACE_S + num_bytes / READ_FLOOR_BYTES_PER_S
            try:
                read.handle = post(read.peer, read.remote_pages, read.local_pages)
            except HandoffError as error:
                read.state = TransferState.FAILED
                _log.warning("read of %d pages from %s was not posted: %s", len(read.local_pages), read.peer, error)

    def poll(self) -> None:
        """Ask after every read in flight; not under the lock."""
        for read in self.reads:
            if read.handle is not None:
                read.state = self._transport.poll(read.handle)

    def settle(self) -> bool:
        """Take in what poll() saw; whether any read ended."""
        now = self._clock()
        ended = self.reads.ended()
        for read in ended:
            self._finish(read, now)
        for read in self.reads.take_late():
            count_incident("page quarantined", common_pb2.READ_DEADLINE, len(read.local_pages))
            message = f"a read of {len(read.local_pages)} pages from {read.peer} is late; its pages are in quarantine"
            self._close_peer(read.peer, common_pb2.READ_DEADLINE, message)
        return bool(ended)

    # ---- inside

    def _renew(self, pull: Pull, now: float) -> None:
        if pull.silent_since is not None and now - pull.silent_since >= self._ttl_s / 2:
            self._fail(pull, common_pb2.LEASE_EXPIRED, f"holder {pull.holder} gave no answer for {self._ttl_s / 2:g} s")
            return
        interval = OPEN_RENEWAL_S if pull.is_open else self._ttl_s / 6
        # A gap is asked for at once, but once a renewal's answer: silence means that the question is on its way.
        if now - pull.last_renewed >= interval or (pull.has_gap and pull.silent_since is None):
            pull.last_renewed = now
            pull.silent_since = now if pull.silent_since is None else pull.silent_since
            reader = self._transport.instance_id
            self._send(pull, Renew(key=pull.key, holder=pull.holder, reader=reader, next_sequence=pull.next_sequence))

    def _announced(self, pull: Pull, announce: Announce, now: float) -> None:
        if not pull.announced(announce, now):
            count_incident("announcement refused", common_pb2.OVERLOADED)
            _log.warning("announcement %d of %s is too far beyond a gap; it is asked for again", announce.sequence, pull.key,
                         extra={"request_id": pull.key.request_id})

    def _verify(self, pull: Pull) -> list[Read]:
        try:
            pull.check_handoff()
        except HandoffError as error:
            self._fail(pull, error.reason, str(error))
            return []
        indices = pull.to_verify()
        if not indices:  # everything was here already
            self._ready(pull, 0)
            return []
        pull.state = PullState.VERIFYING
        return [self.reads.begin(pull, pull.batch(indices), of_epochs=True)]

    def _finish(self, read: Read, now: float) -> None:
        epochs: list[int] = []
        if read.handle is not None:
            if read.of_epochs and read.state is TransferState.DONE:
                epochs = self._transport.epochs(read.handle)
            self._transport.release(read.handle)
        self.reads.end(read)
        pull = read.pull
        if read.state is not TransferState.DONE:
            self._close_peer(read.peer, common_pb2.READ_FAILED, f"a read of {len(read.local_pages)} pages from {read.peer} failed")
        elif pull and read.of_epochs:
            self._compare(pull, read.indices, epochs)
        elif pull:
            pull.pages_read(read.indices, len(read.indices) * self._page_bytes)

    def _compare(self, pull: Pull, indices: list[int], epochs: list[int]) -> None:
        stale = pull.stale(indices, epochs)
        if stale:
            self._fail(pull, common_pb2.EPOCH_MISMATCH, f"pages {stale} of the request were rewritten while they were read")
        else:
            self._ready(pull, len(indices) * EPOCH_BYTES)

    def _ready(self, pull: Pull, num_bytes: int) -> None:
        pull.ready(self._clock(), num_bytes)
        self._send(pull, Done(key=pull.key, holder=pull.holder, reader=self._transport.instance_id))
        self._report(pull, PullState.READY, 0, "")

    def _close_peer(self, peer: str, reason: int, message: str) -> None:
        """No new read goes to this peer, so every pull from it fails; one that comes later adds it afresh."""
        _log.warning("%s; the peer is closed to new reads", message)
        count_incident("read given up", reason)
        for pull in [pull for pull in self._pulls.values() if pull.holder == peer]:
            self._fail(pull, reason, message)
        self._transport.close_peer(peer)

    def _fail(self, pull: Pull, reason: int, message: str) -> None:
        reader = self._transport.instance_id
        self._send(pull, Ended(key=pull.key, holder=pull.holder, reader=reader, reason=reason, message=message))
        self._report(pull, PullState.ABORTED, reason, message)

    def _report(self, pull: Pull, state: PullState, reason: int, message: str) -> None:
        self._forget(pull)
        pull.state = state
        handoff = pull.handoff if state is PullState.READY else None
        self._ended.append(PullEnded(pull.key, state, reason, message, handoff, pull.stats))

    def _forget(self, pull: Pull) -> None:
        """The pull is over; its reads go on alone and keep their pages until they end."""
        del self._pulls[pull.key]
        self.reads.forget(pull)

    def _send(self, pull: Pull, message: Message) -> None:
        tell(self._transport, pull.holder, encode(message))
