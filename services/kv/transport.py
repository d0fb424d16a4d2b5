"""How pages, epoch words and small messages pass between ranks: one Protocol, two implementations behind one switch.

    transport = create_transport("nixl", instance_id=new_instance_id(), memory=memory, compatibility=mine)
    blob = transport.metadata()                          travels in the rank's registration, never through a client
    peer = transport.add_peer(blob)                      its instance id; HandoffError names what differs when it may not be paired
    transport.notify(peer, payload) -> bool              False: could not be sent
    transport.notifications() -> [(instance, payload)]
    handle = transport.read_pages(peer, remote_pages, local_pages)
    handle = transport.read_epochs(peer, remote_pages, local_pages)      lands in memory.landing[local_pages]
    transport.poll(handle) -> RUNNING | DONE | FAILED; transport.epochs(handle); transport.release(handle)
    transport.hold()                                     peers will read from here from now on: the rank must outlive them
    transport.close_peer(peer)                           no new reads; forgotten once its reads have ended; then add_peer starts afresh
    transport.close()                                    the fence: what was in flight never lands once close() has returned

Nothing blocks but close(), which takes no longer than the memory takes to be unregistered, whatever peers do. A read that is reported DONE
or FAILED has ended: nothing of it lands any more. Reads, `notifications` and `close` are for one thread; `notify` and `add_peer` may be
called by others. A closed transport has no peers and sends nothing; asking it for notifications is an EngineError, which ends the rank.
A rank may open another transport over the same memory once it has closed one: that is how an agent is renewed (rank_kv.py).
"faults" (services/kv/faults.py) is a proxy around either transport and keeps every word of this.
"""
import secrets
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from proto.baton.v1 import common_pb2
from services.kv.layout import Compatibility
from services.kv.messages import WIRE_VERSION
from services.runtime.errors import HandoffError
from services.runtime.telemetry import count_incident

if TYPE_CHECKING:
    from services.kv.faults import FaultPlan
    from services.kv.local_transport import LocalFabric
    from services.kv.memory import KvMemory

TransportKind = Literal["nixl", "local"]
IDLE_S = 600.0  # a peer that nobody spoke of for so long is forgotten: many times what a hand-off, renewed every few seconds, is silent


class TransferState(StrEnum):
    """A read's state; anything a backend says that is not clearly RUNNING or DONE is FAILED."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class TransportStats(msgspec.Struct):
    """What was moved by reads that ended well. `busy_s` is the time during which at least one read was in flight."""

    num_pages: int = 0
    num_words: int = 0
    num_bytes: int = 0
    num_failed: int = 0
    busy_s: float = 0.0
    ucx: str = ""  # UCX transport, and how we know it

    def take_over(self, before: "TransportStats") -> None:
        """Count on from where the same rank's transport before this one stopped."""
        self.num_pages += before.num_pages
        self.num_words += before.num_words
        self.num_bytes += before.num_bytes
        self.num_failed += before.num_failed
        self.busy_s += before.busy_s
        if before.num_bytes:
            self.ucx = before.ucx


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank publishes about itself; addresses are meaningful to its peers' NIXL agents only."""

    instance_id: str
    agent: bytes  # NIXL metadata
    pages_address: int
    epochs_address: int
    num_pages: int
    page_bytes: int
    compatibility: Compatibility


class Transport(Protocol):
    """One rank's end of the fabric."""

    @property
    def instance_id(self) -> str: ...
    @property
    def stats(self) -> TransportStats: ...
    def metadata(self) -> bytes: ...
    def add_peer(self, blob: bytes) -> str: ...
    def has_peer(self, instance_id: str) -> bool: ...
    def hold(self) -> None: ...
    def close_peer(self, instance_id: str) -> None: ...
    def notify(self, instance_id: str, payload: bytes) -> bool: ...
    def notifications(self) -> list[tuple[str, bytes]]: ...
    def read_pages(self, instance_id: str, remote_pages: Sequence[int], local_pages: Sequence[int]) -> int: ...
    def read_epochs(self, instance_id: str, remote_pages: Sequence[int], local_pages: Sequence[int]) -> int: ...
    def poll(self, handle: int) -> TransferState: ...
    def epochs(self, handle: int) -> list[int]: ...
    def release(self, handle: int) -> None: ...
    def close(self) -> None: ...


