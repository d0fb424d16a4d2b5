"""What a chaos run found: figures, and a sentence for each promise that was broken.

`add_*` take what happens, `report()` draws the conclusions.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec

from proto.baton.v1 import common_pb2, generation_pb2
from services.doctor.chaos.kinds import KINDS, Fired
from services.doctor.chaos.load import Outcome
from services.doctor.chaos.worker import Verdict
from services.doctor.oracle import EXCUSED_ONE_IN

COMPLETED_SHARE = 0.99
LONG_OUTPUT = 64  # tokens of a request that counts as load
FATES: tuple[str, ...] = ("completed", "failed", "vanished", "hung")
PATHS: tuple[str, ...] = ("RETRY", "REDIRECT", "REPLAY", "MOVE")
_MAX_SENTENCES = 10  # of one kind of breach


class Demand(msgspec.Struct, frozen=True):
    """What a run of this length must have seen: times of each kind of fault and of each path, requests of LONG_OUTPUT tokens."""

    per_kind: int = 0
    per_path: int = 0
    requests: int = 0


def demand_of(minutes: float) -> Demand:
    """The issue's bounds: 30 minutes as a benchmark, 3 as a test; shorter runs only look."""
    if minutes >= 30:
        return Demand(20, 20, 1500)
    return Demand(1, 1, 0) if minutes >= 3 else Demand()


