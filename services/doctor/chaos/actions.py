"""What each fault does to its victim, until all serves again."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from services.doctor.chaos.kinds import Fired
from services.doctor.chaos.load import Load
from services.doctor.chaos.requests import Deal
from services.doctor.chaos.stage import Node, Stage, until
from services.kv.fault_control import Moment
from services.runtime.config import FaultRates
from services.runtime.supervisor import HEARTBEAT_S

ARM_S = 5.0
BACK_S = 60.0  # a rank that is not back by then is a breach
_SHORT_S, _LONG_S = HEARTBEAT_S / 2, HEARTBEAT_S + 5.0
_PROXY_S = 6.0
_NUM_SLOW, _NUM_LONG = 4, 10

Act = Callable[[Node, Fired], Awaitable[None]]
Part = Literal["engine", "front", "node"]


class Actions:
    """Each method gives what a Variant does."""

    def __init__(self, stage: Stage, load: Load, deal: Deal) -> None:
        self._stage, self._load, self._deal = stage, load, deal

    def kill(self, part: Part, moment: Moment | Literal[""] = "") -> Act:
        """SIGKILL; whoever runs fronts starts a killed one again a second later."""
        async def act(node: Node, fired: Fired) -> None:
            former = self._stage.instance(node)
            await self._signal_at(node, fired, part, moment, signal.SIGKILL)
            if part == "engine":
                return await self._back(node, fired, former)
            await self._stage.wait_ended(node.name, BACK_S)
            await asyncio.sleep(1.0)
            return await self._again(node, fired, former)
        return act

    def restart(self, moment: Moment | Literal[""]) -> Act:
        """The front ends, at `moment` by SIGKILL, else by two SIGTERM, and starts at once at the same address."""
        async def act(node: Node, fired: Fired) -> None:
            former = self._stage.instance(node)
            if moment:
                await self._signal_at(node, fired, "front", moment, signal.SIGKILL)
            else:
                send(self._stage.front_pid(node), signal.SIGTERM)
                await asyncio.sleep(0.6)  # signals closer together count as one
                send(self._stage.front_pid(node), signal.SIGTERM)
            await self._must_end(node, fired, 10.0)
            await self._again(node, fired, former)
        return act

    def stop(self, part: Part, *, long: bool, moment: Moment | Literal[""] = "") -> Act:
        """SIGSTOP, and SIGCONT after less or more than the heartbeat's limit."""
        async def act(node: Node, fired: Fired) -> None:
            pids = self._pids(node, part)
            try:
                await self._signal_at(node, fired, part, moment, signal.SIGSTOP)
                await asyncio.sleep(_LONG_S if long else _SHORT_S)
            finally:
                for pid in pids:
                    send(pid, signal.SIGCONT)
            await self._back(node, fired)
        return act

    def cut(self, *, long: bool, moment: Moment | Literal[""] = "") -> Act:
        """The node's only cable is out for less or more than the heartbeat's limit."""
        async def act(node: Node, fired: Fired) -> None:
            assert node.host is not None
            await self._signal_at(node, fired, "engine", moment, signal.SIGCONT)  # harmless: it only tells that the moment has come
            node.host.cut()
            try:
                await asyncio.sleep(_LONG_S if long else _SHORT_S)
            finally:
                node.host.mend()
            await self._back(node, fired)
        return act

    def proxy(self, rates: FaultRates) -> Act:
        """The rank's fault proxy injects at `rates` for a while."""
        async def act(node: Node, fired: Fired) -> None:
            node.control.rates(rates)
            try:
                await asyncio.sleep(_PROXY_S)
            finally:
                node.control.clear()
            await self._back(node, fired)
        return act

    def drain(self, killed: Literal["", "source", "target"]) -> Act:
        """SIGTERM; the front must leave by itself and is started again. `killed`: which engine dies at the first pause of a move."""
        async def act(node: Node, fired: Fired) -> None:
            former = self._stage.instance(node)
            others = [other for other in self._stage.whole("decode") if other is not node]
            doomed = {"": [], "source": [node], "target": others[:1]}[killed]
            for each in doomed:
                each.control.arm("paused_announce", signal.SIGKILL)
            send(self._stage.front_pid(node), signal.SIGTERM)
            await self._must_end(node, fired, self._stage.cluster.drain_s + 15)
            if killed:
                fired.hit = any(each.control.has_fired() for each in doomed)
            for each in doomed:
                each.control.clear()
            await self._again(node, fired, former)
        return act

    def kill_router(self, index: int) -> Act:
        """SIGKILL of one replica, started again a second later."""
        async def act(_node: Node, fired: Fired) -> None:
            name = fired.target = list(self._stage.cluster.routers)[index]
            send(self._stage.cluster.processes[name].pid, signal.SIGKILL)
            await self._stage.wait_ended(name, BACK_S)
            await asyncio.sleep(1.0)
            self._stage.cluster.restart(name)
            fired.released = time.monotonic()
            if not await self._stage.routers_complete(BACK_S):
                fired.breach = f"{name} did not know every rank within {BACK_S:g} s"
        return act

    async def read_slowly(self, _node: Node, _fired: Fired) -> None:
        """A few clients that take their time over every message."""
        self._load.add([self._deal.slow() for _ in range(_NUM_SLOW)])

    async def press(self, _node: Node, _fired: Fired) -> None:
        """More long requests than there are pages for."""
        self._load.add([self._deal.long() for _ in range(_NUM_LONG)])

    def _pids(self, node: Node, part: Part) -> list[int]:
        front, engine = self._stage.front_pid(node), self._stage.engine_pid(node)
        return {"engine": [engine], "front": [front], "node": [front, engine]}[part]

    async def _signal_at(self, node: Node, fired: Fired, part: Part, moment: Moment | Literal[""], number: signal.Signals) -> None:
        """Send `number` to the part, by the engine's own hand when `moment` comes within ARM_S."""
        pids = self._pids(node, part)
        if moment:
            node.control.arm(moment, number, 0 if part == "node" else pids[0])
            fired.hit = await until(node.control.has_fired, ARM_S)
            node.control.clear()
            fired.at = time.monotonic()
        if part == "node" or not fired.hit:
            for pid in pids:
                send(pid, number)

    async def _must_end(self, node: Node, fired: Fired, patience_s: float) -> None:
        if not await self._stage.wait_ended(node.name, patience_s):
            fired.breach = f"{node.name} had not ended {patience_s:g} s after it was told to"
            send(self._stage.front_pid(node), signal.SIGKILL)
            await self._stage.wait_ended(node.name, BACK_S)

    async def _again(self, node: Node, fired: Fired, former: str) -> None:
        self._stage.cluster.restart(node.name)
        fired.released = time.monotonic()
        await self._back(node, fired, former)

    async def _back(self, node: Node, fired: Fired, former: str = "") -> None:
        """Wait until the node serves, as another instance than `former`."""
        fired.released = fired.released or time.monotonic()

        def is_back() -> bool:
            return self._stage.serves(node) and self._stage.instance(node) != former and self._stage.engine_pid(node) != 0

        if not await until(is_back, BACK_S):
            fired.breach = f"{node.name} did not serve again within {BACK_S:g} s"


def send(pid: int, number: signal.Signals) -> None:
    """To a process that may be gone already."""
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
