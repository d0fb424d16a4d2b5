"""All that one rank owns of KV, opened and closed together: memory, pages with prefix cache, hand-offs, and the lock over them.

    kv = open_rank_kv(layout=layout, num_pages=256, transport="nixl", compatibility=mine)
    with kv.lock:                                    whatever touches kv.pool, kv.leases or kv.pulls
        pages = kv.pool.take(3, holder)
    ended = kv.exchange.tick()                       without the lock, by one thread
    former = kv.renew_if_due()                       after it, by the same thread; an instance id when the agent was renewed just now
    kv.memory.pages                                  torch  [num_pages, num_layers, PAGE_SIZE, width]; forwards write it without the lock
    kv.instance_id; kv.transport.metadata()          what the rank's `Up` says
    kv.close()                                       once no thread uses it any more

A renewed agent is a new instance: kv.transport, kv.exchange, kv.leases and kv.pulls are others from then on, so nobody keeps them.
"""
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import psutil

from services.kv.exchange import Exchange, HandoffEvent
from services.kv.kv_pool import KvPool
from services.kv.layout import Compatibility, KvLayout
from services.kv.lease import LeaseTable
from services.kv.memory import KvMemory
from services.kv.puller import Puller
from services.kv.transport import Transport, TransportKind, create_transport, new_instance_id
from services.runtime.errors import ConfigError
from services.runtime.telemetry import count_incident

if TYPE_CHECKING:
    from services.kv.faults import FaultPlan
    from services.kv.local_transport import LocalFabric

_LINGER_S = 0.02  # a closing agent moves what it has said on for so long

_log = logging.getLogger(__name__)


class FenceRule(NamedTuple):
    """When late reads are fenced: more than `share` of all pages are in quarantine, or any page for more than `seconds`."""

    share: float = 0.2
    seconds: float = 60.0


class RankKv:
    """Parts of one engine; `compatibility` is what it may exchange pages under, `open_transport` makes an agent over `memory`."""

    def __init__(
        self, memory: KvMemory, open_transport: Callable[[str], Transport], compatibility: Compatibility, clock: Callable[[], float],
        fence_rule: FenceRule,
    ) -> None:
        self.memory = memory
        self.pool = KvPool(memory)
        self.compatibility = compatibility
        self.lock = threading.Lock()
        self._open_transport, self._clock, self._fence_rule = open_transport, clock, fence_rule
        self._is_fencing = False
        began = time.monotonic()
        self.transport = open_transport(new_instance_id())
        self.renewal_s = time.monotonic() - began  # about what renew_agent takes
        self.exchange = self._new_exchange()

    @property
    def leases(self) -> LeaseTable:
        """This rank as holder."""
        return self.exchange.leases

    @property
    def pulls(self) -> Puller:
        """This rank as reader."""
        return self.exchange.pulls

    @property
    def instance_id(self) -> str:
        """Name of this incarnation, to its peers and to routers."""
        return self.transport.instance_id

    def fence_reason(self) -> str:
        """Why the agent has to be renewed; "" while late reads are few and young."""
        num_quarantined = self.pool.num_quarantined
        if num_quarantined > self._fence_rule.share * self.pool.num_pages:
            return f"late reads keep {num_quarantined} of {self.pool.num_pages} pages in quarantine"
        if num_quarantined and self.pulls.reads.quarantined_s > self._fence_rule.seconds:
            return f"a read is late for more than {self._fence_rule.seconds:g} s"
        return ""

    def renew_if_due(self) -> str:
        """One turn of the fence: begin it, wait for healthy reads, then renew the agent and return the former instance id; else ""."""
        reason = self.fence_reason()
        if bool(reason) != self._is_fencing:
            self._is_fencing = bool(reason)
            with self.lock:
                if reason:
                    self.pulls.stop(f"rank {self.instance_id} renews its transfer agent: {reason}")
                else:
                    self.pulls.resume()  # late reads have ended by themselves
            _log.warning("rank %s: %s", self.instance_id, reason or "late reads have ended, nothing has to be fenced")
        return self.renew_agent() if reason and not self.pulls.reads.num_healthy else ""

    def renew_agent(self) -> str:
        """Fence: void all hand-offs, each side told, open another agent over the same memory, destroy this one, free quarantined pages.

        Returns the former instance id. By the thread that ticks. Others may meet peers and announce meanwhile: the lock is held only while
        the one agent takes the other's place. Raises EngineError when the old agent cannot be destroyed.
        """
        former, late = self.exchange, self.pulls.reads
        reason = self.fence_reason()
        message = f"rank {self.instance_id} has renewed its transfer agent: {reason}"
        fresh = self._open_transport(new_instance_id())
        with self.lock:
            ended = former.void(message)
            fresh.stats.take_over(self.transport.stats)
            self.transport = fresh
            self.exchange = self._new_exchange(ended)
        until = time.monotonic() + _LINGER_S
        while time.monotonic() < until:
            former.transport.notifications()
            time.sleep(_LINGER_S / 20)
        former.transport.close()
        with self.lock:
            num_pages = self.pool.num_quarantined
            late.fenced()
        self._is_fencing = False
        count_incident("agent renewed")
        _log.warning(
            "agent %s was destroyed and %s took its place: %s; %d quarantined pages are free, %d hand-offs were given up",
            former.transport.instance_id, self.instance_id, reason, num_pages, len(ended),
        )
        return former.transport.instance_id

    def _new_exchange(self, ended: list[HandoffEvent] | None = None) -> Exchange:
        page_bytes = self.memory.layout.page_bytes
        return Exchange(self.transport, self.pool.pages, self.lock, page_bytes, clock=self._clock, ended=ended or ())

    def check_integrity(self) -> None:
        """Prove pages and cache under the lock; raises EngineError."""
        with self.lock:
            self.pool.check_integrity()

    def close(self) -> None:
        """End the transport, which unregisters the memory; the memory itself goes with its last reference."""
        self.transport.close()


def open_rank_kv(
    *,
    layout: KvLayout,
    num_pages: int,
    transport: TransportKind,
    compatibility: Compatibility,
    fabric: "LocalFabric | None" = None,
    faults: "FaultPlan | None" = None,
    clock: Callable[[], float] = time.monotonic,
    fence_rule: FenceRule = FenceRule(),
) -> RankKv:
    """Allocate and register `num_pages` pages under a fresh instance id; `fabric` is for the "local" transport, `clock` times leases.

    Raises ConfigError when the machine has not that much memory available.
    """
    num_bytes, available = num_pages * layout.page_bytes, psutil.virtual_memory().available
    if num_bytes > available:
        raise ConfigError(f"num_pages is {num_pages}, which needs {num_bytes:,} bytes but {available:,} are available; lower it")
    memory = KvMemory(layout, num_pages)

    def open_transport(instance_id: str) -> Transport:
        return create_transport(
            transport, instance_id=instance_id, memory=memory, compatibility=compatibility, fabric=fabric, faults=faults
        )

    return RankKv(memory, open_transport, compatibility, clock, fence_rule)