def create_transport(
    kind: TransportKind, *, instance_id: str, memory: "KvMemory", compatibility: Compatibility,
    fabric: "LocalFabric | None" = None, faults: "FaultPlan | None" = None, kv_network: str = "",
) -> Transport:
    """The transport named, with `faults` injected if there are any; `fabric` joins the ranks of one process, for "local" alone.

    `kv_network`: the CIDR of the network that pages go over, for "nixl"; "" = UCX chooses.
    """
    opened: Transport
    if kind == "local":
        from services.kv.local_transport import LocalTransport

        assert fabric is not None, "a local transport needs the LocalFabric that its peers share"
        opened = LocalTransport(instance_id, memory, compatibility, fabric)
    else:
        from services.kv.nixl_transport import NixlTransport

        opened = NixlTransport(instance_id, memory, compatibility, kv_network=kv_network)
    if faults is None:
        return opened
    from services.kv.faults import FaultTransport

    return FaultTransport(opened, faults)


def tell(transport: Transport, peer: str, payload: bytes) -> bool:
    """Notify; what cannot be sent is counted. Renewals and expiry are the net below it."""
    sent = transport.notify(peer, payload)
    if not sent:
        count_incident("notification not sent")
    return sent


def new_instance_id() -> str:
    """A fresh id for one engine incarnation. Ids of one machine sort by age, for as long as nobody sets its clock back."""
    return f"{time.time_ns():016x}{secrets.token_hex(4)}"


def encode_peer(info: PeerInfo) -> bytes:
    """`info` behind the wire version, so that another version can be told apart before its fields are read."""
    return msgspec.msgpack.encode((WIRE_VERSION, msgspec.msgpack.encode(info)))


def check_peer(blob: bytes, mine: Compatibility, page_bytes: int) -> PeerInfo:
    """Decode a peer's blob; HandoffError names both sides' values when it must not be paired with this rank.

    What is wrong with a peer is never the request's fault: PEER_GONE lets the router try another, INVALID would not.
    """
    try:
        version, body = msgspec.msgpack.decode(blob, type=tuple[int, bytes])
        if version != WIRE_VERSION:
            raise _mismatch(f"its hand-off wire version is {version} and ours is {WIRE_VERSION}")
        info = msgspec.msgpack.decode(body, type=PeerInfo)
    except msgspec.DecodeError as error:
        raise HandoffError(common_pb2.PEER_GONE, f"peer metadata of {len(blob)} bytes cannot be read: {error}") from error
    theirs = info.compatibility
    if theirs.fingerprint != mine.fingerprint:
        raise _mismatch(f"fingerprint is {mine.fingerprint} here and {theirs.fingerprint} there: {mine.difference(theirs)}")
    if info.page_bytes != page_bytes:
        raise _mismatch(f"a page has {page_bytes} bytes here and {info.page_bytes} there")
    return info


def _mismatch(what: str) -> HandoffError:
    return HandoffError(common_pb2.FINGERPRINT_MISMATCH, f"peer refused: {what}; pair only ranks of one model, revision and version")


class ReadLedger:
    """Counts reads for `TransportStats`."""

    def __init__(self, stats: TransportStats) -> None:
        self._stats = stats
        self._num_running = 0
        self._busy_since = 0.0

    def started(self) -> None:
        """A read was posted."""
        if self._num_running == 0:
            self._busy_since = time.perf_counter()
        self._num_running += 1

    def ended(self, *, num_pages: int = 0, num_words: int = 0, num_bytes: int = 0) -> None:
        """A read ended; all zero means that it failed."""
        self._num_running -= 1
        if self._num_running == 0:
            self._stats.busy_s += time.perf_counter() - self._busy_since
        self._stats.num_pages += num_pages
        self._stats.num_words += num_words
        self._stats.num_bytes += num_bytes
        self._stats.num_failed += num_bytes == 0
