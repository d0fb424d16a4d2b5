"""One request as the prefill engine keeps it from Run until its first tokens, with its choices; and all that are here."""
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from services.kv.hash import ROOT, page_digest, page_digests
from services.kv.kv_pool import KvPool
from services.kv.layout import PAGE_SIZE
from services.kv.messages import PeerRank, RequestKey
from services.kv.metrics import HIT_TOKENS, QUERY_TOKENS
from services.prefill.messages import Run
from services.prefill.scheduler import Prompt


@dataclass(slots=True, eq=False)
class Choice:
    """One choice of a Run: a hand-off of its own. A redirect changes both fields."""

    key: RequestKey
    reader: PeerRank


@dataclass(slots=True, eq=False)
class Request:
    """`prompt` is what the scheduler moves on; the rest is what the engine adds. Times in seconds of a monotonic clock."""

    run: Run
    prompt: Prompt
    choices: list[Choice]  # none when nobody reads on
    queued_at: float
    admitted_at: float = 0.0
    num_announced: int = 0  # pages
    num_stored: int = 0  # pages that this request has given to the prefix cache, or found there
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    @classmethod
    def of(cls, run: Run, clock: Callable[[], float]) -> "Request":
        """A request that has just arrived."""
        choices = [Choice(key, reader) for key, reader in zip(run.keys, run.readers, strict=True)] if run.readers else []
        prompt = Prompt(run.key, len(run.token_ids), page_digests(run.token_ids, run.salt), max(len(choices) - 1, 0))
        return cls(run, prompt, choices, clock(), clock=clock)

    def admitted(self) -> None:
        """Its pages are here; those found in the prefix cache need no storing."""
        self.admitted_at = self.clock()
        self.num_stored = self.prompt.num_computed // PAGE_SIZE
        QUERY_TOKENS.inc(self.prompt.num_tokens)
        HIT_TOKENS.inc(self.prompt.num_cached)

    @property
    def queue_us(self) -> int:
        """Microseconds from arrival to admission."""
        return round(1e6 * (self.admitted_at - self.queued_at))

    @property
    def compute_us(self) -> int:
        """Microseconds since admission."""
        return round(1e6 * (self.clock() - self.admitted_at))

    def new_pages(self, num_pages: int) -> list[tuple[int, int]]:
        """`(index, page)` of the first `num_pages` pages, without those that were given out before."""
        first, self.num_announced = self.num_announced, max(self.num_announced, num_pages)
        return list(enumerate(self.prompt.pages))[first:num_pages]

    @property
    def last_pages(self) -> list[int]:
        """Each choice's own page of the last prompt token: the first has the one that was computed, the others its copies."""
        return [self.prompt.pages[-1], *self.prompt.copies]

    def store(self, pool: KvPool) -> None:
        """Put full, final pages into the prefix cache."""
        num_final = min(self.prompt.num_computed // PAGE_SIZE, len(self.prompt.digests))
        if num_final > self.num_stored:
            pool.insert(self.prompt.digests[:num_final], self.prompt.pages[:num_final], self.run.token_ids)
            self.num_stored = num_final

    def store_last(self, pool: KvPool, page: int, next_id: int) -> None:
        """The same for the page that the prompt fills exactly, if it does: `next_id`, a choice's first token, settles its digest."""
        if self.prompt.num_tokens % PAGE_SIZE == 0:
            before = list(self.prompt.digests)
            digest = page_digest(before[-1] if before else ROOT, self.run.token_ids[-PAGE_SIZE:], next_id, self.run.salt)
            pool.insert([*before, digest], [*self.prompt.pages[: len(before)], page], self.run.token_ids)


class Requests:
    """QUEUED and COMPUTING requests, by the key of their Run and by those of their choices."""

    def __init__(self) -> None:
        self._by_run: dict[RequestKey, Request] = {}
        self._by_choice: dict[RequestKey, Request] = {}

    def __len__(self) -> int:
        return len(self._by_run)

    def all(self) -> list[Request]:
        """In the order of their arrival."""
        return list(self._by_run.values())

    def waiting_since(self) -> float | None:
        """When the oldest request that was not admitted yet came; None when there is none."""
        return next((request.queued_at for request in self._by_run.values() if not request.admitted_at), None)

    def __getitem__(self, run_key: RequestKey) -> Request:
        return self._by_run[run_key]

    def of_run(self, key: RequestKey) -> Request | None:
        """The request of the Run with this key."""
        return self._by_run.get(key)

    def of_choice(self, key: RequestKey) -> Request | None:
        """The request one of whose choices is handed over under this key."""
        return self._by_choice.get(key)

    def add(self, request: Request) -> None:
        """A request has come."""
        self._by_run[request.run.key] = request
        self._by_choice |= dict.fromkeys([choice.key for choice in request.choices], request)

    def remove(self, request: Request) -> None:
        """It is answered."""
        del self._by_run[request.run.key]
        for choice in request.choices:
            del self._by_choice[choice.key]

    def redirect(self, key: RequestKey, new_key: RequestKey, reader: PeerRank) -> bool:
        """Another key and reader for a choice; False when `key` is none's."""
        request = self._by_choice.pop(key, None)
        if request is None:
            return False
        for choice in request.choices:
            if choice.key == key:
                choice.key, choice.reader = new_key, reader
        self._by_choice[new_key] = request
        return True
