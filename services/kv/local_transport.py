"""Ranks of one process joined by memory copies, with faults on request: the same Protocol as NIXL, chosen by the same switch.

    fabric = LocalFabric()
    transport = create_transport("local", instance_id="a", memory=memory, compatibility=mine, fabric=fabric)

A read is done at its first poll unless `fabric.hold_reads` is set; then it stays RUNNING until the caller ends it:
    read = fabric.reads[-1]; read.copy(); read.complete(); read.fail()       copy() alone: bytes have landed, the state has not moved
Messages arrive at once unless `fabric.on_notify` says otherwise: it maps (sender, receiver, payload) to the payloads to deliver now
(none = lost, two = duplicated; keep one and put it into `fabric.deliver` later = delayed or reordered).
    fabric.kill("a")       reads from it fail, messages to it cannot be sent; a new transport is a new instance
    transport.close()      the same, and its own reads are fenced: copy() moves nothing any more
"""
from collections.abc import Callable, Sequence

from proto.baton.v1 import common_pb2
from services.kv.layout import Compatibility
from services.kv.memory import KvMemory
from services.kv.transport import PeerInfo, ReadLedger, TransferState, TransportStats, check_peer, encode_peer
from services.runtime.errors import EngineError, HandoffError

OnNotify = Callable[[str, str, bytes], list[bytes]]


class LocalFabric:
    """What the ranks of one process share."""

    def __init__(self) -> None:
        self.hold_reads = False
        self.on_notify: OnNotify | None = None
        self.reads: list[LocalRead] = []  # held ones, in the order they were posted
        self._members: dict[str, LocalTransport] = {}

    def join(self, transport: "LocalTransport") -> None:
        """A rank comes up."""
        self._members[transport.instance_id] = transport

    def kill(self, instance_id: str) -> None:
        """A rank dies: held reads from it fail, nothing reaches it any more."""
        self._members.pop(instance_id, None)
        for read in self.reads:
            if read.peer == instance_id and read.state is TransferState.RUNNING:
                read.fail()

    def member(self, instance_id: str) -> "LocalTransport | None":
        """The live rank of that instance id."""
        return self._members.get(instance_id)

    def deliver(self, sender: str, receiver: str, payload: bytes) -> bool:
        """Put a message into a rank's inbox; False when there is none."""
        member = self._members.get(receiver)
        if member:
            member.inbox.append((sender, payload))
        return member is not None


class LocalRead:
    """One read: bytes move when it is told to."""

    def __init__(
        self, peer: str, source: KvMemory, target: KvMemory, remote: Sequence[int], local: Sequence[int], *, of_epochs: bool
    ) -> None:
        self.peer = peer
        self.remote_pages, self.local_pages = list(remote), list(local)
        self.of_epochs = of_epochs
        self.state = TransferState.RUNNING
        self.is_fenced = False
        self._source, self._target = source, target

    def copy(self, num_pages: int | None = None) -> None:
        """Let the first `num_pages` (all by default) land, whatever the state; nothing once the reader's transport is closed."""
        if self.is_fenced:
            return
        remote, local = self.remote_pages[:num_pages], self.local_pages[:num_pages]
        if self.of_epochs:
            self._target.landing[local] = self._source.epochs[remote]
        else:
            self._target.page_bytes_view()[local] = self._source.page_bytes_view()[remote]

    def complete(self) -> None:
        """Land and be DONE."""
        self.copy()
        self.state = TransferState.DONE

    def fail(self) -> None:
        """End in an error."""
        self.state = TransferState.FAILED


