"""What the router believes each rank's prefix cache holds: the pages of the prompts that it sent there itself.

An entry is speculative for 2 s after sending, so that a burst of one prefix stays together, and kept once the rank has computed it.
Beliefs may be wrong (the rank evicts as it likes); a wrong one costs time, never correctness.
"""

from collections import OrderedDict
from collections.abc import Sequence

from services.kv.layout import PAGE_SIZE

SPECULATIVE_S = 2.0
_KEPT = float("inf")


class PrefixIndex:
    """Digests of pages by instance id, each instance bounded and evicted least recently used. Times are a monotonic clock's seconds."""

    def __init__(self) -> None:
        self._pages: dict[str, OrderedDict[bytes, float]] = {}  # instance id -> digest -> when the belief ends
        self._max_pages: dict[str, int] = {}

    def add(self, instance_id: str, max_pages: int) -> None:
        """A rank that can hold `max_pages` pages came; of instances that were not added nothing is remembered."""
        self._pages[instance_id] = OrderedDict()
        self._max_pages[instance_id] = max_pages

    def num_hit_tokens(self, instance_id: str, digests: Sequence[bytes], now: float) -> int:
        """Tokens of the longest prefix, in whole pages, that `instance_id` is believed to hold."""
        pages = self._pages.get(instance_id)
        if pages is None:
            return 0
        num_pages = 0
        for digest in digests:
            if pages.get(digest, 0.0) <= now:
                break
            num_pages += 1
        return num_pages * PAGE_SIZE

    def expect(self, instance_id: str, digests: Sequence[bytes], now: float) -> None:
        """A prompt with these pages was sent there: believed for SPECULATIVE_S."""
        self._put(instance_id, digests, now + SPECULATIVE_S)

    def keep(self, instance_id: str, digests: Sequence[bytes]) -> None:
        """These pages were computed or received there: believed until evicted."""
        self._put(instance_id, digests, _KEPT)

    def rename(self, former_id: str, instance_id: str) -> None:
        """The rank goes on under a new id, with its cache."""
        self._pages[instance_id] = self._pages.pop(former_id, OrderedDict())
        self._max_pages[instance_id] = self._max_pages.pop(former_id)

    def drop(self, instance_id: str) -> None:
        """The instance is gone, and its cache with it."""
        self._pages.pop(instance_id, None)
        self._max_pages.pop(instance_id, None)

    def num_pages(self, instance_id: str) -> int:
        return len(self._pages.get(instance_id, ()))

    def _put(self, instance_id: str, digests: Sequence[bytes], until: float) -> None:
        pages = self._pages.get(instance_id)
        if pages is None:  # lost meanwhile
            return
        for digest in reversed(digests):  # a chain is of use from its front: that is evicted last
            pages[digest] = max(until, pages.get(digest, 0.0))
            pages.move_to_end(digest)
        while len(pages) > self._max_pages[instance_id]:
            pages.popitem(last=False)
