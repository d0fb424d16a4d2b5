"""The index against a model that is slow and obvious: per rank and source a plain collection, hits counted page by page."""

import random
from collections import OrderedDict
from collections.abc import Sequence

import pytest

from services.kv.hash import page_digests
from services.router.prefix_index import SOURCES, SPECULATIVE_S, PrefixIndex


class Model:
    """One rank."""

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self.is_exact = False
        self.events: set[bytes] = set()
        self.approximate: OrderedDict[bytes, None] = OrderedDict()
        self.ends: dict[bytes, float] = {}

    def keep(self, digests: Sequence[bytes]) -> None:
        if self.is_exact:
            return
        for digest in reversed(digests):
            self.approximate.pop(digest, None)
            self.approximate[digest] = None
        while len(self.approximate) > self.max_pages:
            self.approximate.pop(next(iter(self.approximate)))

    def num_hit_tokens(self, digests: Sequence[bytes], now: float) -> int:
        num_pages = 0
        for digest in digests:
            if digest not in self.events and digest not in self.approximate and self.ends.get(digest, now) <= now:
                break
            num_pages += 1
        return 64 * num_pages


class Ranks:
    """Index and models side by side; every method does one random thing to both, to a rank that is there most of the time."""

    STEPS = ("add", "rename", "drop", "clear", "exact", *2 * ("stored",), *2 * ("removed",), *2 * ("keep",), *3 * ("expect",))

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.index = rng, PrefixIndex()
        self.models: dict[str, Model] = {}
        self.slots: dict[str, int] = {}
        self.num_ids = 0

    def fresh(self) -> str:
        self.num_ids += 1
        return f"r{self.num_ids}"

    def step(self, kind: str, chain: list[bytes], now: float) -> None:
        name = self.rng.choice(list(self.models)) if self.models and self.rng.random() < 0.97 else "nobody"
        part = chain[: self.rng.randrange(len(chain) + 1)]
        getattr(self, kind)(name, self.models.get(name, Model(1000)), part, now)

    def add(self, *_: object) -> None:
        if len(self.models) < 12 and self.rng.random() < 0.5:
            name, max_pages = self.fresh(), self.rng.choice([5, 20, 1000])
            self.models[name], self.slots[name] = Model(max_pages), self.index.add(name, max_pages)

    def rename(self, name: str, *_: object) -> None:
        if name in self.models:
            new = self.fresh()
            self.index.rename(name, new)
            self.models[new], self.slots[new] = self.models.pop(name), self.slots.pop(name)

    def drop(self, name: str, *_: object) -> None:
        if self.rng.random() < 0.3:
            self.index.drop(name)
            self.models.pop(name, None)

    def clear(self, name: str, model: Model, *_: object) -> None:
        if self.rng.random() < 0.2:
            self.index.cleared(name)
            model.events.clear()

    def exact(self, name: str, model: Model, *_: object) -> None:
        model.is_exact = self.rng.random() < 0.5
        self.index.set_exact(name, model.is_exact)
        if model.is_exact:
            model.approximate.clear()

    def stored(self, name: str, model: Model, part: list[bytes], now: float) -> None:
        model.events |= set(part)
        self.index.stored(name, part)

    def removed(self, name: str, model: Model, part: list[bytes], now: float) -> None:
        some = [digest for digest in part if self.rng.random() < 0.3]
        self.index.removed(name, some)
        model.events -= set(some)

    def keep(self, name: str, model: Model, part: list[bytes], now: float) -> None:
        self.index.keep(name, part)
        model.keep(part)

    def expect(self, name: str, model: Model, part: list[bytes], now: float) -> None:
        self.index.expect(name, part, now)
        model.ends |= dict.fromkeys(part, now + SPECULATIVE_S)


def chains_of(rng: random.Random) -> list[list[bytes]]:
    """Digests of prompts that branch off one of twelve pages."""
    trunk = [rng.randrange(100) for _ in range(64 * 12 + 1)]
    cuts = [rng.randrange(len(trunk)) for _ in range(12)]
    prompts = [trunk, *(trunk[:cut] + [rng.randrange(100) for _ in range(64 * rng.randrange(1, 12))] for cut in cuts), []]
    return [page_digests(prompt) for prompt in prompts]


