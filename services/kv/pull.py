"""The reader's side of one hand-off: what is announced, what is read, what is verified. Pure bookkeeping: `puller.py` moves the bytes.

CLAIMED -> FETCHING -> VERIFYING -> READY; from any state -> ABORTED.

CLAIMED    renews the lease and collects announcements (any order, duplicates, gaps); no page of ours is involved
FETCHING   has destination pages; each announcement's pages are read as soon as both are known
VERIFYING  all page reads are done and the last announcement is here: the holder's epoch words of exactly those pages are read
READY      every epoch equals the announced one; otherwise ABORTED with EPOCH_MISMATCH, and nothing that was read is used

A pull with `room` is open-ended: its holder still computes, so the pages wanted are those announced, until the last announcement says
how many tokens there are. It has caught up once when all that was announced by then is read.
"""
from collections.abc import Callable, Mapping
from enum import StrEnum

import msgspec

from services.kv.layout import num_pages_for
from services.kv.messages import Announce, HandoffState, RequestKey

MAX_BEYOND_GAP = 64  # announcements kept while an earlier one is missing; what is refused beyond it comes with a renewal's answer


Accept = Callable[[HandoffState], None]
"""Raises HandoffError for a decoding state that the reader cannot go on with."""


def accept_any(state: HandoffState) -> None:
    """For a reader that looks at the state later."""


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
        self._room: int | None = None  # length of the page table of an open-ended pull
        self._accept: Accept = accept_any
        self._has_caught_up = False
        self._later: dict[int, Announce] = {}  # announcements beyond a gap
        self._announced: dict[int, tuple[int, int]] = {}  # index in the request -> (remote page, epoch)
        self._num_announced = 0  # pages from the first to the last one announced
        self._local: dict[int, int] = {}  # index in the request -> local page, for those that may be read
        self._wanted: set[int] = set()  # indices that are to be read, read ones included
        self._to_post: list[list[int]] = []  # indices, one list an announcement
        self._to_read: set[int] = set()  # indices of `_wanted` not read yet

    @property
    def has_gap(self) -> bool:
        """Whether an announcement beyond a missing one is here."""
        return bool(self._later)

    @property
    def is_open(self) -> bool:
        """Whether pages are wanted as they are announced."""
        return self._room is not None

    @property
    def heard_any(self) -> bool:
        """Whether the holder has announced anything."""
        return self.next_sequence > 0 or bool(self._later)

    def announced(self, announce: Announce, now: float) -> bool:
        """Take an announcement in, in whatever order it comes; False when it is beyond the bound and must be asked for again."""
        if announce.sequence < self.next_sequence or self.handoff is not None:
            return True
        if announce.sequence != self.next_sequence and announce.sequence not in self._later and len(self._later) >= MAX_BEYOND_GAP:
            return False
        self._later.setdefault(announce.sequence, announce)
        while (following := self._later.pop(self.next_sequence, None)) is not None:
            self.next_sequence += 1
            self._announced |= {page.index: (page.page, page.epoch) for page in following.pages}
            self._to_post.append([page.index for page in following.pages])
            self._num_announced = max(self._num_announced, *(page.index + 1 for page in following.pages), 0)
            if following.state is not None:
                self.handoff = following.state
                self._last_announced_at = now
                self._later.clear()
        return True

    def begin(self, local_pages: Mapping[int, int], accept: Accept = accept_any, room: int | None = None) -> None:
        """Name the destination of every page to be read; indices that are left out are here already. `room`: see above."""
        self._local, self._accept, self._room = dict(local_pages), accept, room
        if room is None:
            self._wanted, self._to_read = set(local_pages), set(local_pages)
        self.state = PullState.FETCHING

    def next_batches(self, now: float) -> list[tuple[list[int], list[int], list[int]]]:
        """`(indices, remote pages, local pages)` that can be read now: one batch an announcement."""
        if self.state is not PullState.FETCHING:
            return []
        wanted = ([index for index in indices if index in self._local] for indices in self._to_post)
        batches = [self.batch(indices) for indices in wanted if indices]
        self._to_post = []
        if self._room is not None:
            for indices, _, _ in batches:
                self._wanted.update(indices)
                self._to_read.update(indices)
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
        is_read = not self._to_post and not self._to_read and self.num_reads == 0
        return self.state is PullState.FETCHING and self.handoff is not None and is_read

    @property
    def is_short(self) -> bool:
        """Whether the last announcement is here but some page wanted was never announced: the two sides disagree."""
        if self.handoff is None or self.state is PullState.CLAIMED:
            return False
        if self._room is None:
            return not self._to_read <= self._announced.keys()
        num_pages = num_pages_for(self.handoff.num_prompt_tokens)
        return any(index in self._local and index not in self._announced for index in range(num_pages))

    @property
    def is_outgrown(self) -> bool:
        """Whether an open-ended pull was announced a page for which there is no room."""
        return self._room is not None and self._num_announced > self._room

    def catches_up(self) -> bool:
        """Whether an open-ended pull has now, for the first time, read all that was announced."""
        if self._room is None or self._has_caught_up or not self.next_sequence or self._later or self._to_post:
            return False
        self._has_caught_up = self.state is PullState.FETCHING and not self._to_read and self.num_reads == 0
        return self._has_caught_up

    def check_handoff(self) -> None:
        """Raises HandoffError when the caller cannot go on with the decoding state."""
        assert self.handoff is not None
        self._accept(self.handoff)

    def to_verify(self) -> list[int]:
        """Indices of every page that was read."""
        return sorted(self._wanted)

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
