"""What the router believes each rank's prefix cache holds: one map, page digest -> bit mask of the ranks that hold it.

A prompt is looked up for all ranks in one walk over its digests, which ANDs their masks; its cost does not grow with the number of ranks.

Three sources set a rank's bit, and it stays while any of them does:

    events        what the rank itself published (kv_events.py): exact, in order, bounded by whoever takes them
    approximate   what was computed or received there for this router: for a rank that publishes nothing, or whose events are not in step;
                  bounded by the rank's pages, least recently used first out
    speculative   what was sent there in the last 2 s, for every rank, so that a burst of one prefix stays together

Beyond those 2 s an exact rank's beliefs come from its events alone. A wrong belief costs time, never correctness.

Ranks with unlike fingerprints share the map but cannot mix: a bit belongs to one engine incarnation, which has one fingerprint for life,
so a hit only ever says that this very rank holds the page in its own form; which ranks may be paired is decided before hits are asked for.
Tenants cannot either: their salt is in the digest.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from services.kv.layout import PAGE_SIZE

SPECULATIVE_S = 2.0
SOURCES = ("events", "approximate", "speculative")


class _Holder:
    """One rank's part of the index: its bit, and by source the digests that keep it set."""

    def __init__(self, slot: int, max_pages: int) -> None:
        self.slot, self.bit = slot, 1 << slot
        self.max_pages = max_pages
        self.is_exact = False  # its events are in step
        self.events: set[bytes] = set()
        self.approximate: OrderedDict[bytes, None] = OrderedDict()
        self.speculative: dict[bytes, float] = {}  # digest -> when the belief ends

    def holds(self, digest: bytes) -> bool:
        return digest in self.events or digest in self.approximate or digest in self.speculative


