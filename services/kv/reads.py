"""Reads in flight and the pages they hold: READ while they are in time, QUARANTINE once late, nothing once they have ended or are fenced.

NIXL offers no way to call a read back, so whatever becomes of its request, a read keeps its destination until it has ended, or until the
agent that posted it is destroyed. Guarded by the kv lock, but for what the puller posts and polls.
"""
from collections.abc import Callable, Iterator

from services.kv.pages import Holder, HolderKind, PagePool
from services.kv.pull import Pull
from services.kv.transport import TransferState


class Read:
    """One transfer; `pull` is None once nobody waits for it."""

    def __init__(self, number: int, pull: Pull, batch: tuple[list[int], list[int], list[int]], *, of_epochs: bool) -> None:
        self.pull: Pull | None = pull
        self.peer = pull.holder
        self.indices, self.remote_pages, self.local_pages = batch
        self.of_epochs = of_epochs
        self.holder = Holder(HolderKind.READ, number)
        self.handle: int | None = None
        self.deadline = 0.0
        self.state = TransferState.RUNNING

    @property
    def is_late(self) -> bool:
        """Whether its pages are in quarantine."""
        return self.holder.kind is HolderKind.QUARANTINE


class Reads:
    """All of one rank."""

    def __init__(self, pool: PagePool, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._clock = clock
        self._reads: list[Read] = []
        self._num_ever = 0

    def __len__(self) -> int:
        return len(self._reads)

    def __iter__(self) -> Iterator[Read]:
        return iter(self._reads)

    @property
    def num_healthy(self) -> int:
        """Reads that are not late yet; each ends or is late by its deadline."""
        return sum(not read.is_late for read in self._reads)

    @property
    def quarantined_s(self) -> float:
        """Seconds since the oldest late read was due; 0 without one."""
        now = self._clock()
        return max((now - read.deadline for read in self._reads if read.is_late), default=0.0)

    def begin(self, pull: Pull, batch: tuple[list[int], list[int], list[int]], *, of_epochs: bool) -> Read:
        """A read that is about to be posted; its pages are held from now on."""
        self._num_ever += 1
        read = Read(self._num_ever, pull, batch, of_epochs=of_epochs)
        self._pool.hold(read.local_pages, read.holder)
        self._reads.append(read)
        pull.num_reads += 1
        return read

    def ended(self) -> list[Read]:
        """Those that are DONE or FAILED; each stays, and holds its pages, until `end`: the first may end the pulls of the others."""
        return [read for read in self._reads if read.state is not TransferState.RUNNING]

    def end(self, read: Read) -> None:
        """It has ended and its handle is released: nothing can land any more."""
        self._reads.remove(read)
        self._pool.drop(read.local_pages, read.holder)
        if read.pull:
            read.pull.num_reads -= 1

    def take_late(self) -> list[Read]:
        """Move the pages of reads that are late from now on into quarantine."""
        now = self._clock()
        late = [read for read in self._reads if now > read.deadline and not read.is_late]
        for read in late:
            quarantine = Holder(HolderKind.QUARANTINE, read.holder.key)
            self._pool.hold(read.local_pages, quarantine)
            self._pool.drop(read.local_pages, read.holder)
            read.holder = quarantine
        return late

    def forget(self, pull: Pull) -> None:
        """The pull is over: its reads go on alone."""
        for read in self._reads:
            if read.pull is pull:
                read.pull = None

    def fenced(self) -> None:
        """The transport is closed: what was in flight has ended for good, and quarantine with it."""
        for read in list(self._reads):
            self.end(read)
