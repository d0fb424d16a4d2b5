"""The schedule alone: bounds, order, sharing, cancellation."""

import random

import pytest

from proto.baton.v1 import common_pb2
from services.kv.hash import page_digests
from services.kv.kv_pool import KvPool
from services.kv.layout import PAGE_SIZE, KvLayout
from services.kv.memory import KvMemory
from services.kv.messages import RequestKey
from services.kv.pages import Holder, HolderKind
from services.prefill.scheduler import Plan, Prompt, Scheduler
from services.runtime.errors import HandoffError

LAYOUT = KvLayout(num_layers=1, kv_lora_rank=1, rope_dim=1, dtype="float32")


def make(num_pages: int = 64, **limits: int) -> tuple[KvPool, Scheduler]:
    pool = KvPool(KvMemory(LAYOUT, num_pages))
    return pool, Scheduler(pool, **({"chunk_tokens": 256, "max_running": 8, "max_queued": 8} | limits))


def prompt(name: str, num_tokens: int, seed: int | None = None) -> Prompt:
    """A prompt of random ids; equal seeds share a prefix."""
    ids = random.Random(name if seed is None else seed).choices(range(1000), k=num_tokens)
    return Prompt(RequestKey(name, 0, 0), num_tokens, page_digests(ids))


def shares(plan: Plan) -> dict[str, int]:
    return {chunk.prompt.key.request_id: chunk.num_tokens for chunk in plan.chunks}


