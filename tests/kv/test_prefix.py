"""Prefix cache: longest match, leaves evicted first by age, pinned pages kept, and conservation under random use."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from services.kv.hash import ROOT, page_digests
from services.kv.kv_pool import KvPool
from services.kv.layout import KvLayout
from services.kv.memory import KvMemory
from services.kv.pages import Holder, HolderKind

TINY = KvLayout(num_layers=1, kv_lora_rank=4, rope_dim=4, dtype="float32")


def ids_of(*first_ids: int) -> list[int]:
    """A prompt whose page i is full of first_ids[i]."""
    return [first for first in first_ids for _ in range(64)]


def digests_of(*first_ids: int) -> list[bytes]:
    """Digests of that prompt."""
    return page_digests([*ids_of(*first_ids), 0])


def cached(kv: KvPool, *first_ids: int) -> list[int]:
    """Compute and cache a prompt, then let go of it."""
    holder = Holder(HolderKind.REQUEST, first_ids)
    digests = digests_of(*first_ids)
    have = kv.match(digests, holder)
    pages = have + kv.take(len(digests) - len(have), holder)
    kv.insert(digests, pages, ids_of(*first_ids))
    kv.release(holder)
    return pages


def request(key: object) -> Holder:
    return Holder(HolderKind.REQUEST, key)


def test_match_is_longest_and_pins():
    kv = KvPool(KvMemory(TINY, 8))
    pages = cached(kv, 1, 2, 3)
    assert kv.match(digests_of(1, 2, 9), request("x")) == pages[:1], "page 1 depends on the token after it"
    assert kv.match(digests_of(1, 2, 3, 4), request("y")) == pages[:2]
    assert kv.match(digests_of(5), request("z")) == []
    assert kv.num_available == 8 - 2
    kv.release(request("x"))
    kv.release(request("y"))
    assert kv.num_available == 8 and len(kv.cache) == 3
    kv.check_integrity()


def test_eviction_takes_old_leaves_first_and_raises_no_epoch():
    kv = KvPool(KvMemory(TINY, 4))
    old = cached(kv, 1, 2)
    young = cached(kv, 5, 6)
    epochs = kv.memory.epochs.copy()
    assert kv.cache.evict(1) == 1
    assert kv.pages.holders_of(old[1]) == frozenset() and kv.pages.holders_of(old[0]), "the leaf goes, its parent stays"
    assert (kv.memory.epochs == epochs).all()
    taken = kv.take(2, request("new"))
    assert set(taken) == set(old), "then the parent, before anything of the younger prompt"
    assert (kv.memory.epochs[taken] == epochs[taken] + 1).all()
    assert all(kv.pages.holders_of(page) for page in young)
    kv.check_integrity()


def test_a_touched_prefix_outlives_an_untouched_one():
    kv = KvPool(KvMemory(TINY, 4))
    first, second = cached(kv, 1, 2), cached(kv, 5, 6)
    kv.match(digests_of(1, 2), request("hit"))
    kv.release(request("hit"))
    assert set(kv.take(2, request("new"))) == set(second)
    assert all(kv.pages.holders_of(page) for page in first)


def test_pinned_pages_are_never_evicted_but_what_lies_above_a_pinned_leaf_is():
    kv = KvPool(KvMemory(TINY, 4))
    (parent_page,) = cached(kv, 1)
    digests = page_digests([1] * 64 + [0] + [0] * 63 + [0])  # page 0 as cached above, then a page of zeros
    mine = request("mine")
    private = kv.take(2, mine)  # computed both pages itself: the cache keeps the older copy of the first one
    kv.insert(digests, private, [1] * 64 + [0] * 64)
    assert kv.pages.holders_of(private[0]) == {mine}
    assert kv.num_available == 2
    assert len(kv.take(2, request("other"))) == 2
    assert kv.pages.holders_of(parent_page) == {request("other")}, "idle although its child is pinned"
    assert mine in kv.pages.holders_of(private[1])
    kv.check_integrity()


class Heard:
    """Keeps what it is told."""

    def __init__(self):
        self.told = []

    def stored(self, parent, digests, ids):
        self.told.append((parent, digests, ids))

    def removed(self, digests):
        self.told.append(digests)


def test_on_change_tells_stored_and_removed():
    heard = Heard()
    kv = KvPool(KvMemory(TINY, 3), heard)
    cached(kv, 1, 2)
    cached(kv, 1, 2, 3)
    kv.take(3, request("x"))
    first, second, third = digests_of(1, 2, 3)
    assert digests_of(1, 2)[0] == first
    other = digests_of(1, 2)[1]
    assert heard.told == [(ROOT, [first, other], ids_of(1, 2)), [other], (first, [second, third], ids_of(2, 3)), [third, second, first]]


class PoolMachine(RuleBasedStateMachine):
    """Requests come, share prefixes, lease, and go in any order; nothing is lost and nobody's bytes change under him."""

    running = Bundle("running")

    @initialize()
    def start(self):
        self.kv = KvPool(KvMemory(TINY, 12))
        self.num = 0
        self.marks: dict[Holder, dict[int, int]] = {}

    @rule(target=running, prompt=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def admit(self, prompt):
        holder = request(self.num)
        self.num += 1
        digests = digests_of(*prompt)
        have = self.kv.match(digests, holder)
        fresh = len(prompt) - len(have)
        if fresh > self.kv.num_available:
            self.kv.release(holder)
            return None
        before = self.kv.memory.epochs.copy()
        pages = self.kv.take(fresh, holder)
        raised = self.kv.memory.epochs != before
        assert sorted(np.flatnonzero(raised)) == sorted(pages)
        for page in pages:
            assert self.kv.pages.is_writable(page, holder)
            self.kv.memory.page_bytes_view()[page] = self.num % 251
        self.marks[holder] = {page: int(self.kv.memory.page_bytes_view()[page, 0]) for page in have + pages}
        self.kv.insert(digests, have + pages, ids_of(*prompt))
        return holder

    @rule(holder=running)
    def lease(self, holder):
        lease = Holder(HolderKind.LEASE, holder.key) if holder else None
        if holder in self.marks and lease not in self.marks:
            self.kv.pages.hold(self.marks[holder], lease)
            self.marks[lease] = self.marks[holder]

    @rule(holder=consumes(running))
    def finish(self, holder):
        if self.marks.pop(holder, None):
            self.kv.release(holder)

    @rule()
    def end_leases(self):
        for holder in [holder for holder in self.marks if holder.kind is HolderKind.LEASE]:
            self.kv.release(holder)
            del self.marks[holder]

    @rule(num=st.integers(1, 6))
    def squeeze(self, num):
        num = min(num, self.kv.num_available)
        self.kv.take(num, request("squeeze"))
        self.kv.release(request("squeeze"))

    @invariant()
    def holds(self):
        self.kv.check_integrity()
        view = self.kv.memory.page_bytes_view()
        for pages in self.marks.values():
            assert all(int(view[page, 0]) == mark for page, mark in pages.items())

    def teardown(self):
        for holder in list(self.marks):
            self.kv.release(holder)
        assert self.kv.num_available == 12
        self.kv.check_integrity()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
