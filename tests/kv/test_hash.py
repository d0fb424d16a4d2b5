"""The digest's vectors, fixed by the design: the router and every rank compute the same."""

import pytest

from services.kv.hash import ROOT, page_digest, page_digests

FIRST = "8caecfde8253f34ddece94f76c17f71f"
SECOND = "923a7c755f708d3d4bf3aea9da7cc918"
SALTED = "08b9690a54350acc85431005444fab25"


def test_vectors():
    assert [digest.hex() for digest in page_digests(range(129))] == [FIRST, SECOND]
    assert page_digests(range(65), b"tenant")[0].hex() == SALTED
    assert page_digest(ROOT, range(64), 64).hex() == FIRST
    assert page_digest(bytes.fromhex(FIRST), range(64, 128), 128).hex() == SECOND
    assert page_digest(ROOT, list(range(64)), 64, b"tenant").hex() == SALTED


@pytest.mark.parametrize(("num_ids", "num_digests"), [(0, 0), (1, 0), (64, 0), (65, 1), (128, 1), (129, 2), (1000, 15)])
def test_a_page_needs_the_token_after_it(num_ids, num_digests):
    assert len(page_digests([7] * num_ids)) == num_digests


def test_chain_next_id_and_salt_take_part():
    ids = list(range(1, 200))
    base = page_digests(ids)
    assert page_digests([9, *ids[1:]])[1:] != base[1:], "a page's digest covers the pages before it"
    assert page_digests([*ids[:64], 9, *ids[65:]])[0] != base[0], "the next id takes part"
    assert page_digests(ids, b"a") != page_digests(ids, b"b")
    assert page_digests(ids[:130]) == base[: 129 // 64]


def test_ids_beyond_u32_are_refused():
    with pytest.raises(OverflowError):
        page_digests([-1] * 65)
    with pytest.raises(OverflowError):
        page_digests([1 << 32] * 65)
