"""What strikes next, and whom: equal shuffled decks of kinds, targets in rotation. Pure, a function of the seed."""

import random
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

_T = TypeVar("_T", bound=Hashable)


def shuffled_decks(items: Sequence[_T], seed: int) -> Iterator[_T]:
    """Every item once in random order, then every item once in another, without end: after k decks each has come k times."""
    draw = random.Random(seed)
    while True:
        deck = list(items)
        draw.shuffle(deck)
        yield from deck


class Rotation:
    """Takes turns among items, passing over those that cannot be taken now."""

    def __init__(self) -> None:
        self._last_turn: dict[Hashable, int] = {}
        self._turn = 0

    def take(self, candidates: Sequence[_T]) -> _T:
        """The candidate that was taken longest ago, the first of those never taken. `candidates` is not empty."""
        self._turn += 1
        chosen = min(candidates, key=lambda item: self._last_turn.get(item, 0))
        self._last_turn[chosen] = self._turn
        return chosen
