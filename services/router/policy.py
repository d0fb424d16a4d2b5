"""Who serves a request: pure functions of what the router believes about its ranks, tested without clock or network.

Prefill: stay with a rank that holds most of the prompt's prefix until its queue would cost more than the prefix saves; then the least
work in front of and in the request. Decode: keep the largest rank of every group small, because the slowest rank sets everybody's step.
A rank that could not be reached cools down: whoever asks leaves it out while there is anybody else.
`draw` (any non-negative int, fresh for each request) breaks ties, so that replicas of the router with the same view do not herd.

Ranks come as columns of one length: what the router knows of each, and `hits`, tokens of this prompt believed to be in its prefix cache,
which are always fewer than the prompt's, since one token at least is computed.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

Key = TypeVar("Key", int, tuple[int, ...])

STICKY_SHARE = 0.8  # of the prompt: from here on a prefix is worth going to
STICKY_TOKENS = 4096  # uncached tokens in flight at a rank up to which its prefix still wins, while its speed is not known
COOL_DOWN_S = 5.0  # after the first failure, doubled by each one after it
MAX_COOL_DOWN_S = 60.0
_MIN_MEASURED_TOKENS = 64  # shorter computations say little of a rank's speed
_FORGETTING = 0.02  # weight of a newest speed below the peak: batch mates and a busy moment slow one request, not the rank


class PrefillRank(Protocol):
    """What the choice of a prefill rank looks at; tokens."""

    @property
    def num_tokens(self) -> int:
        """Uncached prompt tokens sent there and not yet computed."""
        ...

    @property
    def sticky_tokens(self) -> int:
        """How many of them may be in front of a prompt that comes for its prefix."""
        ...


class DecodeRank(Protocol):
    """What the choice of a decode rank looks at; tokens."""

    @property
    def group(self) -> str:
        """The ranks that step in lockstep share one."""
        ...

    @property
    def num_tokens(self) -> int:
        """Of running and claimed requests."""
        ...

    @property
    def num_requests(self) -> int:
        """Running and claimed."""
        ...

    @property
    def max_running(self) -> int:
        """Requests."""
        ...


class CoolDown:
    """How long one engine incarnation that could not be reached is left alone. Times are a monotonic clock's seconds."""

    def __init__(self) -> None:
        self._num_failures = 0  # in a row
        self.until = float("-inf")

    def is_on(self, now: float) -> bool:
        return now < self.until

    def failed(self, now: float) -> None:
        """It could not be reached. Requests that find that out together are one failure."""
        if not self.is_on(now):
            self.until = now + min(COOL_DOWN_S * 2**self._num_failures, MAX_COOL_DOWN_S)
            self._num_failures = min(self._num_failures + 1, 10)  # far beyond the longest

    def succeeded(self) -> None:
        """It served: whatever was wrong is over."""
        self._num_failures, self.until = 0, float("-inf")


class PrefillSpeed:
    """Peak prefill speed of one rank, as its replies tell it, and the queue that keeps TTFT in bounds there."""

    def __init__(self) -> None:
        self._tokens_per_s = 0.0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A prompt's `num_tokens` uncached tokens took `seconds`, batch mates' share included."""
        if num_tokens < _MIN_MEASURED_TOKENS or seconds <= 0.0:
            return
        speed = num_tokens / seconds
        self._tokens_per_s = max(speed, self._tokens_per_s + _FORGETTING * (speed - self._tokens_per_s))

    def sticky_tokens(self, wait_s: float) -> int:
        """Tokens that the rank computes in `wait_s`, STICKY_TOKENS until it is measured."""
        return round(self._tokens_per_s * wait_s) if self._tokens_per_s else STICKY_TOKENS


class Choice(NamedTuple):
    """Which of the ranks, and why, in a few words for the timeline."""

    position: int
    reason: str


def choose_prefill(ranks: Sequence[PrefillRank], hits: Sequence[int], num_prompt_tokens: int, draw: int) -> Choice:
    """Choose among `ranks` (at least one) for a prompt of `num_prompt_tokens`."""
    enough = STICKY_SHARE * num_prompt_tokens
    if max(hits) >= enough:
        holders = [i for i, hit in enumerate(hits) if hit >= enough and ranks[i].num_tokens <= ranks[i].sticky_tokens]
        if holders:
            best = _least([(-hits[i], ranks[i].num_tokens) for i in holders], draw)
            return Choice(holders[best], f"prefix {hits[holders[best]]}/{num_prompt_tokens}")
    costs = [rank.num_tokens + num_prompt_tokens - hit for rank, hit in zip(ranks, hits, strict=True)]
    best = _least(costs, draw)
    return Choice(best, f"least work {costs[best]} of {len(ranks)}")


def choose_decode(ranks: Sequence[DecodeRank], hits: Sequence[int], num_prompt_tokens: int, draw: int) -> Choice:
    """Choose among `ranks` (at least one) for a request that brings `num_prompt_tokens`, less what the rank has already.

    A rank whose running set is full comes after every one that is not.
    """
    largest: dict[str, int] = {}
    for rank in ranks:
        if rank.num_tokens >= largest.get(rank.group, 0):
            largest[rank.group] = rank.num_tokens
    keys: list[tuple[bool, int, int, int]] = []
    for rank, hit in zip(ranks, hits, strict=True):
        size, num_requests = largest[rank.group], rank.num_requests
        after = rank.num_tokens + num_prompt_tokens - hit
        keys.append((num_requests >= rank.max_running, after if after > size else size, after, num_requests))
    best = _least(keys, draw)
    return Choice(best, f"smallest {ranks[best].num_tokens} of {len(ranks)}")


def _least(keys: Sequence[Key], draw: int) -> int:
    """Where the least of `keys` is; among equals `draw` decides."""
    least = min(keys)
    equals = [i for i, key in enumerate(keys) if key == least]
    return equals[draw % len(equals)]
