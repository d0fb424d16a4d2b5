"""Who serves a request: pure functions of what the router believes about its ranks, tested without clock or network.

Prefill: stay with a rank that holds most of the prompt's prefix until its queue would cost more than the prefix saves; then the least
work in front of and in the request. Decode: keep the largest rank of every group small, because the slowest rank sets everybody's step.
A rank that could not be reached cools down: it is chosen when nobody else is there.
`draw` (any non-negative int, fresh for each request) breaks ties, so that replicas of the router with the same view do not herd.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

STICKY_SHARE = 0.8  # of the prompt: from here on a prefix is worth going to
STICKY_TOKENS = 4096  # uncached tokens in flight at a rank up to which its prefix still wins
COOL_DOWN_S = 5.0  # after the first failure, doubled by each one after it
MAX_COOL_DOWN_S = 60.0


class PrefillView(NamedTuple):
    """A prefill rank as one request sees it; tokens."""

    instance_id: str
    num_hit_tokens: int  # of this prompt, believed to be in its prefix cache
    num_in_flight: int  # uncached prompt tokens sent there and not yet computed
    is_cooling: bool = False


class DecodeView(NamedTuple):
    """A decode rank as one request sees it; tokens."""

    instance_id: str
    group: str  # ranks that step in lockstep
    num_hit_tokens: int
    num_tokens: int  # of running and claimed requests
    num_requests: int  # running and claimed
    max_running: int
    is_cooling: bool = False


class CoolDown:
    """How long one engine incarnation that could not be reached is left alone. Times are a monotonic clock's seconds."""

    def __init__(self) -> None:
        self._num_failures = 0  # in a row
        self._until = float("-inf")

    def is_on(self, now: float) -> bool:
        return now < self._until

    def failed(self, now: float) -> None:
        """It could not be reached. Requests that find that out together are one failure."""
        if not self.is_on(now):
            self._until = now + min(COOL_DOWN_S * 2**self._num_failures, MAX_COOL_DOWN_S)
            self._num_failures = min(self._num_failures + 1, 10)  # far beyond the longest

    def succeeded(self) -> None:
        """It served: whatever was wrong is over."""
        self._num_failures, self._until = 0, float("-inf")


class Choice(NamedTuple):
    """The rank chosen and why, in a few words for the timeline."""

    instance_id: str
    reason: str


def choose_prefill(ranks: Sequence[PrefillView], num_prompt_tokens: int, draw: int, sticky_tokens: int = STICKY_TOKENS) -> Choice:
    """Choose among `ranks` (at least one) for a prompt of `num_prompt_tokens`."""
    ranks = [rank for rank in ranks if not rank.is_cooling] or ranks
    holders = [
        rank for rank in ranks if rank.num_hit_tokens >= STICKY_SHARE * num_prompt_tokens and rank.num_in_flight <= sticky_tokens
    ]
    if holders:
        best = min(_rotated(holders, draw), key=lambda rank: (-rank.num_hit_tokens, rank.num_in_flight))
        return Choice(best.instance_id, f"prefix {best.num_hit_tokens}/{num_prompt_tokens}")

    def cost(rank: PrefillView) -> int:
        return rank.num_in_flight + max(num_prompt_tokens - rank.num_hit_tokens, 1)

    best = min(_rotated(ranks, draw), key=cost)
    return Choice(best.instance_id, f"least work {cost(best)} of {len(ranks)}")


def choose_decode(ranks: Sequence[DecodeView], num_prompt_tokens: int, draw: int) -> Choice:
    """Choose among `ranks` (at least one) for a request that brings `num_prompt_tokens`, less what the rank has already.

    A rank whose running set is full comes after every one that is not.
    """
    ranks = [rank for rank in ranks if not rank.is_cooling] or ranks
    largest: dict[str, int] = {}
    for rank in ranks:
        largest[rank.group] = max(largest.get(rank.group, 0), rank.num_tokens)

    def key(rank: DecodeView) -> tuple[bool, int, int, int]:
        after = rank.num_tokens + max(num_prompt_tokens - rank.num_hit_tokens, 1)
        return rank.num_requests >= rank.max_running, max(after, largest[rank.group]), after, rank.num_requests

    best = min(_rotated(ranks, draw), key=key)
    return Choice(best.instance_id, f"smallest {best.num_tokens} of {len(ranks)}")


def _rotated(ranks: Sequence[T], draw: int) -> list[T]:
    """`ranks` starting at another one each draw: `min` takes the first of equals."""
    start = draw % len(ranks)
    return [*ranks[start:], *ranks[:start]]
