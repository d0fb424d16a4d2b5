"""The prefix cache: full, final pages by chained digest (`hash.py`), least recently used leaves evicted first.

    pages = cache.match(digests)                 longest cached prefix, as page numbers; touches it, pins nothing
    cache.insert(digests, pages, token_ids)      digests[i] names pages[i], from the first page of the prompt on; returns what is new
    cache.evict(n)                               frees up to n pages, returns how many

The cache is one more holder of its pages (kind cache, key = digest). A page that anybody else holds is pinned. Guarded by the kv lock.
Token ids are no business of the cache itself: it hands them on to whoever hears of its changes (event_log.py).
"""
import heapq
from collections.abc import KeysView, Sequence
from typing import Protocol

from services.kv.hash import ROOT
from services.kv.layout import PAGE_SIZE
from services.kv.pages import Holder, HolderKind, PagePool
from services.runtime.errors import EngineError


class OnChange(Protocol):
    """Hears of every change, in order, under the kv lock: it may only note them."""

    def stored(self, parent: bytes, digests: Sequence[bytes], ids: Sequence[int]) -> None:
        """A chain entered the cache behind `parent` (ROOT: it is a prompt's first); PAGE_SIZE `ids` a page."""
        ...

    def removed(self, digests: Sequence[bytes]) -> None:
        """Pages left the cache, children first."""
        ...


class _Node:
    __slots__ = ("last_used", "num_children", "page", "parent")

    def __init__(self, page: int, parent: bytes) -> None:
        self.page = page
        self.parent = parent
        self.num_children = 0
        self.last_used = 0


class PrefixCache:
    """A tree of pages, keyed by digest; a node's digest covers its whole prefix, so a flat map is enough."""

    def __init__(self, pool: PagePool, on_change: OnChange | None = None) -> None:
        self._pool = pool
        self._on_change = on_change
        self._nodes: dict[bytes, _Node] = {}
        self._clock = 0
        self._leaves: list[tuple[int, bytes]] = []  # heap of (last used, digest); entries that no longer hold are skipped

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._nodes

    @property
    def digests(self) -> KeysView[bytes]:
        """Of all pages that are cached."""
        return self._nodes.keys()

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Pages of the longest cached prefix of `digests`; the caller holds them before the kv lock is left."""
        found: list[bytes] = []
        for digest in digests:
            if digest not in self._nodes:
                break
            found.append(digest)
        self._touch(found)
        return [self._nodes[digest].page for digest in found]

    def insert(self, digests: Sequence[bytes], pages: Sequence[int], token_ids: Sequence[int]) -> list[bytes]:
        """Cache `pages` (held by the caller); a digest that is cached already keeps its older page. Returns the digests stored.

        `token_ids` are the sequence's, from its first on: PAGE_SIZE a page at least, what lies behind is ignored.
        """
        assert len(digests) == len(pages), f"{len(digests)=} {len(pages)=}"
        assert len(token_ids) >= PAGE_SIZE * len(pages), f"{len(token_ids)=} {len(pages)=}"
        stored: list[bytes] = []
        parent = ROOT
        for digest, page in zip(digests, pages, strict=True):
            if digest not in self._nodes:
                self._pool.hold([page], Holder(HolderKind.CACHE, digest))
                self._nodes[digest] = _Node(page, parent)
                if parent != ROOT:
                    self._nodes[parent].num_children += 1
                stored.append(digest)
            parent = digest
        self._touch(digests)
        if stored and self._on_change:  # what is new is the end of the chain: a page never outlives its parent here
            first = len(digests) - len(stored)
            ids = token_ids[PAGE_SIZE * first : PAGE_SIZE * len(digests)]
            self._on_change.stored(digests[first - 1] if first else ROOT, stored, ids)
        return stored

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages that only the cache holds, oldest leaves first; epochs stay as they are."""
        goal = min(num_pages, self._pool.num_idle_cached)
        num_freed = 0
        removed: list[bytes] = []
        pinned: list[tuple[int, bytes]] = []
        while num_freed < goal:
            if not self._leaves:
                # Only pinned leaves are left and what is idle lies above them: forget the oldest (its page stays with its holders).
                victim, pinned = min(pinned)[1], sorted(pinned)[1:]
            else:
                entry = heapq.heappop(self._leaves)
                victim = entry[1]
                if not self._is_current(entry):
                    continue
                if len(self._pool.holders_of(self._nodes[victim].page)) > 1:
                    pinned.append(entry)
                    continue
                num_freed += 1
            self._remove(victim)
            removed.append(victim)
        for entry in pinned:
            heapq.heappush(self._leaves, entry)
        if removed and self._on_change:
            self._on_change.removed(removed)
        return num_freed

    def check_integrity(self) -> None:
        """Every node holds its page under its digest, parents exist, children are counted, every leaf can be found."""
        children = dict.fromkeys(self._nodes, 0)
        current = {entry[1] for entry in self._leaves if self._is_current(entry)}
        for digest, node in self._nodes.items():
            if Holder(HolderKind.CACHE, digest) not in self._pool.holders_of(node.page):
                raise EngineError(f"prefix cache names page {node.page} for {digest.hex()} but does not hold it")
            if node.parent != ROOT:
                children[node.parent] += 1
        for digest, node in self._nodes.items():
            if children[digest] != node.num_children or (node.num_children == 0) != (digest in current):
                raise EngineError(f"prefix cache counts {node.num_children} children of {digest.hex()} but has {children[digest]}")
        if self._pool.num_holds(HolderKind.CACHE) != len(self._nodes):
            raise EngineError(f"cache holds {self._pool.num_holds(HolderKind.CACHE)} pages but has {len(self._nodes)} entries")

    def _is_current(self, entry: tuple[int, bytes]) -> bool:
        node = self._nodes.get(entry[1])
        return node is not None and node.num_children == 0 and node.last_used == entry[0]

    def _touch(self, digests: Sequence[bytes]) -> None:
        self._clock += 1
        for digest in digests:
            self._nodes[digest].last_used = self._clock
        if digests:
            self._push_if_leaf(digests[-1])

    def _push_if_leaf(self, digest: bytes) -> None:
        node = self._nodes[digest]
        if node.num_children == 0:
            heapq.heappush(self._leaves, (node.last_used, digest))
        if len(self._leaves) > 2 * len(self._nodes) + 64:
            self._leaves = [(node.last_used, digest) for digest, node in self._nodes.items() if node.num_children == 0]
            heapq.heapify(self._leaves)

    def _remove(self, digest: bytes) -> None:
        node = self._nodes.pop(digest)
        self._pool.drop([node.page], Holder(HolderKind.CACHE, digest))
        parent = self._nodes.get(node.parent)
        if parent is not None:
            parent.num_children -= 1
            self._push_if_leaf(node.parent)
