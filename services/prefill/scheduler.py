"""Which prompts hold pages, and which of their tokens the next forward computes. Pure: no clock, no tensor, no network.

    scheduler.add(prompt)             joins the queue; HandoffError (OVERLOADED, TOO_LARGE) when it may not
    plan = scheduler.schedule()       admits from the head of the queue, then shares the step's tokens out
    scheduler.advance(chunk)          after the forward
    scheduler.remove(key)             finished, failed or cancelled, wherever it stands: its own hold on pages ends

First come, first served: only the head of the queue is admitted, when *all* pages that its prompt lacks (and the copies that its choices
need) can be had at once, its hits in the prefix cache pinned; and no sooner than a step has tokens for it, so that a burst of one prefix
finds what its first member cached.
A prompt that does not end in the step leaves half of the tokens that it finds to those behind it, and gets back what they leave: a short
prompt behind a long one shares its steps. Guarded by the kv lock, like the pages.
"""
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from proto.baton.v1 import common_pb2
from services.kv.layout import PAGE_SIZE, num_pages_for
from services.kv.messages import RequestKey
from services.kv.pages import Holder, HolderKind
from services.runtime.errors import EngineError, HandoffError


class Pages(Protocol):
    """The part of KvPool that a schedule needs."""

    @property
    def num_pages(self) -> int: ...
    @property
    def num_available(self) -> int: ...
    def match(self, digests: Sequence[bytes], holder: Holder) -> list[int]: ...
    def take(self, num_pages: int, holder: Holder) -> list[int]: ...
    def release(self, holder: Holder) -> None: ...


