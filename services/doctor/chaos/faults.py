"""What strikes: a kind's variants take turns, each one's victims rotate, and all of it is noted.

A fault is armed where a short window matters: it strikes at a moment of some request (fetching, last announcement, ...), and after
`ARM_S` (actions.py) all the same.
"""

import random
import time
from collections import Counter
from collections.abc import Sequence

from services.doctor.chaos.actions import BACK_S, Actions
from services.doctor.chaos.deck import Rotation
from services.doctor.chaos.kinds import KINDS, Fired, Variant, variants
from services.doctor.chaos.load import Load
from services.doctor.chaos.requests import Deal
from services.doctor.chaos.stage import Node, Stage, until

SPARE_S = 8.0  # a pool's last serving rank is struck only after waiting this long for another one


class Faults:
    """Strikes the stage; `fired` lists what happened."""

    def __init__(self, stage: Stage, load: Load, deal: Deal) -> None:
        """The order of a kind's variants is the seed's, but for the first: those are what a short run must have seen."""
        self.fired: list[Fired] = []
        self._stage = stage
        self._victims, self._turns = Rotation(), Counter[str]()
        draw = random.Random(deal.seed)
        table = variants(Actions(stage, load, deal))
        self._variants: dict[str, Sequence[Variant]] = {
            kind: (first, *draw.sample(rest, len(rest))) for kind, (first, *rest) in table.items()}

    def kinds(self) -> list[str]:
        """Those that can be had here."""
        return [kind for kind in KINDS if kind != "partition" or self._stage.can_partition]

    async def strike(self, kind: str) -> None:
        """One fault of `kind`, until all serves again."""
        variant = self._variants[kind][self._turns[kind] % len(self._variants[kind])]
        self._turns[kind] += 1
        if not variant.role:
            fired = self._note(kind, variant, "load")
            await variant.act(self._stage.nodes[0], fired)
            fired.back = time.monotonic()
            return
        node = await self._victim(variant.role)
        fired = self._note(kind, variant, node.name)
        node.fault = f"{kind}: {variant.name}"
        try:
            await variant.act(node, fired)
            fired.back = time.monotonic()
        finally:
            node.fault = ""

    async def _victim(self, role: str) -> Node:
        await until(lambda: len(self._stage.whole(role)) > 1, SPARE_S)
        node = self._victims.take(self._stage.whole(role) or self._stage.whole() or self._stage.nodes)
        await until(lambda: not node.fault, 2 * BACK_S)  # one fault a node at a time
        return node

    def _note(self, kind: str, variant: Variant, target: str) -> Fired:
        fired = Fired(kind, variant.name, target, time.monotonic())
        self.fired.append(fired)
        return fired
