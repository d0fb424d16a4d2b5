"""Faults on request: a proxy around any transport that keeps every word of its contract (transport.py). Off unless [faults] says otherwise.

    plan = fault_plan(config.faults, "decode", rank)          fault_control.py; None when all is off
    transport = FaultTransport(inner, plan)                   create_transport does it

Notifications are dropped, duplicated, delayed, or reordered (kept until the next one to the same peer has gone). Reads of pages and of
epoch words fail when posted or, after the bytes have landed, in the end; stall (landed, but RUNNING for a while) or are late (posted, and
so landed, only after a while). Drawn from `seed`, role and rank, so that one thread's run repeats.

While a cluster runs, a file `<control>.<role>.<rank>.json` (fault_control.py) changes the rates and arms a signal on a moment of a request.
"""
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from proto.baton.v1 import common_pb2
from services.kv.messages import Message, decode
from services.kv.transport import TransferState, Transport, TransportStats
from services.runtime.config import FaultRates
from services.runtime.errors import HandoffError
from services.runtime.telemetry import count_incident


class Watch(Protocol):
    """Who may change the rates at run time and wants to know what passes (fault_control.py)."""

    def rates(self) -> FaultRates | None: ...
    def said(self, peer: str, message: Message) -> None: ...
    def heard(self, peer: str, message: Message) -> None: ...
    def reading(self, peer: str, remote_pages: Sequence[int], *, of_epochs: bool) -> None: ...


