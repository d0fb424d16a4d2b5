"""All that one rank owns of KV, opened and closed together: memory, pages with prefix cache, hand-offs, and the lock over them.

    kv = open_rank_kv(layout=layout, num_pages=256, transport="nixl", compatibility=mine)
    with kv.lock:                                    whatever touches kv.pool, kv.leases or kv.pulls
        pages = kv.pool.take(3, holder)
    ended = kv.exchange.tick()                       without the lock, by one thread
    kv.memory.pages                                  torch  [num_pages, num_layers, PAGE_SIZE, width]; forwards write it without the lock
    kv.instance_id; kv.transport.metadata()          what the rank's `Up` says
    kv.close()                                       once no thread uses it any more
"""
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil

from services.kv.exchange import Exchange
from services.kv.kv_pool import KvPool
from services.kv.layout import Compatibility, KvLayout
from services.kv.lease import LeaseTable
from services.kv.memory import KvMemory
from services.kv.puller import Puller
from services.kv.transport import Transport, TransportKind, create_transport, new_instance_id
from services.runtime.errors import ConfigError

if TYPE_CHECKING:
    from services.kv.local_transport import LocalFabric


class RankKv:
    """Parts of one engine incarnation; `compatibility` is what it may exchange pages under."""

    def __init__(self, memory: KvMemory, transport: Transport, compatibility: Compatibility, clock: Callable[[], float]) -> None:
        self.memory = memory
        self.pool = KvPool(memory)
        self.transport = transport
        self.compatibility = compatibility
        self.lock = threading.Lock()
        self.exchange = Exchange(transport, self.pool.pages, self.lock, memory.layout.page_bytes, clock=clock)

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
    clock: Callable[[], float] = time.monotonic,
) -> RankKv:
    """Allocate and register `num_pages` pages under a fresh instance id; `fabric` is for the "local" transport, `clock` times leases.

    Raises ConfigError when the machine has not that much memory available.
    """
    num_bytes, available = num_pages * layout.page_bytes, psutil.virtual_memory().available
    if num_bytes > available:
        raise ConfigError(f"num_pages is {num_pages}, which needs {num_bytes:,} bytes but {available:,} are available; lower it")
    memory = KvMemory(layout, num_pages)
    opened = create_transport(transport, instance_id=new_instance_id(), memory=memory, compatibility=compatibility, fabric=fabric)
    return RankKv(memory, opened, compatibility, clock)
