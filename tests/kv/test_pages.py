"""Holders: free exactly when nobody holds a page, writable exactly when one request alone does; epochs rise once a take."""

import numpy as np
import pytest

from services.kv.pages import Holder, HolderKind, PageCounts, PagePool
from services.runtime.errors import EngineError

A, B = Holder(HolderKind.REQUEST, "a"), Holder(HolderKind.REQUEST, "b")
LEASE = Holder(HolderKind.LEASE, "a")


@pytest.fixture
def pool():
    pool = PagePool(4, np.zeros(4, dtype=np.uint64))
    yield pool
    pool.check_integrity()


def test_take_raises_each_epoch_once_and_nothing_else_does(pool):
    pages = pool.take(3, A)
    assert sorted(pages) == sorted(set(pages)) and pool.num_free == 1
    assert [pool.epoch(page) for page in pages] == [1, 1, 1]
    pool.hold(pages, LEASE)
    pool.drop(pages, A)
    pool.release(LEASE)
    assert pool.num_free == 4 and [pool.epoch(page) for page in pages] == [1, 1, 1], "going free raises nothing"
    again = pool.take(3, B)
    assert sorted(pool.epoch(page) for page in again) == [2, 2, 2]


def test_writable_only_for_the_sole_request(pool):
    (page,) = pool.take(1, A)
    assert pool.is_writable(page, A) and not pool.is_writable(page, B)
    pool.hold([page], LEASE)
    assert not pool.is_writable(page, A)
    pool.drop([page], A)
    assert not pool.is_writable(page, LEASE), "a lease never writes"
    pool.hold([page], B)
    pool.release(LEASE)
    assert pool.is_writable(page, B)


def test_misuse_is_an_error_and_changes_nothing(pool):
    (page,) = pool.take(1, A)
    for misuse in (
        lambda: pool.take(4, B),
        lambda: pool.hold([page], A),
        lambda: pool.drop([page], B),
        lambda: pool.hold([(page + 1) % 4], LEASE),
    ):
        with pytest.raises(EngineError):
            misuse()
        pool.check_integrity()
    assert pool.num_free == 3 and pool.holders_of(page) == {A}


def test_counts_by_kind(pool):
    pages = pool.take(2, A)
    pool.hold(pages, Holder(HolderKind.QUARANTINE, 1))
    pool.hold(pages[:1], Holder(HolderKind.CACHE, b"d"))
    pool.release(A)
    assert pool.num_holds(HolderKind.QUARANTINE) == 2 and pool.num_holds(HolderKind.REQUEST) == 0 and pool.num_idle_cached == 0
    pool.release(Holder(HolderKind.QUARANTINE, 1))
    assert pool.num_idle_cached == 1 and pool.num_free == 3


def test_check_integrity_finds_damage():
    pool = PagePool(2, np.zeros(2, dtype=np.uint64))
    (page,) = pool.take(1, A)
    pool._free.append(page)
    with pytest.raises(EngineError, match=str(page)):
        pool.check_integrity()


def test_every_page_counts_in_one_state(pool):
    """Quarantined before a request's, a request's before a lease's, a lease's before the cache's."""
    pages = pool.take(3, A)
    pool.hold(pages, LEASE)
    pool.hold(pages[:2], Holder(HolderKind.CACHE, b"d"))
    pool.hold(pages[:1], Holder(HolderKind.READ, 1))
    assert pool.counts == PageCounts(free=1, cached=0, leased=0, request=3, quarantined=0)
    pool.release(A)
    assert pool.counts == PageCounts(free=1, cached=0, leased=2, request=1, quarantined=0)
    pool.hold(pages[:1], Holder(HolderKind.QUARANTINE, 1))
    pool.release(Holder(HolderKind.READ, 1))
    pool.release(LEASE)
    assert pool.counts == PageCounts(free=2, cached=1, leased=0, request=0, quarantined=1) and pool.counts.used == 1
    pool.release(Holder(HolderKind.QUARANTINE, 1))
    assert pool.counts == PageCounts(free=2, cached=2, leased=0, request=0, quarantined=0) and sum(pool.counts) == 4
