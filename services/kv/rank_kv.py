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
The old one is destroyed first, so pages are free whatever comes; where no other can be opened (the node's only link is down) the rank goes
on without: what runs runs on, every peer, claim and lease is refused as FENCED, and each RETRY_S another opening is tried.
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
from services.kv.prefix import OnChange
from services.kv.puller import Puller
from services.kv.transport import Transport, TransportKind, create_transport, new_instance_id
from services.runtime.errors import ConfigError
from services.runtime.telemetry import count_incident

if TYPE_CHECKING:
    from services.kv.faults import FaultPlan
    from services.kv.local_transport import LocalFabric

RETRY_S = 1.0  # between two tries to open an agent
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
        fence_rule: FenceRule, on_change: OnChange | None = None,
    ) -> None:
        self.memory = memory
        self.pool = KvPool(memory, on_change)
        self.compatibility = compatibility
        self.lock = threading.Lock()
        self._open_transport, self._clock, self._fence_rule = open_transport, clock, fence_rule
        self._is_fencing = False
        self._trouble, self._retry_at = "", 0.0  # the agent is destroyed and no other could be opened: why, and when to try again
        began = time.monotonic()
        self.transport = open_transport(new_instance_id())
        self.renewal_s = time.monotonic() - began  # about what renew_agent takes, and what another try to open an agent does
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
        """Why the agent has to be renewed, or could not be yet; "" while late reads are few and young."""
        if self._trouble:
            return self._trouble
        num_quarantined = self.pool.num_quarantined
        if num_quarantined > self._fence_rule.share * self.pool.num_pages:
            return f"late reads keep {num_quarantined} of {self.pool.num_pages} pages in quarantine"
        if num_quarantined and self.pulls.reads.quarantined_s > self._fence_rule.seconds:
            return f"a read is late for more than {self._fence_rule.seconds:g} s"
        return ""

    def renew_if_due(self) -> str:
        """One turn of the fence: begin it, wait for healthy reads, then renew the agent and return the former instance id; else ""."""
        if self._trouble:
            return self._open() if self._clock() >= self._retry_at else ""
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
        """Fence: void all hand-offs, each side told, destroy the agent, free quarantined pages, open another agent over the same memory.

        Returns the former instance id, or "" when no agent could be opened: renew_if_due tries again. By the thread that ticks. Others may
        meet peers and announce meanwhile: what they do is told as FENCED. Raises EngineError when the old agent cannot be destroyed.
        """
        if not self._trouble:
            self._fence(self.fence_reason())
        return self._open()

    def _fence(self, reason: str) -> None:
        former = self.exchange
        with self.lock:
            former.void(f"rank {self.instance_id} renews its transfer agent: {reason}")
        until = time.monotonic() + _LINGER_S
        while time.monotonic() < until:
            former.transport.notifications()
            time.sleep(_LINGER_S / 20)
        former.transport.close()
        with self.lock:
            num_pages = self.pool.num_quarantined
            former.pulls.reads.fenced()
        self._is_fencing = False
        _log.warning("agent %s was destroyed: %s; %d quarantined pages are free", self.instance_id, reason, num_pages)

    def _open(self) -> str:
        """Open an agent in place of the destroyed one; its id, or "" when that fails."""
        former = self.exchange
        try:
            fresh = self._open_transport(new_instance_id())
        except ConfigError as error:
            self._trouble = f"rank {former.transport.instance_id} has no transfer agent, its former one is destroyed: {error}"
            self._retry_at = self._clock() + RETRY_S
            count_incident("agent not opened")
            _log.warning("%s; it tries again in %g s", self._trouble, RETRY_S)
            return ""
        with self.lock:
            ended = former.take_void()
            fresh.stats.take_over(self.transport.stats)
            self.transport = fresh
            self.exchange = self._new_exchange(ended)
        self._trouble = ""
        count_incident("agent renewed")
        _log.warning("agent %s took the place of %s", self.instance_id, former.transport.instance_id)
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
    kv_network: str = "",
    on_change: OnChange | None = None,
) -> RankKv:
    """Allocate and register `num_pages` pages under a fresh instance id; `fabric` is for the "local" transport, `clock` times leases.

    `on_change` hears what the prefix cache stores and removes.

    Raises ConfigError when the machine has not that much memory available, or no device in `kv_network` (a CIDR; "" = any).
    """
    num_bytes, available = num_pages * layout.page_bytes, psutil.virtual_memory().available
    if num_bytes > available:
        raise ConfigError(f"num_pages is {num_pages}, which needs {num_bytes:,} bytes but {available:,} are available; lower it")
    memory = KvMemory(layout, num_pages)

    def open_transport(instance_id: str) -> Transport:
        return create_transport(
            transport, instance_id=instance_id, memory=memory, compatibility=compatibility, fabric=fabric, faults=faults,
            kv_network=kv_network,
        )

    return RankKv(memory, open_transport, compatibility, clock, fence_rule, on_change)
