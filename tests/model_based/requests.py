"""Requests of a world as their router knows them, and the attempts at each."""

from dataclasses import dataclass, field

from services.kv.hash import page_digests
from services.kv.messages import RequestKey
from services.model.params import SamplingParams
from tests.model_based.ranks import Rank, ReaderRank
from tests.model_based.scripted import mono

LENGTHS = (1, 3, 4, 5, 8, 9, 12)  # of prompts: around the edges of pages
MAX_TOKENS = (2, 6, 10)


@dataclass(eq=False)
class Ask:
    """One request: `expected` is the oracle's output."""

    name: str
    prompt: list[int]
    params: SamplingParams
    expected: list[int]
    sent: list[int] = field(default_factory=list[int])
    done: bool = False
    cancelled: bool = False
    num_preemptions: int = 0
    attempts: list["Attempt"] = field(default_factory=list["Attempt"])

    @property
    def full(self) -> list[int]:
        return self.prompt + self.expected

    @property
    def is_open(self) -> bool:
        """Whether somebody waits for its end."""
        return not self.done and not self.cancelled

    @property
    def attempt(self) -> "Attempt":
        """The latest that goes on, or the latest."""
        return next((attempt for attempt in reversed(self.attempts) if not attempt.failed), self.attempts[-1])

    @property
    def is_served(self) -> bool:
        """Whether any attempt goes on."""
        return not self.attempt.failed

    def digests(self) -> dict[bytes, int]:
        """Digest -> index of its page."""
        return {digest: index for index, digest in enumerate(page_digests(self.full))}


@dataclass(eq=False)
class RunLeg:
    """A prefill of one or more attempts: a redirect hands it on."""

    key: RequestKey  # as it was sent
    base: int  # tokens that were sent before
    over: bool = False  # RunDone or RunFailed came
    leased: bool = False
    lease_over: bool = False


@dataclass(eq=False)
class Attempt:
    """One try: a holder and a reader. A claim is over when its side has said so, or is gone."""

    ask: Ask
    key: RequestKey
    holder: Rank
    reader: ReaderRank
    session: int
    handle: int
    base: int  # tokens that were sent before
    leg: RunLeg | None  # none when a decode rank hands a running request over
    source: "Attempt | None" = None  # the attempt that runs at the holder
    failed: bool = False
    reason: int = 0  # of its failure, if it was told
    ready: bool = False
    claim_over: bool = False  # Finished or Failed came
    claim_cancelled: bool = False

    def __post_init__(self) -> None:
        self.instances = self.holder.id, self.reader.id

    @property
    def is_intact(self) -> bool:
        """Whether both ranks are the instances that it began with."""
        return self.instances == (self.holder.id, self.reader.id) and not self.holder.is_dead and not self.reader.is_dead


def make_ask(number: int, first: int, rest: int, length: int, max_tokens: int, *, stops_at_once: bool) -> Ask:
    """Prompts share their first page when `first` is equal, and more when `rest` is too."""
    prompt = [2 + (29 * (first + 1) + 7 * i if i < 4 else 83 + 31 * rest + 5 * i) % 250 for i in range(length)]
    expected = mono(prompt, max_tokens)
    stop: tuple[int, ...] = ()
    if stops_at_once:
        stop, expected = (expected[0],), expected[:1]
    return Ask(f"r{number}", prompt, SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0, stop_token_ids=stop), expected)