@dataclass(slots=True, eq=False)
class Prompt:
    """One prompt's way through the schedule; `digests` are those of its pages that have one, so never all of its tokens."""

    key: RequestKey
    num_tokens: int
    digests: Sequence[bytes]
    num_copies: int = 0  # pages besides its own: a copy of the last page for each choice but the first
    pages: list[int] = field(default_factory=list[int])  # from admission on: one a PAGE_SIZE tokens, the last may be partial
    copies: list[int] = field(default_factory=list[int])  # from admission on, [num_copies]
    num_cached: int = 0  # tokens found in the prefix cache at admission; before it, a guess
    num_computed: int = 0  # tokens whose KV is in `pages`, cached ones included

    @property
    def holder(self) -> Holder:
        """Who holds its pages while it is computed."""
        return Holder(HolderKind.REQUEST, self.key)

    @property
    def num_pages(self) -> int:
        """Pages that it needs, cached ones included."""
        return num_pages_for(self.num_tokens) + self.num_copies

    @property
    def num_left(self) -> int:
        """Tokens still to be computed."""
        return self.num_tokens - max(self.num_computed, self.num_cached)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[start, start + num_tokens)` of a prompt, for one forward."""

    prompt: Prompt
    start: int
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends in it."""
        return self.start + self.num_tokens == self.prompt.num_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Every chunk has at least one token."""

    admitted: list[Prompt]
    chunks: list[Chunk]


class Scheduler:
    """Queue and computing prompts of one rank."""

    def __init__(self, pages: Pages, *, chunk_tokens: int, max_running: int, max_queued: int) -> None:
        self._pages = pages
        self._chunk_tokens = chunk_tokens
        self.max_running = max_running
        self._max_queued = max_queued
        self._queued: deque[Prompt] = deque()
        self._computing: dict[RequestKey, Prompt] = {}  # in the order of admission

    @property
    def num_queued(self) -> int:
        """Prompts that wait for pages or for their first step."""
        return len(self._queued)

    @property
    def num_computing(self) -> int:
        """Admitted prompts."""
        return len(self._computing)

    @property
    def num_computed_tokens(self) -> int:
        """KV tokens of admitted prompts."""
        return sum(prompt.num_computed for prompt in self._computing.values())

    @property
    def num_queued_tokens(self) -> int:
        """Tokens, cached ones left out, that are still to be computed."""
        return sum(prompt.num_left for prompt in self._queued) + sum(prompt.num_left for prompt in self._computing.values())

    def add(self, prompt: Prompt) -> None:
        """Queue a prompt; refusals are HandoffErrors with a typed reason."""
        if prompt.num_pages > self._pages.num_pages:
            copies = f" and {prompt.num_copies} copies of the last" if prompt.num_copies else ""
            raise HandoffError(
                common_pb2.TOO_LARGE,
                f"the prompt's {prompt.num_tokens} tokens need {prompt.num_pages - prompt.num_copies} pages{copies} but this rank has "
                f"{self._pages.num_pages}; raise prefill.num_pages",
            )
        if len(self._queued) >= self._max_queued:
            raise HandoffError(
                common_pb2.OVERLOADED, f"{len(self._queued)} prompts wait and prefill.max_queued is {self._max_queued}; try another rank"
            )
        prompt.num_cached = PAGE_SIZE * len(self._pages.match(prompt.digests, prompt.holder))
        self._pages.release(prompt.holder)  # a queued prompt pins nothing
        self._queued.append(prompt)

    def remove(self, key: RequestKey) -> Prompt | None:
        """Forget a prompt and drop its hold on pages; None when there is none."""
        prompt = self._computing.pop(key, None)
        if prompt is None:
            prompt = next((queued for queued in self._queued if queued.key == key), None)
            if prompt is not None:
                self._queued.remove(prompt)
            return prompt
        self._pages.release(prompt.holder)
        return prompt

    def schedule(self) -> Plan:
        """Chunks of the next forward, none when there is nothing to compute."""
        budget = self._chunk_tokens
        shares: dict[RequestKey, int] = {}
        admitted: list[Prompt] = []
        for prompt in self._computing.values():
            shares[prompt.key] = self._share(prompt, budget)
            budget -= shares[prompt.key]
        while self._may_admit(budget) and self._admit(self._queued[0]):
            prompt = self._queued.popleft()
            admitted.append(prompt)
            shares[prompt.key] = self._share(prompt, budget)
            budget -= shares[prompt.key]
        for prompt in self._computing.values():  # what nobody behind wanted goes back, to the oldest first
            more = min(budget, prompt.num_left - shares[prompt.key])
            shares[prompt.key] += more
            budget -= more
        chunks = [Chunk(prompt, prompt.num_computed, shares[prompt.key]) for prompt in self._computing.values() if shares[prompt.key]]
        return Plan(admitted, chunks)

    def advance(self, chunk: Chunk) -> None:
        """A chunk was computed."""
        if chunk.start != chunk.prompt.num_computed:
            raise EngineError(f"{chunk.prompt.key} computed from token {chunk.start} but has {chunk.prompt.num_computed}")
        chunk.prompt.num_computed += chunk.num_tokens

    def _share(self, prompt: Prompt, budget: int) -> int:
        """Tokens of a step's `budget` for this prompt before others had their turn; whole pages where it does not end."""
        if prompt.num_left <= budget:
            return prompt.num_left
        half = (budget + 1) // 2
        return half - half % PAGE_SIZE if half >= PAGE_SIZE else half

    def _may_admit(self, budget: int) -> bool:
        """Whether the head of the queue is worth admitting now: for less than a page it would only pin pages and miss the cache."""
        if not self._queued or len(self._computing) >= self.max_running:
            return False
        return budget >= min(PAGE_SIZE, self._chunk_tokens, self._queued[0].num_left)

    def _admit(self, prompt: Prompt) -> bool:
        """Pin the prompt's cached prefix and take all other pages, or leave everything as it was."""
        cached = self._pages.match(prompt.digests, prompt.holder)
        num_lacking = prompt.num_pages - len(cached)
        if num_lacking > self._pages.num_available:
            self._pages.release(prompt.holder)
            return False
        taken = self._pages.take(num_lacking, prompt.holder)
        num_own = num_lacking - prompt.num_copies
        prompt.pages, prompt.copies = cached + taken[:num_own], taken[num_own:]
        prompt.num_cached = prompt.num_computed = PAGE_SIZE * len(cached)
        self._computing[prompt.key] = prompt
        return True
