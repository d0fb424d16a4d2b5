"""The holder's side of an engine: its readers as peers, and the thread that hears from them while forwards run.

    handoffs = Handoffs(kv); handoffs.start()
    handoffs.add_reader(run.reader)                   HandoffError when it may not be paired
    with kv.lock:
        handoffs.open / announce / finish / abort     see services/kv/lease.py
    ended = handoffs.take_ended()                     for the main loop; raises when the thread has failed
    handoffs.stop()

A lease that a reader is done with frees its pages right in this thread: nobody waits for a forward.
"""
import logging
import threading
import time
from collections import deque

from services.kv.lease import LeaseEnded
from services.kv.messages import PeerRank, RequestKey
from services.kv.peers import Peers
from services.kv.rank_kv import RankKv
from services.runtime.errors import EngineError

logger = logging.getLogger(__name__)


class Handoffs:
    """Peers, leases' events and thread of one rank."""

    def __init__(self, kv: RankKv) -> None:
        self._kv = kv
        self._peers = Peers(kv.transport)
        self._ended: deque[LeaseEnded] = deque()
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._drive, name="handoff", daemon=True)

    def add_reader(self, reader: PeerRank) -> None:
        """Make the reader a peer, now rather than at its first announcement."""
        self._peers.meet(reader)

    def tell(self, key: RequestKey, reader: PeerRank | None, reason: int, message: str) -> None:
        """End a hand-off in whatever state it is, under the lock. A reader hears of it even when the request was never admitted."""
        if reader is None or not self._kv.transport.has_peer(reader.instance_id):
            return
        if self._kv.leases.state(key) is None:
            self._kv.leases.refuse(key, [reader.instance_id], reason, message)
        else:
            self._kv.leases.abort(key, reason, message)

    def tick(self) -> None:
        """One turn of the thread: hear readers, expire leases."""
        for event in self._kv.exchange.tick():
            if isinstance(event, LeaseEnded):  # this rank pulls nothing, so there are no others
                self._ended.append(event)

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

    def _drive(self) -> None:
        try:
            while not self._stopping.is_set():
                self.tick()
                time.sleep(self._kv.exchange.pause_s)
        except Exception as error:  # a bug of ours: the main loop ends the process over it
            logger.exception("the hand-off thread failed")
            self._failure = error
