"""Who serves a request: pure functions of what the router believes about its ranks, tested without clock or network.

Prefill: stay with a rank that holds most of the prompt's prefix until its queue would cost more than the prefix saves; then the least
work in front of and in the request. Decode: keep the largest rank of every group small, because the slowest rank sets everybody's step.
`draw` (any non-negative int, fresh for each request) breaks ties, so that replicas of the router with the same view do not herd.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

STICKY_SHARE = 0.8  # of the prompt: from here on a prefix is worth going to
STICKY_TOKENS = 4096  # uncached tokens in flight at a rank up to which its prefix still wins


class PrefillView(NamedTuple):
    """A prefill rank as one request sees it; tokens."""

    instance_id: str
    num_hit_tokens: int  # of this prompt, believed to be in its prefix cache
    num_in_flight: int  # uncached prompt tokens sent there and not yet computed


class DecodeView(NamedTuple):
    """A decode rank as one request sees it; tokens."""

    instance_id: str
    group: str  # ranks that step in lockstep
    num_hit_tokens: int
    num_tokens: int  # of running and claimed requests
    num_requests: int  # running and claimed
    max_running: int


class Choice(NamedTuple):
    """The rank chosen and why, in a few words for the timeline."""

    instance_id: str
    reason: str


def choose_prefill(ranks: Sequence[PrefillView], num_prompt_tokens: int, draw: int, sticky_tokens: int = STICKY_TOKENS) -> Choice:
    """Choose among `ranks` (at least one) for a prompt of `num_prompt_tokens`."""
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
