"""The kinds of fault. Each kind has variants that take turns; each variant its victims in rotation.

A fault is armed where a short window matters: it strikes when its victim reports that it is in the state asked for, or after
`ARM_S` all the same.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from services.doctor.chaos.deck import Rotation
from services.doctor.chaos.load import Load
from services.doctor.chaos.requests import Deal
from services.doctor.chaos.stage import Node, Stage, until
from services.runtime.supervisor import HEARTBEAT_S

KINDS = ("sigkill", "sigstop", "partition", "restart", "slow reader", "router death", "drain", "page pressure")
ARM_S = 2.0
SPARE_S = 8.0  # a pool's last serving rank is struck only after waiting this long for another one
BACK_S = 60.0  # a rank that is not back by then is a breach
_SHORT_S, _LONG_S = HEARTBEAT_S / 2, HEARTBEAT_S + 5.0
_NUM_SLOW, _NUM_LONG = 4, 10


@dataclass
class Fired:
    """One fault that struck; monotonic seconds. `released`: when it ended itself (SIGCONT, started again); `back`: all serves again."""

    kind: str
    variant: str
    target: str
    at: float
    released: float = 0.0
    back: float = 0.0
    breach: str = ""


Victim = Callable[[Node, Fired], Awaitable[None]]


@dataclass(frozen=True)
class Variant:
    """`role` of the victim, "" = the variant finds its own; `armed`: the state of the victim's load that it waits for."""

    name: str
    role: str
    act: Victim
    armed: str = ""


