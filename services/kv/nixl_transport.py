"""NIXL with UCX over host memory: the real transport. UCX_TLS and the rest of UCX's environment are honoured.

The agent's name is the rank's instance id. Pages and epoch words are registered once; descriptors of every page (one a page) and of every
word are prepared once a peer, so a read names pages by index. Calls come from several threads: the agent locks itself.
Errors of NIXL are kept as text alone: a traceback's frames have references to the agent, which must be able to go (close).
Incarnations come and go and say nothing when they go: one that nobody has spoken of for IDLE_S is forgotten when the next one is met.
"""
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from proto.baton.v1 import common_pb2
from services.kv.layout import Compatibility
from services.kv.memory import KvMemory
from services.kv.resets import ResetGuard
from services.kv.transport import IDLE_S, PeerInfo, ReadLedger, TransferState, TransportStats, check_peer, encode_peer
from services.kv.ucx import start_agent, ucx
from services.runtime.errors import EngineError, HandoffError

_STATES = {"DONE": TransferState.DONE, "PROC": TransferState.RUNNING}  # whatever else NIXL says is a failure
_WORD_BYTES = 8
_GUARD_S = 0.1  # a holder's new connections drop resets after so long at most; a look at all sockets costs some 0.1 ms

_log = logging.getLogger(__name__)


class _Peer:
    """An added peer; once closed it is forgotten as soon as nothing from it is in flight."""

    def __init__(self, info: PeerInfo, pages: Any, epochs: Any, now: float) -> None:
        self.info = info
        self.used_at = now
        self.pages, self.epochs = pages, epochs  # NIXL's prepared descriptor lists
        self.is_open = True
        self.num_reads = 0
        self.has_read = False


class _Read:
    """A transfer in flight and how it ended."""

    def __init__(self, peer: _Peer, local_pages: list[int], *, of_epochs: bool) -> None:
        self.peer = peer
        self.transfer: Any = None
        self.local_pages = local_pages
        self.of_epochs = of_epochs
        self.state = TransferState.RUNNING


