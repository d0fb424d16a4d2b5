"""What a rank has told about its prefix cache: numbered batches, the newest of them kept, and the state that they add up to.

    log = KvEventLog(rank)
    cache.insert / cache.evict          under the kv lock they call log.stored and log.removed, which only note the change
    log.number()                        by the one thread that publishes: changes so far as (sequence, payload), most often one or none
    log.since(start)                    answer to a replay: kept batches, or one snapshot where they begin too late
    log.digests                         what a reader of all batches holds now

Only the cache's changes cross threads. Batches are made, kept and added up by one thread, so a snapshot is exactly the state behind the
newest number, whatever the cache does meanwhile. No sockets, no torch. Wire and reader: event_messages.py.
"""
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence
from typing import NamedTuple

import msgspec

from services.kv.event_messages import MEDIUM, AllBlocksCleared, BlockRemoved, KvEvent
from services.kv.hash import ROOT
from services.kv.layout import PAGE_SIZE

# What a reader may miss and still hear batch by batch; behind that a snapshot says it shorter. vLLM, which has none, keeps 10,000.
KEPT_BATCHES = 1000
KEPT_BYTES = 16 << 20
_BATCH_PAGES = 1024  # a batch takes no further change once it tells of so many

Numbered = tuple[int, bytes]  # sequence, payload


class _Stored(KvEvent, frozen=True, tag="BlockStored", gc=False):
    """BlockStored to be sent: token ids are encoded already."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: None
    medium: str
    lora_name: None


class _Change(NamedTuple):
    """Under the lock: `ids` are of the stored digests' pages, and empty where they were removed."""

    parent: bytes
    digests: Sequence[bytes]
    ids: Sequence[int]


class _Page(msgspec.Struct, frozen=True, gc=False):
    parent: bytes
    ids: bytes  # msgpack of each, one behind the other


class KvEventLog:
    """`stored` and `removed` belong to whoever holds the kv lock, everything else to the thread that publishes."""

    def __init__(self, rank: int, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since 1970."""
        self._rank, self._clock = rank, clock
        self._changes: deque[_Change] = deque()
        self._pages: dict[bytes, _Page] = {}  # a page stands behind its parent, which cannot leave before it
        self._kept: deque[Numbered] = deque()
        self._num_bytes = 0  # of those kept
        self._next = 0
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def digests(self) -> KeysView[bytes]:
        """Pages that the batches so far leave stored."""
        return self._pages.keys()

    @property
    def newest(self) -> int:
        """Number of the newest batch, -1 = none yet."""
        return self._next - 1

    # ---- under the kv lock

    def stored(self, parent: bytes, digests: Sequence[bytes], ids: Sequence[int]) -> None:
        """A chain entered the cache behind `parent` (ROOT: it is a prompt's first); PAGE_SIZE `ids` a page."""
        assert len(ids) == len(digests) * PAGE_SIZE, f"{len(ids)=} {len(digests)=}"
        self._changes.append(_Change(parent, digests, ids))

    def removed(self, digests: Sequence[bytes]) -> None:
        """Pages left the cache, children first."""
        self._changes.append(_Change(ROOT, digests, ()))

    # ---- the publishing thread

    def number(self) -> list[Numbered]:
        """Batches of all changes so far."""
        batches: list[Numbered] = []
        while self._changes:
            batch = self._next, self._payload([self._apply(change) for change in self._take()])
            self._next += 1
            self._keep(batch)
            batches.append(batch)
        return batches

    def since(self, start: int) -> Iterable[Numbered]:
        """What a reader lacks who has everything below `start`.

        One that asks for what is not kept any more, or was never told (it speaks of another incarnation), gets a snapshot.
        """
        oldest = self._next - len(self._kept)
        if oldest <= start <= self._next:
            return [self._kept[index] for index in range(start - oldest, len(self._kept))]
        return [(self.newest, self._snapshot())] if self._next else []

    def _take(self) -> Iterator[_Change]:
        """Changes for one batch, at least one."""
        num_pages = 0
        while self._changes and num_pages < _BATCH_PAGES:
            change = self._changes.popleft()
            num_pages += len(change.digests)
            yield change

    def _apply(self, change: _Change) -> KvEvent:
        if not change.ids:
            for digest in change.digests:
                del self._pages[digest]
            return BlockRemoved(list(change.digests), MEDIUM)
        parent, pages = change.parent, list[_Page]()
        for index, digest in enumerate(change.digests):
            ids = list(change.ids[index * PAGE_SIZE : (index + 1) * PAGE_SIZE])
            self._pages[digest] = page = _Page(parent, self._encoder.encode(ids)[len(_header(PAGE_SIZE)) :])
            pages.append(page)
            parent = digest
        return _stored(list(change.digests), pages)

    def _keep(self, batch: Numbered) -> None:
        self._kept.append(batch)
        self._num_bytes += len(batch[1])
        while len(self._kept) > KEPT_BATCHES or self._num_bytes > KEPT_BYTES:
            self._num_bytes -= len(self._kept.popleft()[1])

    def _snapshot(self) -> bytes:
        """The whole cache as one payload."""
        events: list[KvEvent] = [AllBlocksCleared()]
        digests, pages = list[bytes](), list[_Page]()
        for digest, page in self._pages.items():
            if digests and page.parent != digests[-1]:
                events.append(_stored(digests, pages))
                digests, pages = [], []
            digests.append(digest)
            pages.append(page)
        if digests:
            events.append(_stored(digests, pages))
        return self._payload(events)

    def _payload(self, events: list[KvEvent]) -> bytes:
        return self._encoder.encode((self._clock(), events, self._rank))


def _stored(digests: list[bytes], pages: Sequence[_Page]) -> KvEvent:
    """Of a chain, `pages` as long as `digests`."""
    parent = None if pages[0].parent == ROOT else pages[0].parent
    ids = msgspec.Raw(b"".join([_header(PAGE_SIZE * len(pages)), *(page.ids for page in pages)]))
    return _Stored(digests, parent, ids, PAGE_SIZE, None, MEDIUM, None)


def _header(length: int) -> bytes:
    """Of a msgpack array of `length` elements."""
    if length < 16:
        return bytes([0x90 + length])
    return b"\xdc" + length.to_bytes(2, "big") if length < 1 << 16 else b"\xdd" + length.to_bytes(4, "big")