class Spread(msgspec.Struct, frozen=True):
    """Seconds."""

    number: int
    median: float
    p99: float
    most: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is printed; JSON with the same names."""

    seed: int
    minutes: float
    requests: dict[str, int]  # by fate, and "long" = completed with LONG_OUTPUT tokens, "failed over" = of any fate
    completed_share: float  # of those that did not vanish, while each pool had a serving rank
    errors: dict[str, int]
    faults: dict[str, dict[str, int]]  # kind -> variant -> times
    armed: dict[str, int]  # of the faults armed on a moment, those that struck at it
    left_out: tuple[str, ...]  # kinds that cannot be had here
    paths: dict[str, int]  # taken, and a token came of it
    tries: dict[str, int]  # taken, whatever came of it
    num_retries: int  # that the router counted
    reasons: dict[str, int]
    tokens: dict[str, int]  # compared, excused, wrong streams, repeated after a router's death
    stream_recovery: dict[str, Spread]  # by kind, and of "all": from the fault to the next token of each stream that it hit
    rank_recovery: Spread  # from the fault to all ranks serving again
    rank_recovery_after_release: Spread
    move_pause: Spread
    leaked: tuple[str, ...]
    hung_processes: tuple[str, ...]
    crashes: dict[str, int]  # engines that ended by themselves: a breach, since no fault of the run explains it
    settle_s: float
    unserved_s: float
    tokens_per_s: float
    breaches: tuple[str, ...]


class Findings:
    """Collected while the run goes on."""

    def __init__(self, seed: int, minutes: float) -> None:
        self.seed, self.minutes = seed, minutes
        self.load_s = 0.0
        self.outcomes: list[Outcome] = []
        self.verdicts: list[Verdict] = []
        self.fired: list[Fired] = []
        self.kinds: list[str] = list(KINDS)
        self.unserved: list[tuple[float, float]] = []
        self.leaked: dict[str, str] = {}
        self.hung: list[str] = []
        self.crashes: list[str] = []
        self.num_unverified = 0
        self.settle_s = 0.0

    def report(self, demand: Demand) -> Report:
        """All figures and breaches."""
        recoveries = [recovery for outcome in self.outcomes for line in outcome.timelines for recovery in line.recoveries]
        requests = {fate: sum(outcome.fate == fate for outcome in self.outcomes) for fate in FATES}
        requests["failed over"] = sum(outcome.num_failovers > 0 for outcome in self.outcomes)
        requests["long"] = sum(_is_long(outcome) for outcome in self.outcomes)
        owed, served = self._owed()
        paths, tries = _by_path([recovery for recovery in recoveries if recovery.us]), _by_path(recoveries)
        share = served / owed if owed else 1.0
        returned = [fired for fired in self.fired if fired.released and fired.back]
        return Report(
            seed=self.seed, minutes=self.minutes, requests=requests, completed_share=share,
            errors=dict(Counter(_short(outcome.error) for outcome in self.outcomes if outcome.fate in ("failed", "hung"))),
            faults=self._faults(),
            armed={"armed": sum(fired.hit is not None for fired in self.fired), "hit": sum(bool(fired.hit) for fired in self.fired)},
            left_out=tuple(kind for kind in KINDS if kind not in self.kinds), paths=paths, tries=tries,
            num_retries=sum(line.num_retries for outcome in self.outcomes for line in outcome.timelines),
            reasons=dict(Counter(common_pb2.Reason.Name(recovery.reason) for recovery in recoveries)),
            tokens={
                "compared": sum(verdict.num_tokens for verdict in self.verdicts),
                "excused": sum(len(verdict.excused) for verdict in self.verdicts),
                "wrong streams": sum(bool(verdict.wrong) for verdict in self.verdicts),
                "repeated": sum(len(seen.token_ids) for outcome in self.outcomes for seen in outcome.cut_short),
            },
            stream_recovery=self._stream_recovery(),
            rank_recovery=_spread([fired.back - fired.at for fired in returned]),
            rank_recovery_after_release=_spread([fired.back - fired.released for fired in returned]),
            move_pause=_spread([recovery.us / 1e6 for recovery in recoveries
                                if recovery.path == generation_pb2.Recovery.MOVE and recovery.us]),
            leaked=tuple(self.leaked.values()), hung_processes=tuple(self.hung),
            crashes=dict(Counter(self.crashes)), settle_s=self.settle_s,
            unserved_s=sum(end - begin for begin, end in self.unserved),
            tokens_per_s=sum(outcome.num_tokens for outcome in self.outcomes) / max(self.load_s, 1e-9),
            breaches=tuple(self._breaches(demand, share, paths, requests["long"])),
        )

    def _owed(self) -> tuple[int, int]:
        """Requests that had to complete, and those of them that did."""
        owed = [outcome for outcome in self.outcomes if outcome.fate != "vanished" and not any(
            begin < outcome.ended and end > outcome.began for begin, end in self.unserved)]
        return len(owed), sum(outcome.fate == "completed" for outcome in owed)

    def _faults(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {kind: {} for kind in self.kinds}
        for fired in self.fired:
            table = found.setdefault(fired.kind, {})
            table[fired.variant] = table.get(fired.variant, 0) + 1
        return found

    def _stream_recovery(self) -> dict[str, Spread]:
        """From a fault to the next token of each stream that it hit: one that recovered, and whose longest wait held the fault."""
        gaps: dict[str, list[float]] = {"all": []}
        for outcome in self.outcomes:
            is_hit = outcome.num_failovers or any(line.recoveries or line.num_retries for line in outcome.timelines)
            if not is_hit or not outcome.arrivals:
                continue
            times = [outcome.began, *outcome.arrivals]
            at = max(range(1, len(times)), key=lambda index: times[index] - times[index - 1])
            struck = [fired for fired in self.fired if times[at - 1] <= fired.at < times[at]]
            if struck:
                gap = times[at] - struck[-1].at
                gaps["all"].append(gap)
                gaps.setdefault(struck[-1].kind, []).append(gap)
        return {kind: _spread(seconds) for kind, seconds in gaps.items()}

    def _breaches(self, demand: Demand, share: float, paths: dict[str, int], num_long: int) -> list[str]:
        found = [sentence for sentences in (self._wrong_tokens(), self._not_over(), self._not_back()) for sentence in sentences]
        if share < COMPLETED_SHARE:
            found.append(f"only {share:.2%} of the requests completed that had to, but {COMPLETED_SHARE:.0%} must")
        counts = Counter(fired.kind for fired in self.fired)
        found += [f"{kind} struck {counts[kind]} times, but {demand.per_kind} were asked for"
                  for kind in self.kinds if counts[kind] < demand.per_kind]
        found += [f"path {path} was taken {paths[path]} times, but {demand.per_path} were asked for"
                  for path in ("REDIRECT", "MOVE", "REPLAY") if paths[path] < demand.per_path]
        if num_long < demand.requests:
            found.append(f"{num_long} requests of {LONG_OUTPUT} tokens and more completed, but {demand.requests} were asked for")
        return found

    def _wrong_tokens(self) -> list[str]:
        wrong = [f"request {verdict.number}: {sentence}" for verdict in self.verdicts for sentence in verdict.wrong[:1]]
        found = _at_most(wrong)
        num_tokens, num_excused = sum(v.num_tokens for v in self.verdicts), sum(len(v.excused) for v in self.verdicts)
        allowed = math.ceil(num_tokens / EXCUSED_ONE_IN)
        if num_excused > allowed:
            found.append(f"{num_excused} of {num_tokens} tokens had to be excused, but at most {allowed} may")
        if self.num_unverified:
            found.append(f"{self.num_unverified} streams were not compared: the verifying process ended")
        excused = {verdict.number for verdict in self.verdicts if verdict.excused}
        completed = [outcome for outcome in self.outcomes if outcome.fate == "completed"]
        found += _at_most([f"request {outcome.number}: tokens seen before its router died were not repeated as they were"
                           for outcome in completed if outcome.number not in excused and not _repeats(outcome)])
        return [*found, *_at_most([f"request {outcome.number}: usage is {used}, but {came} came"
                                   for outcome in completed for used, came in _usage(outcome) if used != came])]

    def _not_over(self) -> list[str]:
        """Streams, pages and processes."""
        hung = [f"request {outcome.number} hung: {outcome.error}" for outcome in self.outcomes if outcome.fate in ("hung", "running")]
        silent = [f"request {outcome.number} failed without a word: {outcome.error}" for outcome in self.outcomes
                  if outcome.fate == "failed" and outcome.error.startswith("the stream ended")]
        leaked = [f"pages did not come back in {self.settle_s:.0f} s: {instance_id}: {text}" for instance_id, text in self.leaked.items()]
        crashed = [f"{crash} by itself, {number} times" for crash, number in Counter(self.crashes).items()]
        return [*_at_most(hung), *_at_most(silent), *leaked, *crashed, *(f"{name} did not end when it was told to" for name in self.hung)]

    def _not_back(self) -> list[str]:
        return [f"{fired.kind} ({fired.variant}): {fired.breach}" for fired in self.fired if fired.breach]


def _by_path(recoveries: Sequence[generation_pb2.Recovery]) -> dict[str, int]:
    counts = Counter(generation_pb2.Recovery.Path.Name(recovery.path) for recovery in recoveries)
    return {path: counts[path] for path in PATHS}


def _is_long(outcome: Outcome) -> bool:
    return outcome.fate == "completed" and any(len(seen.token_ids) >= LONG_OUTPUT for seen in outcome.choices)


def _repeats(outcome: Outcome) -> bool:
    """Whether every stream cut short begins one of the final ones."""
    return all(outcome.choices[seen.choice].token_ids[: len(seen.token_ids)] == seen.token_ids for seen in outcome.cut_short)


def _usage(outcome: Outcome) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Of each choice: prompt and output tokens as told, and as they were."""
    return [((seen.finished.usage.prompt_tokens, seen.finished.usage.completion_tokens),
             (len(outcome.draw.template.prompt_ids), len(seen.token_ids))) for seen in outcome.choices if seen.finished is not None]


def _short(error: str) -> str:
    """An error without its ids and numbers, so that equal ones are counted together."""
    words = ("#" if any(character.isdigit() for character in word) else word for word in error.split())
    return " ".join(words)[:160]


def _at_most(sentences: Sequence[str]) -> list[str]:
    rest = len(sentences) - _MAX_SENTENCES
    return [*sentences[:_MAX_SENTENCES], *([f"and {rest} more like the last"] if rest > 0 else [])]


def _spread(seconds: Sequence[float]) -> Spread:
    if not seconds:
        return Spread(0, 0.0, 0.0, 0.0)
    ordered = sorted(seconds)
    p99 = ordered[min(math.ceil(0.99 * len(ordered)) - 1, len(ordered) - 1)]
    return Spread(len(ordered), round(statistics.median(ordered), 3), round(p99, 3), round(ordered[-1], 3))
