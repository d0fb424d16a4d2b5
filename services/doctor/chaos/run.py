"""One chaos run from start to report.

1 STARTED   the cluster is up, both routers know every rank
2 LOADED    clients send; every ten seconds a fault strikes, whether or not the last one is over
3 HEALED    no new faults; every rank serves again, and what was sent ends
4 SETTLED   every page has come back
5 ENDED     every process leaves when told to
6 VERIFIED  every stream was compared with the oracle
"""

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from proto.baton.v1 import common_pb2
from services.doctor.chaos.actions import BACK_S
from services.doctor.chaos.deck import shuffled_decks
from services.doctor.chaos.faults import Faults
from services.doctor.chaos.kinds import KINDS
from services.doctor.chaos.load import SILENCE_S, Load, Outcome, Routers, Seen
from services.doctor.chaos.report import Demand, Findings, Report, demand_of
from services.doctor.chaos.requests import Deal
from services.doctor.chaos.stage import Stage, until
from services.doctor.chaos.worker import Job, Worker
from services.runtime.errors import SetupError
from services.runtime.serve import cancel, first_of

FAULT_EVERY_S = 10.0
_SETTLE_S = 120.0  # quarantine may last 60 s before it is fenced, a lease that nobody ends 30 s
_SAMPLE_S = 0.1
_PROGRESS_S = 5.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for."""

    seed: int
    minutes: float
    num_clients: int = 12
    kinds: tuple[str, ...] = KINDS
    log_dir: Path


class Run:
    """Runs a Plan; `say` gets lines of progress."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan, self._say = plan, say
        self._findings = Findings(plan.seed, plan.minutes)
        self._stage = Stage(plan.log_dir, say)
        self._worker = Worker(self._findings.verdicts.append)
        self._deal = Deal(plan.seed)

    async def run(self, stopping: asyncio.Event) -> Report:
        """All six states; `stopping` ends the load early. Raises SetupError when the cluster cannot start."""
        sampler: asyncio.Future[None] | None = None
        try:
            await self._worker.start()
            await self._stage.start()
            self._say(f"cluster up, logs in {self._plan.log_dir}; seed {self._plan.seed}, {self._plan.minutes:g} minutes")
            sampler = asyncio.ensure_future(self._sample())
            await self._under_load(stopping)
            await self._settle()
            self._findings.unserved += self._stage.empty
            self._findings.hung += await self._stage.end_fronts()
            self._findings.crashes += self._stage.crashes()
        finally:
            if sampler is not None:
                await cancel(sampler)
            await self._stage.close()
        self._say(f"cluster ended; {self._worker.num_pending} streams are still to be compared")
        self._findings.num_unverified = await self._worker.finish()
        return self._findings.report(demand_of(self._plan.minutes) if self._plan.kinds == KINDS else Demand())

    def close(self) -> None:
        """After a run that was cut short."""
        self._worker.kill()

    async def _under_load(self, stopping: asyncio.Event) -> None:
        routers = Routers(list(self._stage.cluster.routers.values()), self._stage.cluster.security)
        watching = asyncio.create_task(routers.watch())
        await until(routers.all_serve, 10.0)
        load = Load(routers, self._deal, self._plan.num_clients, self._verify)
        faults = Faults(self._stage, load, self._deal)
        self._findings.outcomes, self._findings.fired, self._findings.kinds = load.outcomes, faults.fired, self._kinds(faults)
        began = time.monotonic()
        loading = asyncio.create_task(load.run())
        telling = asyncio.create_task(self._tell(load, faults, began))
        striking: list[asyncio.Task[None]] = []
        try:
            await first_of(self._strike(faults, striking, began), stopping.wait(), _raised(loading))
            load.stop()
            self._findings.load_s = time.monotonic() - began
            self._say("no new faults; waiting for ranks to return and for streams to end")
            await asyncio.wait({*striking, loading}, timeout=2 * (BACK_S + SILENCE_S))
            for task in (*striking, loading):
                if task.done():
                    task.result()
        finally:
            await cancel(*striking, loading, telling, watching)

    async def _strike(self, faults: Faults, striking: list["asyncio.Task[None]"], began: float) -> None:
        until_s = began + 60 * self._plan.minutes
        decks = shuffled_decks(self._findings.kinds, self._plan.seed)
        for turn in itertools.count(1):
            due = began + FAULT_EVERY_S * (turn - 0.5)
            if due >= until_s:
                break
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            striking.append(asyncio.create_task(faults.strike(next(decks))))
        await asyncio.sleep(max(until_s - time.monotonic(), 0.0))

    def _kinds(self, faults: Faults) -> list[str]:
        """Those asked for that can be had here. Raises SetupError when that is none."""
        kinds = [kind for kind in faults.kinds() if kind in self._plan.kinds]
        if not kinds:
            raise SetupError(f"none of {', '.join(self._plan.kinds)} can be had here; ask for other kinds")
        return kinds

    async def _settle(self) -> None:
        began = time.monotonic()
        if not await until(lambda: not self._stage.watcher.untidy(), _SETTLE_S):
            self._findings.leaked = self._stage.watcher.untidy()
        self._findings.settle_s = time.monotonic() - began
        self._say(f"all pages back after {self._findings.settle_s:.1f} s" if not self._findings.leaked else "pages are missing")

    async def _sample(self) -> None:
        while True:
            self._stage.sample()
            await asyncio.sleep(_SAMPLE_S)

    async def _tell(self, load: Load, faults: Faults, began: float) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            fates = [outcome.fate for outcome in load.outcomes]
            last = f"{faults.fired[-1].kind} ({faults.fired[-1].variant}) on {faults.fired[-1].target}" if faults.fired else "none yet"
            counts = ", ".join(f"{fates.count(fate)} {fate}" for fate in ("running", "completed", "failed", "vanished", "hung"))
            verdicts = self._findings.verdicts
            compared = f"{len(verdicts)} compared, {sum(bool(verdict.wrong) for verdict in verdicts)} wrong"
            self._say(f"{time.monotonic() - began:5.0f} s: {counts}; {compared}; last fault: {last}")

    def _verify(self, outcome: Outcome) -> None:
        template = outcome.draw.template
        for seen in (*outcome.choices, *outcome.cut_short):
            if seen.token_ids:
                self._worker.put(_job(outcome, seen))
        if outcome.fate in ("failed", "hung"):
            self._say(f"request {outcome.number} ({len(template.prompt_ids)} prompt tokens) {outcome.fate}: {outcome.error}")


async def _raised(task: "asyncio.Task[None]") -> None:
    """Ends only when `task` fails."""
    await asyncio.shield(task)


def _job(outcome: Outcome, seen: Seen) -> Job:
    template = outcome.draw.template
    return Job(
        number=outcome.number, prompt_ids=template.prompt_ids, params=template.params, choice=seen.choice, token_ids=tuple(seen.token_ids),
        logprobs=tuple(seen.logprobs), stops=template.stops, text=seen.text,
        reason=common_pb2.FinishReason.Name(seen.finished.reason) if seen.finished is not None else "",
    )


def default_log_dir(seed: int) -> Path:
    """A folder of this run's own below .run."""
    return Path(".run") / "chaos" / f"seed{seed}-{time.strftime('%H%M%S')}-{os.getpid()}"
