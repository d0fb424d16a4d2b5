"""The books: order, page arithmetic, digests."""
import random

import pytest

from services.decode.claims import Claims, pages_wanted
from services.decode.request import Request, RequestSpec, RequestState
from services.kv.hash import page_digests
from services.kv.messages import PeerRank, RequestKey
from services.model.params import SamplingParams


def request(number: int, num_tokens: int = 10, max_tokens: int = 100, **fields: int) -> Request:
    spec = RequestSpec(
        key=RequestKey(f"r{number}", 0, 0), token_ids=list(range(2, 2 + num_tokens)), params=SamplingParams(max_tokens=max_tokens, seed=0),
        source=PeerRank("p", "a:1", 0, b""), **fields,
    )
    return Request(1, number, spec, max_model_len=1000, now=0.0)


@pytest.mark.parametrize(("num_tokens", "max_tokens", "num_preemptions", "wanted", "most"), [
    (10, 100, 0, 2, 2),
    (10, 2, 0, 1, 1),  # position 10 is the last that is fed: no second page, ever
    (63, 2, 0, 1, 1),
    (63, 3, 0, 2, 2),
    (64, 2, 0, 2, 2),
    (64, 1, 0, 1, 1),
    (150, 500, 0, 4, 11),
    (150, 500, 1, 4, 11),
    (150, 500, 2, 11, 11),
    (150, 5000, 2, 16, 16),  # max_model_len 1000
])
def test_pages_wanted(num_tokens: int, max_tokens: int, num_preemptions: int, wanted: int, most: int) -> None:
    claimed = request(1, num_tokens, max_tokens, num_preemptions=num_preemptions)
    assert (pages_wanted(claimed), claimed.max_pages) == (wanted, most)


def test_replayed_tokens_count_towards_max_tokens() -> None:
    assert request(1, 60, 10, num_output_tokens=0).max_total_tokens == 70
    assert request(1, 60, 10, num_output_tokens=5).max_total_tokens == 65


def admitted(claimed: Request) -> bool:
    return True


def test_first_come_first_served() -> None:
    claims = Claims(max_claims=3)
    first, second, third = request(1), request(2), request(3)
    for each in (first, second, third):
        assert not claims.is_full
        claims.book(each)
    assert claims.is_full and claims.first(admitted) is first
    claims.start_fetching(first)
    assert (claims.first(admitted), first.state, len(claims)) == (second, RequestState.FETCHING, 3)
    assert claims.first(lambda claimed: claimed is not second) is third, "a claim that its holder has not admitted is passed"
    assert claims.first(lambda claimed: False) is None
    claims.remove(second)
    assert claims.first(admitted) is third and claims.get(1, 1) is first and claims.get(1, 2) is None
    assert claims.by_key(first.key) is first and claims.of_session(1) == [first, third] and claims.of_session(2) == []
    for each in (first, third):
        claims.remove(each)
    assert claims.first(admitted) is None and len(claims) == 0


@pytest.mark.parametrize(("num_tokens", "max_tokens", "num_preemptions", "wanted"), [
    (10, 100, 0, 2), (10, 500, 0, 3), (64, 500, 0, 3), (65, 500, 0, 4), (150, 500, 1, 5), (150, 500, 2, 11),
])
def test_moves_take_two_pages_more(num_tokens: int, max_tokens: int, num_preemptions: int, wanted: int) -> None:
    assert pages_wanted(request(1, num_tokens, max_tokens, num_preemptions=num_preemptions, is_move=True)) == wanted


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 128, 129])
def test_digests_follow_the_text(num_tokens: int) -> None:
    seed = 7
    print(f"{seed=}")
    rng = random.Random(seed)
    claimed = request(1, num_tokens, salt=b"t")  # type: ignore[arg-type]
    for _ in range(200):
        num_before = len(claimed.digests)
        grew = claimed.append(rng.randrange(2, 250))
        assert grew == (len(claimed.digests) > num_before)
        assert claimed.digests == page_digests(claimed.token_ids, b"t")
        assert len(claimed.digests) * 64 <= claimed.position, "a page with a digest is full: its last token's KV is written"
