"""The choice of ranks, as pure functions, and what it does to a cluster in a simulation."""

import random

import pytest

from services.router.policy import (
    COOL_DOWN_S,
    MAX_COOL_DOWN_S,
    STICKY_TOKENS,
    CoolDown,
    DecodeView,
    PrefillView,
    choose_decode,
    choose_prefill,
)
from services.router.prefix_index import SPECULATIVE_S, PrefixIndex


def decode(name: str, tokens: int, *, hit: int = 0, requests: int = 0, group: str = "", full: int = 100) -> DecodeView:
    return DecodeView(name, group or name, hit, tokens, requests, full)


def test_prefix_holder_wins_while_its_queue_is_short() -> None:
    ranks = [PrefillView("a", 0, 0), PrefillView("b", 800, STICKY_TOKENS)]
    choice = choose_prefill(ranks, 1000, 0)
    assert choice.instance_id == "b" and choice.reason == "prefix 800/1000"
    ranks[1] = PrefillView("b", 800, STICKY_TOKENS + 1)
    choice = choose_prefill(ranks, 1000, 0)
    assert choice.instance_id == "a" and choice.reason == "least work 1000 of 2"


def test_small_prefix_only_counts_as_less_work() -> None:
    ranks = [PrefillView("a", 0, 100), PrefillView("b", 799, 1000)]
    assert choose_prefill(ranks, 1000, 0).instance_id == "a"  # 100 + 1000 < 1000 + 201
    assert choose_prefill([PrefillView("a", 0, 300), ranks[1]], 1000, 0).instance_id == "b"


def test_longest_prefix_among_holders() -> None:
    ranks = [PrefillView("a", 800, 0), PrefillView("b", 960, 500)]
    assert choose_prefill(ranks, 1000, 0).instance_id == "b"


def test_ties_are_spread_by_draw() -> None:
    prefills = [PrefillView(name, 0, 0) for name in "abc"]
    assert {choose_prefill(prefills, 10, draw).instance_id for draw in range(3)} == {"a", "b", "c"}
    decodes = [decode(name, 0) for name in "abc"]
    assert {choose_decode(decodes, 10, draw).instance_id for draw in range(3)} == {"a", "b", "c"}


def test_decode_takes_the_smallest_after_its_hits() -> None:
    assert choose_decode([decode("a", 500), decode("b", 400)], 100, 0).instance_id == "b"
    assert choose_decode([decode("a", 500, hit=256), decode("b", 400)], 300, 0).instance_id == "a"


def test_decode_keeps_the_largest_of_a_group_small() -> None:
    """Filling the smaller rank of a group with a large one costs nothing: its steps are as long as the large one's anyway."""
    ranks = [decode("a0", 1000, group="a"), decode("a1", 300, group="a"), decode("b0", 960, group="b"), decode("b1", 950, group="b")]
    assert choose_decode(ranks, 100, 0).instance_id == "a1"


def test_full_decode_rank_comes_last() -> None:
    assert choose_decode([decode("a", 10, requests=8, full=8), decode("b", 900, requests=7, full=8)], 10, 0).instance_id == "b"


@pytest.mark.parametrize("draw", range(3))
def test_cooling_rank_comes_after_everybody(draw: int) -> None:
    """Neither its prefix nor an empty queue makes up for it; alone it still serves."""
    cooling, busy = PrefillView("a", 1000, 0, is_cooling=True), PrefillView("b", 0, 10**6)
    assert choose_prefill([cooling, busy], 1000, draw).instance_id == "b"
    assert choose_prefill([cooling], 1000, draw).instance_id == "a"
    full = decode("b", 900, requests=8, full=8)
    assert choose_decode([decode("a", 0)._replace(is_cooling=True), full], 10, draw).instance_id == "b"
    assert choose_decode([decode("a", 0)._replace(is_cooling=True)], 10, draw).instance_id == "a"


def test_cool_down_doubles_until_a_success() -> None:
    cool_down, now = CoolDown(), 1000.0
    assert not cool_down.is_on(now)
    for i in range(8):
        cool_down.failed(now)
        cool_down.failed(now + 1.0)  # a request that was under way as well: the same failure
        length = min(COOL_DOWN_S * 2**i, MAX_COOL_DOWN_S)
        assert cool_down.is_on(now + length - 0.01) and not cool_down.is_on(now + length)
        now += length
    cool_down.failed(now)
    cool_down.succeeded()
    assert not cool_down.is_on(now)
    cool_down.failed(now)
    assert not cool_down.is_on(now + COOL_DOWN_S)


def test_simulation_of_load() -> None:
    """2,000 requests with heavy-tailed lengths on 8 decode ranks stay far more level than dealing them out in turn."""
    rng = random.Random(5)
    ours, in_turn = [0] * 8, [0] * 8
    worst, worst_in_turn = 0, 0
    for i in range(2000):
        length = int(min(rng.paretovariate(1.1) * 50, 8000))
        choice = choose_decode([decode(str(rank), ours[rank]) for rank in range(8)], length, rng.getrandbits(32))
        ours[int(choice.instance_id)] += length
        in_turn[i % 8] += length
        if i % 50 == 49:  # everybody finishes a part
            ours, in_turn = [n * 3 // 4 for n in ours], [n * 3 // 4 for n in in_turn]
        worst, worst_in_turn = max(worst, max(ours) - min(ours)), max(worst_in_turn, max(in_turn) - min(in_turn))
    assert worst <= 8000 < worst_in_turn, (worst, worst_in_turn)


def test_simulation_of_prefixes() -> None:
    """Eight system prompts of ten pages on four ranks: nearly every request finds its prefix, and no rank starves."""
    rng = random.Random(6)
    index = PrefixIndex()
    names = [str(rank) for rank in range(4)]
    for name in names:
        index.add(name, 1000)
    prefixes = [[bytes([p, page]) + bytes(14) for page in range(10)] for p in range(8)]
    hits, counts = 0, dict.fromkeys(names, 0)
    for i in range(400):
        digests = prefixes[rng.randrange(8)]
        views = [PrefillView(name, index.num_hit_tokens(name, digests, float(i)), 0) for name in names]
        choice = choose_prefill(views, 700, rng.getrandbits(32))
        hits += choice.reason.startswith("prefix")
        counts[choice.instance_id] += 1
        index.expect(choice.instance_id, digests, float(i))
        index.keep(choice.instance_id, digests)
    assert hits == 400 - 8, hits
    assert min(counts.values()) > 0, counts


def test_index_finds_the_longest_prefix() -> None:
    index = PrefixIndex()
    index.add("a", 100)
    pages = [bytes([i] * 16) for i in range(5)]
    index.keep("a", pages[:3])
    assert index.num_hit_tokens("a", pages, 0.0) == 192
    assert index.num_hit_tokens("a", pages[1:], 0.0) == 128  # digests are chained: whoever asks gives the whole chain
    assert index.num_hit_tokens("b", pages, 0.0) == 0


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


def test_index_is_bounded_and_drops_lost_ranks() -> None:
    index = PrefixIndex()
    index.add("a", 10)
    old, new = [bytes([1, i] + [0] * 14) for i in range(8)], [bytes([2, i] + [0] * 14) for i in range(6)]
    index.keep("a", old)
    index.keep("a", new)
    assert index.num_pages("a") == 10
    assert index.num_hit_tokens("a", new, 0.0) == 6 * 64
    assert index.num_hit_tokens("a", old, 0.0) == 4 * 64  # the end of the older chain went first
    index.drop("a")
    index.keep("a", new)
    assert index.num_pages("a") == 0 and index.num_hit_tokens("a", new, 0.0) == 0