class NixlTransport:
    """One NIXL agent and the memory it registered."""

    def __init__(
        self, instance_id: str, memory: KvMemory, compatibility: Compatibility, clock: Callable[[], float] = time.monotonic,
        kv_network: str = "",
    ) -> None:
        self.instance_id = instance_id
        self._clock = clock
        self._memory = memory
        self._compatibility = compatibility
        self.stats = TransportStats()
        self._ledger = ReadLedger(self.stats)
        self._peers: dict[str, _Peer] = {}
        self._reads: dict[int, _Read] = {}
        self._num_reads_ever = 0
        self._guard: ResetGuard | None = None  # once this rank is a holder
        self._guarded_at = 0.0
        self._meeting = threading.Lock()  # nobody meets a peer while the agent is destroyed
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it greets on stdout
        self._agent: Any = start_agent(instance_id, kv_network)
        self.stats.ucx = ucx().describe()
        self._page_bytes = memory.layout.page_bytes
        pages, epochs, landing = memory.page_address(0), memory.epochs.ctypes.data, memory.landing.ctypes.data
        words = _WORD_BYTES * memory.num_pages
        regions = [(pages, memory.num_pages * self._page_bytes, 0, ""), (epochs, words, 0, ""), (landing, words, 0, "")]
        self._registered = self._agent.register_memory(regions, "DRAM")
        self._local_pages: Any = self._prepare("NIXL_INIT_AGENT", pages, self._page_bytes, memory.num_pages)
        self._local_words: Any = self._prepare("NIXL_INIT_AGENT", landing, _WORD_BYTES, memory.num_pages)

    @property
    def num_peers(self) -> int:
        """Peers that NIXL knows."""
        return len(self._peers)

    def metadata(self) -> bytes:
        """See Transport."""
        return encode_peer(
            PeerInfo(
                instance_id=self.instance_id,
                agent=self._agent.get_agent_metadata(),
                pages_address=self._memory.page_address(0),
                epochs_address=self._memory.epochs.ctypes.data,
                num_pages=self._memory.num_pages,
                page_bytes=self._page_bytes,
                compatibility=self._compatibility,
            )
        )

    def add_peer(self, blob: bytes) -> str:
        """See Transport."""
        info = check_peer(blob, self._compatibility, self._page_bytes)
        name = info.instance_id
        with self._meeting:
            known = self._peers.get(name)
            if self._agent is None:
                raise HandoffError(common_pb2.FENCED, f"{self.instance_id} is closed; the rank goes on under another instance id")
            if known is None:
                self._forget_unused()
                self._peers[name] = self._meet(info)
            elif not known.is_open:
                raise HandoffError(common_pb2.PEER_GONE, f"peer {name} is closed until its {known.num_reads} late reads have ended")
            else:
                known.used_at = self._clock()
        return name

    def has_peer(self, instance_id: str) -> bool:
        """See Transport. Whoever asks is about to use it."""
        peer = self._peers.get(instance_id)
        if peer is None or not peer.is_open:
            return False
        peer.used_at = self._clock()
        return True

    def hold(self) -> None:
        """See Transport."""
        if self._guard is None:
            self._guard = ResetGuard()

    def close_peer(self, instance_id: str) -> None:
        """See Transport."""
        peer = self._peers.get(instance_id)
        if peer:
            peer.is_open = False
            self._forget_if_idle(peer)

    def notify(self, instance_id: str, payload: bytes) -> bool:
        """See Transport."""
        peer = self._peers.get(instance_id)
        if peer is None:
            return False
        peer.used_at = self._clock()
        try:
            self._agent.send_notif(instance_id, payload)
        except Exception as error:  # NIXL's errors have no common base
            _log.warning("a notification to %s could not be sent: %s", instance_id, repr(error))
            return False
        return True

    def notifications(self) -> list[tuple[str, bytes]]:
        """See Transport."""
        if self._agent is None:
            raise EngineError(f"NIXL agent {self.instance_id} is closed")
        if self._guard and time.monotonic() - self._guarded_at > _GUARD_S:
            self._guarded_at = time.monotonic()
            self._guard.spread()
        received: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return [(sender, payload) for sender, payloads in received.items() for payload in payloads]

    def read_pages(self, instance_id: str, remote_pages: Sequence[int], local_pages: Sequence[int]) -> int:
        """See Transport."""
        return self._read(instance_id, remote_pages, local_pages, of_epochs=False)

    def read_epochs(self, instance_id: str, remote_pages: Sequence[int], local_pages: Sequence[int]) -> int:
        """See Transport."""
        return self._read(instance_id, remote_pages, local_pages, of_epochs=True)

    def poll(self, handle: int) -> TransferState:
        """See Transport."""
        read = self._reads[handle]
        if read.state is TransferState.RUNNING:
            try:
                read.state = _STATES.get(self._agent.check_xfer_state(read.transfer), TransferState.FAILED)
            except Exception as error:
                read.state = TransferState.FAILED
                _log.warning("a read from %s failed: %s", read.peer.info.instance_id, repr(error))
        return read.state

    def epochs(self, handle: int) -> list[int]:
        """See Transport."""
        return self._memory.landing[self._reads[handle].local_pages].tolist()

    def release(self, handle: int) -> None:
        """See Transport."""
        read = self._reads.pop(handle)
        self._end_transfer(read.transfer)
        num = len(read.local_pages) if read.state is TransferState.DONE else 0
        if read.of_epochs:
            self._ledger.ended(num_words=num, num_bytes=num * _WORD_BYTES)
        else:
            self._ledger.ended(num_pages=num, num_bytes=num * self._page_bytes)
        peer = read.peer
        peer.num_reads -= 1
        if num and not read.of_epochs and not peer.has_read:
            peer.has_read = True
            self.stats.ucx = ucx().describe()
        self._forget_if_idle(peer)

    def close(self) -> None:
        """Forget every peer, unregister the memory and destroy the agent, which fences reads still in flight.

        Raises EngineError when something keeps the agent alive: late reads might still land, so the rank must end.
        """
        with self._meeting:
            if self._agent is None:
                return
            alive = weakref.ref(self._agent.agent)  # NIXL's own object: every handle has a reference to it, and only its end is the fence
            self._destroy()
        if alive() is not None:
            gc.collect()  # an exception's traceback may keep a handle
        if alive() is not None:
            raise EngineError(f"NIXL agent {self.instance_id} could not be destroyed, so late reads are not fenced")

    def _destroy(self) -> None:
        for read in self._reads.values():
            self._end_transfer(read.transfer)
            read.transfer = None
        self._reads.clear()
        for peer in list(self._peers.values()):
            self._forget(peer)
        self._local_pages.release()
        self._local_words.release()
        self._agent.deregister_memory(self._registered)
        self._local_pages = self._local_words = self._agent = None

    def _meet(self, info: PeerInfo) -> _Peer:
        name = info.instance_id
        try:
            added = self._agent.add_remote_agent(info.agent)
            if isinstance(added, bytes):
                added = added.decode()
            if added == name:
                pages = self._prepare(name, info.pages_address, self._page_bytes, info.num_pages)
                return _Peer(info, pages, self._prepare(name, info.epochs_address, _WORD_BYTES, info.num_pages), self._clock())
            failure = f"its NIXL agent is {added}"
        except Exception as error:
            failure = repr(error)
        raise HandoffError(common_pb2.PEER_GONE, f"peer {name} cannot be reached through NIXL: {failure}")

    def _prepare(self, agent: str, address: int, size: int, count: int) -> Any:
        """Descriptors of `count` blocks of `size` bytes, one after another; later chosen by index."""
        return self._agent.prep_xfer_dlist(agent, np.array([[address, size, 0, size, count]], dtype=np.uint64), "DRAM")

    def _read(self, instance_id: str, remote_pages: Sequence[int], local_pages: Sequence[int], *, of_epochs: bool) -> int:
        peer = self._peers.get(instance_id)
        if peer is None or not peer.is_open:
            raise HandoffError(common_pb2.PEER_GONE, f"no read goes to {instance_id}: it is no open peer of {self.instance_id}")
        if not all(0 <= page < peer.info.num_pages for page in remote_pages):
            raise HandoffError(common_pb2.PEER_GONE, f"{instance_id} announced pages {list(remote_pages)} but has {peer.info.num_pages}")
        read, failure = _Read(peer, list(local_pages), of_epochs=of_epochs), ""
        self._ledger.started()  # before the transfer: over cma the bytes move within the call
        try:
            read.transfer = self._agent.make_prepped_xfer(
                "READ", self._local_words if of_epochs else self._local_pages, np.array(local_pages, dtype=np.int32),
                peer.epochs if of_epochs else peer.pages, np.array(remote_pages, dtype=np.int32),
            )
            read.state = _STATES.get(self._agent.transfer(read.transfer), TransferState.FAILED)
        except Exception as error:
            failure = repr(error)
        if failure:
            self._ledger.ended()
            read.transfer = None
            raise HandoffError(common_pb2.READ_FAILED, f"a read from {instance_id} could not be posted: {failure}")
        self._num_reads_ever += 1
        self._reads[self._num_reads_ever] = read
        peer.num_reads += 1
        peer.used_at = self._clock()
        return self._num_reads_ever

    def _end_transfer(self, transfer: Any) -> None:
        try:
            transfer.release()
        except Exception as error:
            _log.warning("NIXL keeps a transfer that has ended: %s", repr(error))

    def _forget_if_idle(self, peer: _Peer) -> None:
        if not peer.is_open and peer.num_reads == 0:
            self._forget(peer)

    def _forget_unused(self) -> None:
        """Close every peer that nothing was said to and nothing was read from for IDLE_S; one that is back is met anew."""
        oldest = self._clock() - IDLE_S
        for name in [name for name, peer in list(self._peers.items()) if peer.used_at < oldest]:
            self.close_peer(name)

    def _forget(self, peer: _Peer) -> None:
        name = peer.info.instance_id
        self._peers.pop(name, None)
        try:
            peer.pages.release()
            peer.epochs.release()
            peer.pages = peer.epochs = None
            self._agent.remove_remote_agent(name)
        except Exception as error:
            _log.warning("NIXL could not forget peer %s: %s", name, repr(error))