class LocalTransport:
    """One rank of a LocalFabric."""

    def __init__(self, instance_id: str, memory: KvMemory, compatibility: Compatibility, fabric: LocalFabric) -> None:
        self.instance_id = instance_id
        self.stats = TransportStats(ucx="none: copies within one process")
        self.inbox: list[tuple[str, bytes]] = []
        self.memory = memory
        self._compatibility = compatibility
        self._fabric = fabric
        self._ledger = ReadLedger(self.stats)
        self._peers: set[str] = set()
        self._reads: dict[int, LocalRead] = {}
        self._num_reads_ever = 0
        self._is_closed = False
        fabric.join(self)

    def metadata(self) -> bytes:
        """See Transport."""
        return encode_peer(
            PeerInfo(
                instance_id=self.instance_id,
                agent=b"",
                pages_address=self.memory.page_address(0),
                epochs_address=self.memory.epochs.ctypes.data,
                num_pages=self.memory.num_pages,
                page_bytes=self.memory.layout.page_bytes,
                compatibility=self._compatibility,
            )
        )

    def add_peer(self, blob: bytes) -> str:
        """See Transport."""
        info = check_peer(blob, self._compatibility, self.memory.layout.page_bytes)
        if self._is_closed:
            raise HandoffError(common_pb2.FENCED, f"{self.instance_id} is closed; the rank goes on under another instance id")
        if any(read.peer == info.instance_id for read in self._reads.values()) and info.instance_id not in self._peers:
            raise HandoffError(common_pb2.PEER_GONE, f"peer {info.instance_id} is closed until its late reads have ended")
        self._peers.add(info.instance_id)
        return info.instance_id

    def has_peer(self, instance_id: str) -> bool:
        """See Transport."""
        return instance_id in self._peers

    def hold(self) -> None:
        """See Transport. Nothing of a peer's end reaches us."""

    def close_peer(self, instance_id: str) -> None:
        """See Transport."""
        self._peers.discard(instance_id)

    def notify(self, instance_id: str, payload: bytes) -> bool:
        """See Transport."""
        if instance_id not in self._peers:
            return False
        on_notify = self._fabric.on_notify
        payloads = on_notify(self.instance_id, instance_id, payload) if on_notify else [payload]
        delivered = [self._fabric.deliver(self.instance_id, instance_id, each) for each in payloads]
        return all(delivered)

    def notifications(self) -> list[tuple[str, bytes]]:
        """See Transport."""
        if self._is_closed:
            raise EngineError(f"transport {self.instance_id} is closed")
        received, self.inbox = self.inbox, []
        return received

    def read_pages(self, instance_id: str, remote_pages: Sequence[int], local_pages: Sequence[int]) -> int:
        """See Transport."""
        return self._read(instance_id, remote_pages, local_pages, of_epochs=False)

    def read_epochs(self, instance_id: str, remote_pages: Sequence[int], local_pages: Sequence[int]) -> int:
        """See Transport."""
        return self._read(instance_id, remote_pages, local_pages, of_epochs=True)

    def poll(self, handle: int) -> TransferState:
        """See Transport."""
        read = self._reads[handle]
        if read.state is TransferState.RUNNING and not self._fabric.hold_reads:
            read.complete()
        return read.state

    def epochs(self, handle: int) -> list[int]:
        """See Transport."""
        return self.memory.landing[self._reads[handle].local_pages].tolist()

    def release(self, handle: int) -> None:
        """See Transport."""
        read = self._reads.pop(handle)
        num = len(read.local_pages) if read.state is TransferState.DONE else 0
        page_bytes = self.memory.layout.page_bytes
        if read.of_epochs:
            self._ledger.ended(num_words=num, num_bytes=8 * num)
        else:
            self._ledger.ended(num_pages=num, num_bytes=page_bytes * num)
        if read in self._fabric.reads:
            self._fabric.reads.remove(read)

    def close(self) -> None:
        """See Transport."""
        self._is_closed = True
        self._peers.clear()
        for read in self._reads.values():
            read.is_fenced = True
            if read in self._fabric.reads:
                self._fabric.reads.remove(read)
        self._reads.clear()
        self._fabric.kill(self.instance_id)

    def _read(self, instance_id: str, remote_pages: Sequence[int], local_pages: Sequence[int], *, of_epochs: bool) -> int:
        peer = self._fabric.member(instance_id)
        if peer is None or instance_id not in self._peers:
            raise HandoffError(common_pb2.PEER_GONE, f"no read goes to {instance_id}: it is no open peer of {self.instance_id}")
        self._num_reads_ever += 1
        read = LocalRead(instance_id, peer.memory, self.memory, remote_pages, local_pages, of_epochs=of_epochs)
        self._reads[self._num_reads_ever] = read
        if self._fabric.hold_reads:
            self._fabric.reads.append(read)
        self._ledger.started()
        return self._num_reads_ever