@pytest.mark.parametrize("seed", range(12))
def test_hits_equal_the_models(seed: int) -> None:
    """3,000 random steps over ranks that come, go and are renamed; chains share prefixes; nothing is left of what is gone."""
    rng = random.Random(seed)
    ranks, chains, now, num_hits = Ranks(rng), chains_of(rng), 0.0, 0
    for step in range(3000):
        now += rng.choice([0.0, 0.01, 0.3])
        ranks.step(rng.choice(Ranks.STEPS), rng.choice(chains), now)
        asked = rng.choice(chains)
        hits = ranks.index.hit_tokens(asked, now)
        wanted = {name: model.num_hit_tokens(asked, now) for name, model in ranks.models.items()}
        assert {name: hits[ranks.slots[name]] for name in ranks.models} == wanted
        num_hits += sum(wanted.values())
        if step % 100 == 0:
            ranks.index.check_integrity()
    assert num_hits > 64 * 3000
    for name, model in ranks.models.items():
        assert ranks.index.num_pages(name, "events") == len(model.events)
        ranks.index.drop(name)
    ranks.index.check_integrity()
    assert not ranks.index._masks and not ranks.index._expectations
    assert [ranks.index.count_pages(source, now) for source in SOURCES] == [0, 0, 0]


def test_longest_prefix() -> None:
    index = PrefixIndex()
    index.add("a", 100)
    pages = [bytes([i] * 16) for i in range(5)]
    index.keep("a", pages[:3])
    assert index.num_hit_tokens("a", pages, 0.0) == 192
    assert index.num_hit_tokens("a", pages[1:], 0.0) == 128  # digests are chained: whoever asks gives the whole chain
    assert index.num_hit_tokens("b", pages, 0.0) == 0
    assert index.num_hit_tokens("a", [], 0.0) == 0


def test_speculative_entries_end() -> None:
    index = PrefixIndex()
    index.add("a", 100)
    page = [bytes(16)]
    index.expect("a", page, 10.0)
    assert index.num_hit_tokens("a", page, 10.0 + SPECULATIVE_S - 0.01) == 64
    assert index.num_hit_tokens("a", page, 10.0 + SPECULATIVE_S) == 0
    index.keep("a", page)
    index.expect("a", page, 20.0)
    assert index.num_hit_tokens("a", page, 1e9) == 64


def test_a_rank_in_step_is_believed_by_its_events_alone() -> None:
    """What was sent there counts for 2 s; what was guessed before goes; out of step, guesses are taken again."""
    index = PrefixIndex()
    index.add("a", 100)
    told, guessed = [bytes([1] * 16)], [bytes([2] * 16)]
    index.keep("a", guessed)
    index.set_exact("a", True)
    assert index.num_hit_tokens("a", guessed, 0.0) == 0
    index.stored("a", told)
    index.keep("a", guessed)
    index.expect("a", guessed, 1.0)
    assert index.num_hit_tokens("a", guessed, 1.5) == 64 and index.num_hit_tokens("a", told, 1e9) == 64
    assert index.num_hit_tokens("a", guessed, 1e9) == 0
    index.set_exact("a", False)
    index.keep("a", guessed)
    assert index.num_hit_tokens("a", guessed, 1e9) == 64 and index.num_hit_tokens("a", told, 1e9) == 64


def test_guesses_are_bounded_and_lost_ranks_forgotten() -> None:
    index = PrefixIndex()
    index.add("a", 10)
    old, new = [bytes([1, i] + [0] * 14) for i in range(8)], [bytes([2, i] + [0] * 14) for i in range(6)]
    index.keep("a", old)
    index.keep("a", new)
    assert index.num_pages("a", "approximate") == 10
    assert index.num_hit_tokens("a", new, 0.0) == 6 * 64
    assert index.num_hit_tokens("a", old, 0.0) == 4 * 64  # the end of the older chain went first
    index.drop("a")
    index.keep("a", new)
    assert index.num_pages("a", "approximate") == 0 and index.num_hit_tokens("a", new, 0.0) == 0


def test_tenants_never_hit_each_other() -> None:
    """The same ids under two salts: whatever source knows one of them, the other finds nothing."""
    ids = list(range(64 * 8 + 1))
    mine, theirs = page_digests(ids, b"mine"), page_digests(ids, b"theirs")
    index = PrefixIndex()
    for number, teach in enumerate((index.stored, index.keep, lambda name, pages: index.expect(name, pages, 0.0))):
        index.add(f"r{number}", 100)
        teach(f"r{number}", mine)
    assert index.hit_tokens(mine, 1.0) == [512] * 3
    assert index.hit_tokens(theirs, 1.0) == index.hit_tokens(page_digests(ids), 1.0) == [0] * 3


def test_many_ranks_with_one_prefix() -> None:
    """More than a machine word of ranks, all with a common beginning and one with more."""
    index = PrefixIndex()
    chain = page_digests(list(range(64 * 20 + 1)))
    for number in range(130):
        index.add(str(number), 100)
        index.stored(str(number), chain[:10])
    index.stored("77", chain)
    assert index.hit_tokens(chain, 0.0) == [64 * (20 if number == 77 else 10) for number in range(130)]
