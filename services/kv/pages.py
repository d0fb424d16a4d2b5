"""Who holds which page. A page is free exactly when nobody holds it, writable exactly when its sole holder is one request.

    holder = Holder(HolderKind.REQUEST, key)          key: any hashable, unique within its kind
    pages = pool.take(3, holder)                      free -> held by `holder`; raises each page's epoch before anything can write
    pool.hold(pages, Holder(HolderKind.LEASE, key))   one more holder; the page must be held already
    pool.drop(pages, holder); pool.release(holder)    these pages / all it holds; without a holder left a page is free
    pool.is_writable(page, holder); pool.pages_of(holder); pool.holders_of(page); pool.num_free; pool.num_holds(kind)
    pool.check_integrity()                            raises EngineError naming the page

Not thread safe: the engine's kv lock guards the pool, the prefix cache, leases and pulls together.
"""
from collections.abc import Hashable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from services.runtime.errors import EngineError


class HolderKind(StrEnum):
    """Why a page is kept."""

    CACHE = "cache"  # the prefix cache; key = digest
    REQUEST = "request"  # a request that computes or runs
    LEASE = "lease"  # promised to a reader
    READ = "read"  # destination of a read in flight
    QUARANTINE = "quarantine"  # destination of a read that is late and may still land


class Holder(NamedTuple):
    """One reason to keep pages."""

    kind: HolderKind
    key: Hashable


class PageCounts(NamedTuple):
    """Every page in exactly one state: the last one below that it has a holder of."""

    free: int  # nobody's
    cached: int  # the prefix cache's alone: what eviction can free
    leased: int  # kept for a reader and no request, perhaps by the cache too
    request: int  # a request's, or the destination of a read under way
    quarantined: int  # a late read may still land there

    @property
    def used(self) -> int:
        """Pages that nobody else could be given now."""
        return self.leased + self.request + self.quarantined


_STATES = {HolderKind.CACHE: 1, HolderKind.LEASE: 2, HolderKind.REQUEST: 3, HolderKind.READ: 3, HolderKind.QUARANTINE: 4}
_CACHED = _STATES[HolderKind.CACHE]


class PagePool:
    """Pages `0 .. num_pages - 1` and their holders; `epochs` [num_pages] uint64 is the memory that peers read."""

    def __init__(self, num_pages: int, epochs: np.ndarray) -> None:
        assert epochs.shape == (num_pages,) and epochs.dtype == np.uint64, f"{epochs.shape=} {epochs.dtype=} {num_pages=}"
        self.num_pages = num_pages
        self._epochs = epochs
        # Last freed, first taken: memory that was never needed is never touched.
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders: list[set[Holder]] = [set() for _ in range(num_pages)]
        self._pages: dict[Holder, dict[int, None]] = {}
        self._num_holds = dict.fromkeys(HolderKind, 0)
        self._states = [0] * num_pages  # index into PageCounts
        self._counts = [num_pages, 0, 0, 0, 0]  # of PageCounts

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def num_idle_cached(self) -> int:
        """Pages that only the prefix cache holds: what eviction can free."""
        return self._counts[_CACHED]

    @property
    def counts(self) -> PageCounts:
        """How many pages are in which state."""
        return PageCounts(*self._counts)

    def num_holds(self, kind: HolderKind) -> int:
        """(page, holder) pairs of this kind."""
        return self._num_holds[kind]

    def holders_of(self, page: int) -> frozenset[Holder]:
        """Everybody who holds `page`."""
        return frozenset(self._holders[page])

    def pages_of(self, holder: Holder) -> list[int]:
        """Pages that `holder` holds, in the order it came to them."""
        return list(self._pages.get(holder, ()))

    def epoch(self, page: int) -> int:
        """The page's present epoch."""
        return int(self._epochs[page])

    def is_writable(self, page: int, holder: Holder) -> bool:
        """Whether `holder`, a request, may write: nobody else holds the page."""
        return holder.kind is HolderKind.REQUEST and self._holders[page] == {holder}

    def take(self, num_pages: int, holder: Holder) -> list[int]:
        """Move `num_pages` free pages to `holder`; more than `num_free` is a bug of the caller."""
        if num_pages > len(self._free):
            raise EngineError(f"{holder} takes {num_pages} pages but {len(self._free)} are free; ask num_free first")
        if num_pages == 0:
            return []
        taken = self._free[-num_pages:][::-1]
        del self._free[-num_pages:]
        self._epochs[taken] += np.uint64(1)  # before the caller can launch a write or a read into them
        for page in taken:
            self._add(page, holder)
        return taken

    def hold(self, pages: Iterable[int], holder: Holder) -> None:
        """Add `holder` to pages that somebody holds already."""
        for page in pages:
            if not self._holders[page]:
                raise EngineError(f"{holder} holds page {page}, which is free; only take() brings a page out of free")
            self._add(page, holder)

    def drop(self, pages: Iterable[int], holder: Holder) -> None:
        """Take `holder` off these pages; those without a holder left become free."""
        for page in pages:
            self._remove(page, holder)

    def release(self, holder: Holder) -> None:
        """Take `holder` off everything it holds; nothing held is no error."""
        self.drop(self.pages_of(holder), holder)

    def _add(self, page: int, holder: Holder) -> None:
        holders = self._holders[page]
        if holder in holders:
            raise EngineError(f"{holder} holds page {page} already")
        holders.add(holder)
        state = _STATES[holder.kind]
        if state > self._states[page]:
            self._set_state(page, state)
        self._pages.setdefault(holder, {})[page] = None
        self._num_holds[holder.kind] += 1

    def _remove(self, page: int, holder: Holder) -> None:
        holders = self._holders[page]
        if holder not in holders:
            raise EngineError(f"{holder} drops page {page}, which it does not hold")
        holders.remove(holder)
        if not holders:
            self._set_state(page, 0)
        elif _STATES[holder.kind] == self._states[page]:
            self._set_state(page, _state_of(holders))
        self._num_holds[holder.kind] -= 1
        mine = self._pages[holder]
        del mine[page]
        if not mine:
            del self._pages[holder]
        if not holders:
            self._free.append(page)

    def _set_state(self, page: int, state: int) -> None:
        self._counts[self._states[page]] -= 1
        self._counts[state] += 1
        self._states[page] = state

    def check_integrity(self) -> None:
        """Prove every invariant from scratch; costs time in proportion to the pool."""
        self._check_free()
        seen = dict.fromkeys(HolderKind, 0)
        for page, holders in enumerate(self._holders):
            for holder in holders:
                seen[holder.kind] += 1
                if page not in self._pages.get(holder, ()):
                    raise EngineError(f"page {page} names {holder}, whose own list lacks it")
        if seen != self._num_holds or sum(seen.values()) != sum(len(pages) for pages in self._pages.values()):
            raise EngineError(f"pages are held {seen} times but the counters say {self._num_holds}")
        states = [_state_of(holders) for holders in self._holders]
        if states != self._states or [states.count(state) for state in range(len(self._counts))] != self._counts:
            raise EngineError(f"states of pages are {PageCounts(*map(states.count, range(len(self._counts))))} but counted {self.counts}")

    def _check_free(self) -> None:
        unheld: Sequence[int] = [page for page, holders in enumerate(self._holders) if not holders]
        if sorted(self._free) != unheld:
            wrong = sorted(set(self._free) ^ set(unheld)) or "listed twice"
            raise EngineError(f"free list and holders disagree on pages {wrong}")


def _state_of(holders: Iterable[Holder]) -> int:
    return max([_STATES[holder.kind] for holder in holders], default=0)