class Faults:
    """Strikes the stage; `fired` lists what happened."""

    def __init__(self, stage: Stage, load: Load, deal: Deal) -> None:
        """The order of a kind's variants is the seed's, but for the first: those are what a short run must have seen."""
        self.fired: list[Fired] = []
        self._stage, self._load, self._deal = stage, load, deal
        self._victims, self._variants = Rotation(), Rotation()
        draw = random.Random(deal.seed)
        self._tables = {kind: (first, *draw.sample(rest, len(rest))) for kind, (first, *rest) in self._make_tables().items()}

    def kinds(self) -> list[str]:
        """Those that can be had here."""
        return [kind for kind in KINDS if kind != "partition" or self._stage.can_partition]

    async def strike(self, kind: str) -> None:
        """One fault of `kind`, until all serves again."""
        variant = self._variants.take(self._tables[kind])
        if not variant.role:
            fired = self._note(kind, variant, "load")
            await variant.act(self._stage.nodes[0], fired)
            fired.back = time.monotonic()
            return
        await until(lambda: len(self._stage.whole(variant.role)) > 1, SPARE_S)
        node = self._victims.take(self._stage.whole(variant.role) or self._stage.whole() or self._stage.nodes)
        if node.fault:
            await until(lambda: not node.fault, BACK_S)
        if variant.armed:
            await until(lambda: getattr(self._stage.watcher.load_at(node.address), variant.armed) > 0, ARM_S)
        fired = self._note(kind, variant, node.name)
        node.fault = f"{kind}: {variant.name}"
        try:
            await variant.act(node, fired)
            fired.back = time.monotonic()
        finally:
            node.fault = ""

    def _note(self, kind: str, variant: Variant, target: str) -> Fired:
        fired = Fired(kind, variant.name, target, time.monotonic())
        self.fired.append(fired)
        return fired

    def _make_tables(self) -> dict[str, Sequence[Variant]]:
        return {
            "sigkill": (
                Variant("decode engine while it fetches", "decode", self._kill_engine, "num_claims"),
                Variant("prefill engine while it holds leases", "prefill", self._kill_engine, "num_leased_pages"),
                Variant("decode front while it fetches", "decode", self._kill_front, "num_claims"),
                Variant("prefill engine while it computes", "prefill", self._kill_engine, "num_queued_tokens"),
                Variant("decode engine", "decode", self._kill_engine),
                Variant("prefill front", "prefill", self._kill_front),
            ),
            "sigstop": (
                Variant("prefill node, long", "prefill", self._stop("node", _LONG_S), "num_leased_pages"),
                Variant("decode engine, short", "decode", self._stop("engine", _SHORT_S)),
                Variant("decode node, long", "decode", self._stop("node", _LONG_S)),
                Variant("prefill engine, short", "prefill", self._stop("engine", _SHORT_S), "num_leased_pages"),
                Variant("decode front, long", "decode", self._stop("front", _LONG_S)),
                Variant("prefill engine, long", "prefill", self._stop("engine", _LONG_S), "num_leased_pages"),
                Variant("decode engine, long", "decode", self._stop("engine", _LONG_S)),
                Variant("prefill front, long", "prefill", self._stop("front", _LONG_S)),
            ),
            "partition": (
                Variant("prefill node, long", "prefill", self._cut(_LONG_S), "num_leased_pages"),
                Variant("decode node, short", "decode", self._cut(_SHORT_S)),
                Variant("decode node, long", "decode", self._cut(_LONG_S), "num_claims"),
                Variant("prefill node, short", "prefill", self._cut(_SHORT_S), "num_leased_pages"),
            ),
            "restart": (
                Variant("decode front killed while it fetches, at once again", "decode", self._restart_killed, "num_claims"),
                Variant("prefill front ended by a second signal", "prefill", self._restart_ended),
                Variant("prefill front killed, at once again", "prefill", self._restart_killed),
                Variant("decode front ended by a second signal", "decode", self._restart_ended),
            ),
            "slow reader": (Variant("clients that read slowly", "", self._read_slowly),),
            "router death": (Variant("first", "", self._kill_router(0)), Variant("second", "", self._kill_router(1))),
            "drain": (
                Variant("decode", "decode", self._drain),
                Variant("decode while it fetches", "decode", self._drain, "num_claims"),
                Variant("prefill", "prefill", self._drain, "num_leased_pages"),
            ),
            "page pressure": (Variant("long requests", "", self._press),),
        }

    async def _back(self, node: Node, fired: Fired, former: str = "") -> None:
        """Wait until the node serves, as another instance than `former`."""
        fired.released = fired.released or time.monotonic()

        def is_back() -> bool:
            return self._stage.serves(node) and self._stage.instance(node) != former and self._stage.engine_pid(node) != 0

        if not await until(is_back, BACK_S):
            fired.breach = f"{node.name} did not serve again within {BACK_S:g} s"

    async def _kill_engine(self, node: Node, fired: Fired) -> None:
        former = self._stage.instance(node)
        _signal(self._stage.engine_pid(node), signal.SIGKILL)
        await self._back(node, fired, former)

    async def _kill_front(self, node: Node, fired: Fired) -> None:
        former = self._stage.instance(node)
        _signal(self._stage.front_pid(node), signal.SIGKILL)
        await self._stage.wait_ended(node.name, BACK_S)
        await asyncio.sleep(1.0)  # as long as it takes whoever runs fronts to see that one is gone
        await self._again(node, fired, former)

    async def _again(self, node: Node, fired: Fired, former: str) -> None:
        self._stage.cluster.restart(node.name)
        fired.released = time.monotonic()
        await self._back(node, fired, former)

    async def _restart_killed(self, node: Node, fired: Fired) -> None:
        former = self._stage.instance(node)
        _signal(self._stage.front_pid(node), signal.SIGKILL)
        await self._stage.wait_ended(node.name, BACK_S)
        await self._again(node, fired, former)

    async def _restart_ended(self, node: Node, fired: Fired) -> None:
        former = self._stage.instance(node)
        _signal(self._stage.front_pid(node), signal.SIGTERM)
        await asyncio.sleep(0.6)  # signals closer together count as one
        _signal(self._stage.front_pid(node), signal.SIGTERM)
        if not await self._stage.wait_ended(node.name, 10.0):
            fired.breach = f"{node.name} had not ended 10 s after a second SIGTERM"
            _signal(self._stage.front_pid(node), signal.SIGKILL)
            await self._stage.wait_ended(node.name, BACK_S)
        await self._again(node, fired, former)

    def _stop(self, what: str, seconds: float) -> Victim:
        async def act(node: Node, fired: Fired) -> None:
            pids = {"engine": [self._stage.engine_pid(node)], "front": [self._stage.front_pid(node)],
                    "node": [self._stage.front_pid(node), self._stage.engine_pid(node)]}[what]
            try:
                for pid in pids:
                    _signal(pid, signal.SIGSTOP)
                await asyncio.sleep(seconds)
            finally:
                for pid in pids:
                    _signal(pid, signal.SIGCONT)
            await self._back(node, fired)
        return act

    def _cut(self, seconds: float) -> Victim:
        async def act(node: Node, fired: Fired) -> None:
            assert node.host is not None
            node.host.cut()
            try:
                await asyncio.sleep(seconds)
            finally:
                node.host.mend()
            await self._back(node, fired)
        return act

    async def _read_slowly(self, _node: Node, _fired: Fired) -> None:
        self._load.add([self._deal.slow() for _ in range(_NUM_SLOW)])

    async def _press(self, _node: Node, _fired: Fired) -> None:
        self._load.add([self._deal.long() for _ in range(_NUM_LONG)])

    def _kill_router(self, index: int) -> Victim:
        async def act(_node: Node, fired: Fired) -> None:
            name = list(self._stage.cluster.routers)[index]
            fired.target = name
            _signal(self._stage.cluster.processes[name].pid, signal.SIGKILL)
            await self._stage.wait_ended(name, BACK_S)
            await asyncio.sleep(1.0)
            self._stage.cluster.restart(name)
            fired.released = time.monotonic()
            if not await self._stage.routers_complete(BACK_S):
                fired.breach = f"{name} did not know every rank within {BACK_S:g} s"
        return act

    async def _drain(self, node: Node, fired: Fired) -> None:
        former, patience_s = self._stage.instance(node), self._stage.cluster.drain_s + 15
        _signal(self._stage.front_pid(node), signal.SIGTERM)
        if not await self._stage.wait_ended(node.name, patience_s):
            fired.breach = f"{node.name} had not left {patience_s:g} s after SIGTERM"
            _signal(self._stage.front_pid(node), signal.SIGKILL)
            await self._stage.wait_ended(node.name, BACK_S)
        await self._again(node, fired, former)


def _signal(pid: int, number: signal.Signals) -> None:
    """To a process that may be gone already."""
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
