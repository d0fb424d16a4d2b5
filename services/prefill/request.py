"""One request as the prefill engine keeps it from Run until its first token."""
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from services.kv.hash import ROOT, page_digest, page_digests
from services.kv.kv_pool import KvPool
from services.kv.layout import PAGE_SIZE
from services.prefill.messages import Run
from services.prefill.scheduler import Prompt


@dataclass(slots=True, eq=False)
class Request:
    """`prompt` is what the scheduler moves on; the rest is what the engine adds. Times in seconds of a monotonic clock."""

    run: Run
    prompt: Prompt
    queued_at: float
    admitted_at: float = 0.0
    num_announced: int = 0  # pages
    num_stored: int = 0  # pages that this request has given to the prefix cache, or found there
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    @classmethod
    def of(cls, run: Run, clock: Callable[[], float]) -> "Request":
        """A request that has just arrived."""
        prompt = Prompt(run.key, len(run.token_ids), page_digests(run.token_ids, run.salt))
        return cls(run, prompt, clock(), clock=clock)

    def admitted(self) -> None:
        """Its pages are here; those found in the prefix cache need no storing."""
        self.admitted_at = self.clock()
        self.num_stored = self.prompt.num_computed // PAGE_SIZE

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

    def store(self, pool: KvPool, next_id: int | None = None) -> None:
        """Put full, final pages into the prefix cache; `next_id`, the first token, settles the page that the prompt fills exactly."""
        digests = list(self.prompt.digests)
        if next_id is not None and self.prompt.num_tokens % PAGE_SIZE == 0:
            digests.append(page_digest(digests[-1] if digests else ROOT, self.run.token_ids[-PAGE_SIZE:], next_id, self.run.salt))
        num_final = min(self.prompt.num_computed // PAGE_SIZE, len(digests))
        if num_final > self.num_stored:
            pool.insert(digests[:num_final], self.prompt.pages[:num_final])
            self.num_stored = num_final