def step(pool: KvPool, scheduler: Scheduler) -> dict[str, int]:
    """One step as the engine does it: compute, store, finish."""
    plan = scheduler.schedule()
    assert all(chunk.num_tokens > 0 for chunk in plan.chunks)
    for chunk in plan.chunks:
        scheduler.advance(chunk)
        num_final = min(chunk.prompt.num_computed // PAGE_SIZE, len(chunk.prompt.digests))
        pool.insert(chunk.prompt.digests[:num_final], chunk.prompt.pages[:num_final], [0] * chunk.prompt.num_tokens)
        if chunk.is_last:
            scheduler.remove(chunk.prompt.key)
    pool.check_integrity()
    return shares(plan)


def test_admits_only_what_fits_and_keeps_the_order():
    pool, scheduler = make(num_pages=10, chunk_tokens=64)
    for name, pages in (("a", 6), ("b", 5), ("c", 1)):
        scheduler.add(prompt(name, pages * PAGE_SIZE))
    assert shares(scheduler.schedule()) == {"a": 64}
    # b lacks a page and c, which would fit, waits behind it: nobody overtakes
    assert scheduler.num_computing == 1 and scheduler.num_queued == 2
    order: list[str] = []
    for _ in range(20):
        order += [name for name in step(pool, scheduler) if name not in order]
    assert order == ["a", "b", "c"]
    assert pool.num_available == pool.num_pages


def test_a_step_never_exceeds_its_budget_nor_a_prompt_its_length():
    rng = random.Random(3)
    pool, scheduler = make(chunk_tokens=200, max_running=4)
    lengths = {f"p{i}": rng.choice([1, 2, 63, 64, 65, 127, 128, 129, 700]) for i in range(8)}
    for name, length in lengths.items():
        scheduler.add(prompt(name, length))
    computed = dict.fromkeys(lengths, 0)
    while scheduler.num_queued or scheduler.num_computing:
        took = step(pool, scheduler)
        assert 0 < sum(took.values()) <= 200 and scheduler.num_computing <= 4
        for name, num_tokens in took.items():
            computed[name] += num_tokens
    assert computed == lengths and pool.num_available == pool.num_pages


@pytest.mark.parametrize("chunk_tokens", [1, 5, 63])
def test_budgets_below_a_page_work(chunk_tokens: int):
    pool, scheduler = make(chunk_tokens=chunk_tokens)
    scheduler.add(prompt("a", 130))
    scheduler.add(prompt("b", 3))
    total = 0
    while scheduler.num_queued or scheduler.num_computing:
        total += sum(step(pool, scheduler).values())
    assert total == 133


def test_a_short_prompt_shares_a_long_ones_steps():
    pool, scheduler = make(chunk_tokens=256, num_pages=64)
    scheduler.add(prompt("long", 2048))
    assert step(pool, scheduler) == {"long": 256}
    scheduler.add(prompt("short", 100))
    assert step(pool, scheduler) == {"long": 156, "short": 100}
    assert step(pool, scheduler) == {"long": 256}


def test_the_oldest_long_prompt_gets_the_largest_share():
    pool, scheduler = make(chunk_tokens=256, num_pages=200)
    for name in ("a", "b", "c"):
        scheduler.add(prompt(name, 2048))
    scheduler.add(prompt("d", 10))
    took = step(pool, scheduler)
    assert took["a"] >= took["b"] > 0 and sum(took.values()) == 256


def test_a_wholly_cached_prompt_still_computes_a_token():  # B21
    pool, scheduler = make()
    for length, computed in ((128, [128, 64, 64]), (129, [65, 1]), (64, [64]), (65, [1]), (1, [1])):
        for times, expected in enumerate(computed):
            scheduler.add(prompt(f"{length}.{times}", length, seed=5))
            assert list(step(pool, scheduler).values()) == [expected]
    assert pool.num_available == pool.num_pages


def test_hits_are_pinned_at_admission_and_not_before():
    pool, scheduler = make(num_pages=4, chunk_tokens=64)
    scheduler.add(prompt("first", 129, seed=5))
    while scheduler.num_queued or scheduler.num_computing:
        step(pool, scheduler)
    scheduler.add(prompt("again", 129, seed=5))
    assert scheduler.num_queued_tokens == 1  # the two cached pages do not count
    assert pool.pages.num_holds(HolderKind.REQUEST) == 0
    plan = scheduler.schedule()
    assert [(chunk.start, chunk.num_tokens) for chunk in plan.chunks] == [(128, 1)]
    assert pool.pages.num_holds(HolderKind.REQUEST) == 3 and pool.num_available == 1
    assert pool.cache.evict(4) == 0
    scheduler.remove(RequestKey("again", 0, 0))


def test_a_prompt_that_cannot_have_its_pages_leaves_the_pool_as_it_was():
    pool, scheduler = make(num_pages=4, chunk_tokens=64)
    other = Holder(HolderKind.LEASE, "other")
    pages = pool.take(2, Holder(HolderKind.REQUEST, "other"))
    pool.pages.hold(pages, other)
    pool.release(Holder(HolderKind.REQUEST, "other"))
    scheduler.add(prompt("a", 3 * PAGE_SIZE))
    assert scheduler.schedule() == Plan([], [])
    assert pool.num_available == 2 and scheduler.num_queued == 1
    pool.release(other)
    assert shares(scheduler.schedule()) == {"a": 64}
    scheduler.remove(RequestKey("a", 0, 0))
    assert pool.num_available == 4


@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_removal_gives_all_pages_back_and_the_next_step_goes_on(steps_before: int):
    pool, scheduler = make(num_pages=8, chunk_tokens=64)
    scheduler.add(prompt("long", 256))
    for _ in range(steps_before):
        step(pool, scheduler)
    scheduler.add(prompt("next", 1))
    assert scheduler.remove(RequestKey("long", 0, 0)) is not None
    assert scheduler.remove(RequestKey("long", 0, 0)) is None
    assert pool.num_available == 8
    assert step(pool, scheduler) == {"next": 1}
    assert scheduler.num_queued_tokens == 0


def test_refusals_are_typed():
    _, scheduler = make(num_pages=4, max_queued=2)
    with pytest.raises(HandoffError, match="257 tokens need 5 pages but this rank has 4") as error:
        scheduler.add(prompt("big", 257))
    assert error.value.reason == common_pb2.TOO_LARGE
    scheduler.add(prompt("a", 256))
    scheduler.add(prompt("b", 1))
    with pytest.raises(HandoffError, match="max_queued is 2") as error:
        scheduler.add(prompt("c", 1))
    assert error.value.reason == common_pb2.OVERLOADED
