"""Pages and prefix cache of one rank as its engine sees them: take evicts what it needs.

    kv = KvPool(KvMemory(layout, num_pages))
    kv.num_available                                 most pages that take() could give now: free + held by the cache alone
    pages = kv.match(digests, holder)                longest cached prefix, pinned for `holder`
    pages = kv.take(n, holder)                       evicts least recently used prefixes as needed
    kv.insert(digests, pages, token_ids)             cache final pages; digests and ids of the whole prefix, from page 0 on
    kv.release(holder)                               all it holds
    kv.pages, kv.cache, kv.memory                    the parts

Guarded by the engine's kv lock, like everything that touches pages.
"""
from collections.abc import Sequence

from services.kv.memory import KvMemory
from services.kv.pages import Holder, HolderKind, PagePool
from services.kv.prefix import OnChange, PrefixCache


class KvPool:
    """One rank's KV memory with its bookkeeping."""

    def __init__(self, memory: KvMemory, on_change: OnChange | None = None) -> None:
        self.memory = memory
        self.pages = PagePool(memory.num_pages, memory.epochs)
        self.cache = PrefixCache(self.pages, on_change)

    @property
    def num_pages(self) -> int:
        """Size of the pool."""
        return self.pages.num_pages

    @property
    def num_available(self) -> int:
        """The most pages that one take() could give now."""
        return self.pages.num_free + self.pages.num_idle_cached

    @property
    def num_quarantined(self) -> int:
        """Pages kept because a late read may still land in them."""
        return self.pages.num_holds(HolderKind.QUARANTINE)

    def match(self, digests: Sequence[bytes], holder: Holder) -> list[int]:
        """Pin the longest cached prefix for `holder` and return its pages, one a digest matched."""
        pages = self.cache.match(digests)
        self.pages.hold(pages, holder)
        return pages

    def take(self, num_pages: int, holder: Holder) -> list[int]:
        """Give `holder` fresh pages; more than `num_available` is a bug of the caller (EngineError)."""
        missing = num_pages - self.pages.num_free
        if missing > 0:
            self.cache.evict(missing)
        return self.pages.take(num_pages, holder)

    def insert(self, digests: Sequence[bytes], pages: Sequence[int], token_ids: Sequence[int]) -> list[bytes]:
        """Cache final pages that somebody holds; `token_ids` are all of the sequence's. Returns the digests that are new."""
        return self.cache.insert(digests, pages, token_ids)

    def release(self, holder: Holder) -> None:
        """Take `holder` off everything it holds."""
        self.pages.release(holder)

    def check_integrity(self) -> None:
        """Prove pages and cache; raises EngineError."""
        self.pages.check_integrity()
        self.cache.check_integrity()