class PrefixIndex:
    """Of instances that were not added, or are gone, nothing is remembered. Times are a monotonic clock's seconds, never going back."""

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}  # never 0
        self._holders: dict[str, _Holder] = {}  # by instance id
        self._free_slots: list[int] = []
        self._num_slots = 0
        self._expectations: deque[tuple[float, _Holder, Sequence[bytes]]] = deque()  # by when they end

    def add(self, instance_id: str, max_pages: int) -> int:
        """A rank that can hold `max_pages` pages came. Returns its slot in what `hit_tokens` gives, which is its own until dropped."""
        if not self._free_slots:
            self._free_slots.append(self._num_slots)
            self._num_slots += 1
        slot = min(self._free_slots)
        self._free_slots.remove(slot)
        self._holders[instance_id] = _Holder(slot, max_pages)
        return slot

    def rename(self, former_id: str, instance_id: str) -> None:
        """The rank goes on under a new id, with its cache and its slot."""
        self._holders[instance_id] = self._holders.pop(former_id)

    def drop(self, instance_id: str) -> None:
        """The instance is gone, and its cache with it."""
        holder = self._holders.pop(instance_id, None)
        if holder is None:
            return
        self._clear(holder, holder.events, holder.approximate, holder.speculative)
        self._expectations = deque(each for each in self._expectations if each[1] is not holder)
        self._free_slots.append(holder.slot)

    def hit_tokens(self, digests: Sequence[bytes], now: float) -> list[int]:
        """By slot: tokens of the longest prefix, in whole pages, that the rank is believed to hold."""
        self._forget(now)
        hits = [0] * self._num_slots
        mask_of, page_size = self._masks.get, PAGE_SIZE
        holding, num_tokens = mask_of(digests[0], 0) if digests else 0, 0
        for digest in digests:
            still = holding & mask_of(digest, 0)
            if still != holding:
                fallen = holding ^ still
                if fallen & (fallen - 1):
                    _fill(hits, fallen, num_tokens)
                else:  # most often one rank falls behind at a time
                    hits[fallen.bit_length() - 1] = num_tokens
                holding = still
                if not holding:
                    return hits
            num_tokens += page_size
        _fill(hits, holding, num_tokens)
        return hits

    def num_hit_tokens(self, instance_id: str, digests: Sequence[bytes], now: float) -> int:
        """`hit_tokens` of one rank, 0 if it is not known."""
        holder = self._holders.get(instance_id)
        return 0 if holder is None else self.hit_tokens(digests, now)[holder.slot]

    def expect(self, instance_id: str, digests: Sequence[bytes], now: float) -> None:
        """A prompt with these pages was sent there: believed for SPECULATIVE_S."""
        holder = self._holders.get(instance_id)
        if holder is not None and digests:
            until = now + SPECULATIVE_S
            holder.speculative.update(dict.fromkeys(digests, until))
            self._set(holder, digests)
            self._expectations.append((until, holder, digests))
        self._forget(now)

    def keep(self, instance_id: str, digests: Sequence[bytes]) -> None:
        """These pages were computed or received there: believed until others push them out; a rank in step says so itself."""
        holder = self._holders.get(instance_id)
        if holder is None or holder.is_exact:
            return
        pages = holder.approximate
        for digest in reversed(digests):  # a chain is of use from its front: that is evicted last
            pages[digest] = None
            pages.move_to_end(digest)
        self._set(holder, digests)
        while len(pages) > holder.max_pages:
            digest, _ = pages.popitem(last=False)
            self._unset(holder, digest)

    def stored(self, instance_id: str, digests: Sequence[bytes]) -> None:
        """The rank says that its cache holds these too."""
        holder = self._holders.get(instance_id)
        if holder is not None:
            holder.events.update(digests)
            self._set(holder, digests)

    def removed(self, instance_id: str, digests: Iterable[bytes]) -> None:
        """The rank says that its cache holds these no longer."""
        holder = self._holders.get(instance_id)
        if holder is not None:
            for digest in digests:
                if digest in holder.events:
                    holder.events.remove(digest)
                    self._unset(holder, digest)

    def cleared(self, instance_id: str) -> None:
        """The rank's cache is empty, or what it holds is to be told anew."""
        holder = self._holders.get(instance_id)
        if holder is not None:
            self._clear(holder, holder.events)

    def set_exact(self, instance_id: str, is_exact: bool) -> None:
        """The rank's events are in step from now on, so what was only guessed goes; or they are no longer: guesses begin beside them."""
        holder = self._holders.get(instance_id)
        if holder is not None:
            holder.is_exact = is_exact
            if is_exact:
                self._clear(holder, holder.approximate)

    def is_exact(self, instance_id: str) -> bool:
        holder = self._holders.get(instance_id)
        return holder is not None and holder.is_exact

    def num_pages(self, instance_id: str, source: str) -> int:
        """Entries of one rank from one of SOURCES."""
        holder = self._holders.get(instance_id)
        return 0 if holder is None else len(getattr(holder, source))

    def count_pages(self, source: str, now: float) -> int:
        """Entries of all ranks from one of SOURCES."""
        self._forget(now)
        return sum(len(getattr(holder, source)) for holder in self._holders.values())

    def check_integrity(self) -> None:
        """Every bit is set by a source and every source has its bit: nothing leaks. For tests: it looks at everything."""
        masks: dict[bytes, int] = {}
        for holder in self._holders.values():
            for digest in {*holder.events, *holder.approximate, *holder.speculative}:
                masks[digest] = masks.get(digest, 0) | holder.bit
        assert masks == self._masks, f"{len(masks)} digests are held, {len(self._masks)} are mapped"
        slots = [holder.slot for holder in self._holders.values()]
        assert sorted(slots + self._free_slots) == list(range(self._num_slots)), f"{slots} {self._free_slots}"

    def _forget(self, now: float) -> None:
        """What was sent too long ago."""
        while self._expectations and self._expectations[0][0] <= now:
            _, holder, digests = self._expectations.popleft()
            for digest in digests:
                if holder.speculative.get(digest, now + 1.0) <= now:  # else sent again since, or forgotten already
                    del holder.speculative[digest]
                    self._unset(holder, digest)

    def _set(self, holder: _Holder, digests: Iterable[bytes]) -> None:
        masks, bit = self._masks, holder.bit
        mask_of = masks.get
        for digest in digests:
            mask = mask_of(digest)
            masks[digest] = bit if mask is None else mask | bit  # most pages have one holder: they share one int

    def _unset(self, holder: _Holder, digest: bytes) -> None:
        """A source let go of `digest`."""
        if not holder.holds(digest):
            mask = self._masks[digest] & ~holder.bit
            if mask:
                self._masks[digest] = mask
            else:
                del self._masks[digest]

    def _clear(self, holder: _Holder, *sources: "set[bytes] | dict[bytes, None] | dict[bytes, float]") -> None:
        for source in sources:
            digests = list(source)
            source.clear()
            for digest in digests:
                self._unset(holder, digest)


def _fill(hits: list[int], mask: int, num_tokens: int) -> None:
    """Set `hits` of every slot in `mask`."""
    if mask.bit_count() > 8:  # three times faster than bit by bit when there are many
        for slot, bit in enumerate(reversed(f"{mask:b}")):
            if bit == "1":
                hits[slot] = num_tokens
        return
    while mask:
        lowest = mask & -mask
        hits[lowest.bit_length() - 1] = num_tokens
        mask ^= lowest