class FaultPlan:
    """What to inject, shared by all transports that a rank opens one after another. `num_injected` counts by kind."""

    def __init__(self, rates: FaultRates, seed: str, watch: Watch | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.rates, self.watch, self.clock = rates, watch, clock
        self.num_injected: Counter[str] = Counter()
        self._random = random.Random(seed)  # seeded by text: independent of the interpreter's hash seed

    def strikes(self, kind: str) -> bool:
        """Whether this fault happens now; counted."""
        rate: float = getattr(self.rates, kind)
        if rate <= 0.0 or self._random.random() >= rate:
            return False
        self.num_injected[kind] += 1
        count_incident(f"fault injected: {kind}")
        return True


class _Read:
    """A read as its caller sees it; `inner` is its handle at the transport below, None while it is kept back."""

    def __init__(self, peer: str, remote_pages: Sequence[int], local_pages: Sequence[int], *, of_epochs: bool) -> None:
        self.peer, self.of_epochs = peer, of_epochs
        self.remote_pages, self.local_pages = list(remote_pages), list(local_pages)
        self.inner: int | None = None
        self.not_before = 0.0  # late: when it is posted; stalled: when it may be seen to have ended
        self.fails = False
        self.state = TransferState.RUNNING


class FaultTransport:
    """See Transport."""

    def __init__(self, inner: Transport, plan: FaultPlan) -> None:
        self._inner, self._plan = inner, plan
        self._lock = threading.Lock()  # messages kept back: several threads send
        self._kept: deque[tuple[float, str, bytes]] = deque()  # until when, to whom, what
        self._waiting: dict[str, bytes] = {}  # to be overtaken by the next message to that peer
        self._reads: dict[int, _Read] = {}
        self._closing: set[str] = set()  # closed by the caller, kept below while late reads are to be posted
        self._num_reads_ever = 0

    @property
    def instance_id(self) -> str:
        """See Transport."""
        return self._inner.instance_id

    @property
    def stats(self) -> TransportStats:
        """See Transport."""
        return self._inner.stats

    def metadata(self) -> bytes:
        """See Transport."""
        return self._inner.metadata()

    def add_peer(self, blob: bytes) -> str:
        """See Transport."""
        name = self._inner.add_peer(blob)
        if name in self._closing:
            raise HandoffError(common_pb2.PEER_GONE, f"peer {name} is closed until its late reads have ended")
        return name

    def has_peer(self, instance_id: str) -> bool:
        """See Transport."""
        return instance_id not in self._closing and self._inner.has_peer(instance_id)

    def hold(self) -> None:
        """See Transport."""
        self._inner.hold()

    def close_peer(self, instance_id: str) -> None:
        """See Transport. With reads that are still kept back it goes only after they were posted: they are in flight for the caller."""
        if any(read.peer == instance_id and read.inner is None and read.state is TransferState.RUNNING for read in self._reads.values()):
            self._closing.add(instance_id)
        else:
            self._inner.close_peer(instance_id)

    def notify(self, instance_id: str, payload: bytes) -> bool:
        """See Transport. What is lost or late looks sent."""
        plan = self._plan
        if not self.has_peer(instance_id):
            return self._inner.notify(instance_id, payload)
        if plan.strikes("drop"):
            sent = True
        elif plan.strikes("delay"):
            with self._lock:
                self._kept.append((plan.clock() + plan.rates.delay_s, instance_id, payload))
            sent = True
        elif instance_id not in self._waiting and plan.strikes("reorder"):
            with self._lock:
                self._waiting[instance_id] = payload
                self._kept.append((plan.clock() + plan.rates.delay_s, instance_id, b""))  # nothing may follow: it goes then
            sent = True
        else:
            sent = self._inner.notify(instance_id, payload)
            self._send_overtaken(instance_id)
            if plan.strikes("duplicate"):
                self._inner.notify(instance_id, payload)
        if plan.watch:
            plan.watch.said(instance_id, decode(payload))
        return sent

    def notifications(self) -> list[tuple[str, bytes]]:
        """See Transport. Also lets go what is due."""
        received, watch = self._inner.notifications(), self._plan.watch
        if watch:
            self._plan.rates = watch.rates() or self._plan.rates
            for sender, payload in received:
                try:
                    watch.heard(sender, decode(payload))
                except ValueError:
                    continue  # no message: the exchange says so
        self._send_due()
        return received

    def read_pages(self, instance_id: str, remote_pages: Sequence[int], local_pages: Sequence[int]) -> int:
        """See Transport."""
        return self._read(_Read(instance_id, remote_pages, local_pages, of_epochs=False))

    def read_epochs(self, instance_id: str, remote_pages: Sequence[int], local_pages: Sequence[int]) -> int:
        """See Transport."""
        return self._read(_Read(instance_id, remote_pages, local_pages, of_epochs=True))

    def poll(self, handle: int) -> TransferState:
        """See Transport."""
        read, now = self._reads[handle], self._plan.clock()
        if read.state is not TransferState.RUNNING or now < read.not_before:
            return read.state
        if read.inner is None:
            self._post_late(read)
        if read.inner is not None:
            read.state = self._inner.poll(read.inner)
        if read.state is TransferState.DONE and read.fails:
            read.state = TransferState.FAILED
        return read.state

    def epochs(self, handle: int) -> list[int]:
        """See Transport."""
        inner = self._reads[handle].inner
        assert inner is not None, f"read {handle} is not DONE"
        return self._inner.epochs(inner)

    def release(self, handle: int) -> None:
        """See Transport."""
        read = self._reads.pop(handle)
        if read.inner is not None:
            self._inner.release(read.inner)

    def close(self) -> None:
        """See Transport. What is kept back is never posted and never sent."""
        self._reads.clear()
        with self._lock:
            self._kept.clear()
            self._waiting.clear()
        self._inner.close()

    def _read(self, read: _Read) -> int:
        plan = self._plan
        if not self.has_peer(read.peer):
            raise HandoffError(common_pb2.PEER_GONE, f"no read goes to {read.peer}: it is no open peer of {self.instance_id}")
        if plan.strikes("fail_post"):
            raise HandoffError(common_pb2.READ_FAILED, f"a read from {read.peer} was not posted: a fault was asked for")
        if plan.strikes("late"):
            read.not_before = plan.clock() + plan.rates.stall_s
        else:
            read.inner = self._post(read)
            if plan.strikes("stall"):
                read.not_before = plan.clock() + plan.rates.stall_s
        read.fails = plan.strikes("fail_read")
        self._num_reads_ever += 1
        self._reads[self._num_reads_ever] = read
        if plan.watch:
            plan.watch.reading(read.peer, read.remote_pages, of_epochs=read.of_epochs)
        return self._num_reads_ever

    def _post(self, read: _Read) -> int:
        post = self._inner.read_epochs if read.of_epochs else self._inner.read_pages
        return post(read.peer, read.remote_pages, read.local_pages)

    def _post_late(self, read: _Read) -> None:
        """Nothing was posted before, so one that cannot be posted now has ended."""
        try:
            read.inner = self._post(read)
        except HandoffError:
            read.state = TransferState.FAILED
        if read.peer in self._closing:
            self._closing.discard(read.peer)
            self.close_peer(read.peer)

    def _send_due(self) -> None:
        now, due = self._plan.clock(), []
        with self._lock:
            for each in [each for each in self._kept if each[0] <= now]:
                self._kept.remove(each)
                due.append(each)
        for _, peer, payload in due:
            if payload:
                self._inner.notify(peer, payload)
            else:
                self._send_overtaken(peer)

    def _send_overtaken(self, peer: str) -> None:
        with self._lock:
            payload = self._waiting.pop(peer, None)
        if payload is not None:
            self._inner.notify(peer, payload)
