"""The reader's side of one hand-off: what is announced, what is read, what is verified. Pure bookkeeping: `puller.py` moves the bytes.

CLAIMED -> FETCHING -> VERIFYING -> READY; from any state -> ABORTED.

CLAIMED    renews the lease and collects announcements (any order, duplicates, gaps); no page of ours is involved
FETCHING   has destination pages; each announcement's pages are read as soon as both are known
VERIFYING  all page reads are done and the last announcement is here: the holder's epoch words of exactly those pages are read
READY      every epoch equals the announced one; otherwise ABORTED with EPOCH_MISMATCH, and nothing that was read is used
"""
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from services.kv.messages import Announce, HandoffState, RequestKey


class PullState(StrEnum):
    """Words of DESIGN.md section 5; VERIFYING is the end of FETCHING."""

    CLAIMED = "claimed"
    FETCHING = "fetching"
    VERIFYING = "verifying"
    READY = "ready"
    ABORTED = "aborted"


class PullStats(msgspec.Struct):
    """Where a hand-off's time went; seconds of the injected clock."""

    num_pages: int = 0  # read
    num_bytes: int = 0  # pages and epoch words
    read_s: float = 0.0  # first read posted -> verified
    exposed_s: float = 0.0  # last announcement heard -> verified
    wait_s: float = 0.0  # claimed -> first read posted (or verified, when none was needed)


class Pull:
    """One hand-off as its reader sees it."""

    def __init__(self, key: RequestKey, holder: str, now: float) -> None:
        self.key = key
        self.holder = holder
        self.state = PullState.CLAIMED
        self.stats = PullStats()
        self.handoff: HandoffState | None = None
        self.next_sequence = 0  # every announcement before it is known
        self.last_renewed = now
        self.silent_since: float | None = None  # when the oldest unanswered renewal was sent
        self.num_reads = 0  # in flight
        self._claimed_at = now
        self._first_read_at: float | None = None
        self._last_announced_at = now
        self._later: dict[int, Announce] = {}  # announcements beyond a gap
        self._announced: dict[int, tuple[int, int]] = {}  # index in the request -> (remote page, epoch)
        self._local: dict[int, int] = {}  # index in the request -> local page, for those that are to be read
        self._to_post: list[list[int]] = []  # indices, one list an announcement
        self._to_read: set[int] = set()  # indices not read yet

    @property
    def has_gap(self) -> bool:
        """Whether an announcement beyond a missing one is here."""
        return bool(self._later)

    @property
    def heard_any(self) -> bool:
        """Whether the holder has announced anything."""
        return self.next_sequence > 0 or bool(self._later)

    def announced(self, announce: Announce, now: float) -> None:
        """Take an announcement in, in whatever order it comes."""
        if announce.sequence < self.next_sequence:
            return
        self._later.setdefault(announce.sequence, announce)
        while (following := self._later.pop(self.next_sequence, None)) is not None:
            self.next_sequence += 1
            self._announced |= {page.index: (page.page, page.epoch) for page in following.pages}
            self._to_post.append([page.index for page in following.pages])
            if following.state is not None:
                self.handoff = following.state
                self._last_announced_at = now

    def begin(self, local_pages: Mapping[int, int]) -> None:
        """Name the destination of every page to be read; indices that are left out are here already."""
        self._local = dict(local_pages)
        self._to_read = set(local_pages)
        self.state = PullState.FETCHING

    def next_batches(self, now: float) -> list[tuple[list[int], list[int], list[int]]]:
        """`(indices, remote pages, local pages)` that can be read now: one batch an announcement."""
        if self.state is not PullState.FETCHING:
            return []
        wanted = ([index for index in indices if index in self._local] for indices in self._to_post)
        batches = [self.batch(indices) for indices in wanted if indices]
        self._to_post = []
        if batches and self._first_read_at is None:
            self._first_read_at = now
        return batches

    def batch(self, indices: list[int]) -> tuple[list[int], list[int], list[int]]:
        """`(indices, remote pages, local pages)` of these indices."""
        return indices, [self._announced[index][0] for index in indices], [self._local[index] for index in indices]

    def pages_read(self, indices: list[int], num_bytes: int) -> None:
        """A page read is done."""
        self._to_read.difference_update(indices)
        self.stats.num_pages += len(indices)
        self.stats.num_bytes += num_bytes

    @property
    def is_complete(self) -> bool:
        """Whether the last announcement is here and every page wanted was read."""
        return self.state is PullState.FETCHING and self.handoff is not None and not self._to_read and self.num_reads == 0

    @property
    def is_short(self) -> bool:
        """Whether the last announcement is here but some page wanted was never announced: the two sides disagree."""
        return self.handoff is not None and not self._to_read <= self._announced.keys()

    def to_verify(self) -> list[int]:
        """Indices of every page that was read."""
        return sorted(self._local)

    def stale(self, indices: list[int], epochs: list[int]) -> list[int]:
        """Indices whose page was rewritten since it was announced."""
        return [index for index, epoch in zip(indices, epochs, strict=True) if self._announced[index][1] != epoch]

    def ready(self, now: float, num_bytes: int) -> None:
        """Everything is verified."""
        self.state = PullState.READY
        self.stats.num_bytes += num_bytes
        first_read_at = now if self._first_read_at is None else self._first_read_at
        self.stats.wait_s = first_read_at - self._claimed_at
        self.stats.read_s = now - first_read_at
        self.stats.exposed_s = now - self._last_announced_at
