"""The choice of ranks, as pure functions."""

from typing import NamedTuple

import pytest

from services.router.policy import (
    COOL_DOWN_S,
    MAX_COOL_DOWN_S,
    STICKY_TOKENS,
    CoolDown,
    PrefillSpeed,
    choose_decode,
    choose_prefill,
)


class Prefill(NamedTuple):
    """A prefill rank as the policy sees it."""

    num_tokens: int
    sticky_tokens: int = STICKY_TOKENS


class Decode(NamedTuple):
    """A decode rank as the policy sees it."""

    group: str
    num_tokens: int
    num_requests: int = 0
    max_running: int = 100


def test_prefix_holder_wins_while_its_queue_is_short() -> None:
    choice = choose_prefill([Prefill(0), Prefill(STICKY_TOKENS)], [0, 800], 1000, 0)
    assert choice.position == 1 and choice.reason == "prefix 800/1000"
    choice = choose_prefill([Prefill(0), Prefill(STICKY_TOKENS + 1)], [0, 800], 1000, 0)
    assert choice.position == 0 and choice.reason == "least work 1000 of 2"


def test_a_faster_rank_keeps_its_prefix_longer() -> None:
    """What counts is the time in front of a prompt: how many tokens that is, each rank's speed tells."""
    queue = Prefill(6000, sticky_tokens=8000)
    assert choose_prefill([Prefill(0), queue], [0, 800], 1000, 0).position == 1
    assert choose_prefill([Prefill(0), queue._replace(sticky_tokens=5000)], [0, 800], 1000, 0).position == 0


def test_small_prefix_only_counts_as_less_work() -> None:
    assert choose_prefill([Prefill(100), Prefill(1000)], [0, 799], 1000, 0).position == 0  # 100 + 1000 < 1000 + 201
    assert choose_prefill([Prefill(300), Prefill(1000)], [0, 799], 1000, 0).position == 1


def test_longest_prefix_among_holders() -> None:
    assert choose_prefill([Prefill(0), Prefill(500)], [800, 960], 1000, 0).position == 1


def test_ties_are_spread_by_draw() -> None:
    assert {choose_prefill([Prefill(0)] * 3, [0] * 3, 10, draw).position for draw in range(3)} == {0, 1, 2}
    assert {choose_prefill([Prefill(0)] * 3, [9] * 3, 10, draw).position for draw in range(3)} == {0, 1, 2}
    decodes = [Decode(name, 0) for name in "abc"]
    assert {choose_decode(decodes, [0] * 3, 10, draw).position for draw in range(3)} == {0, 1, 2}


def test_decode_takes_the_smallest_after_its_hits() -> None:
    ranks = [Decode("a", 500), Decode("b", 400)]
    assert choose_decode(ranks, [0, 0], 100, 0).position == 1
    assert choose_decode(ranks, [256, 0], 300, 0).position == 0


def test_decode_keeps_the_largest_of_a_group_small() -> None:
    """Filling the smaller rank of a group with a large one costs nothing: its steps are as long as the large one's anyway."""
    ranks = [Decode("a", 1000), Decode("a", 300), Decode("b", 960), Decode("b", 950)]
    assert choose_decode(ranks, [0] * 4, 100, 0).position == 1


def test_full_decode_rank_comes_last() -> None:
    ranks = [Decode("a", 10, num_requests=8, max_running=8), Decode("b", 900, num_requests=7, max_running=8)]
    assert choose_decode(ranks, [0, 0], 10, 0).position == 1
    assert choose_decode(ranks[:1], [0], 10, 0).position == 0


def test_fewer_requests_decide_between_equal_sizes() -> None:
    ranks = [Decode("a", 100, num_requests=5), Decode("b", 100, num_requests=2), Decode("c", 100, num_requests=5)]
    assert {choose_decode(ranks, [0] * 3, 10, draw).position for draw in range(6)} == {1}


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


def test_speed_is_the_peak_and_slowly_forgotten() -> None:
    speed = PrefillSpeed()
    assert speed.sticky_tokens(2.0) == STICKY_TOKENS
    speed.computed(10, 1.0)  # too short to tell
    speed.computed(1000, 0.0)  # as an older engine says
    assert speed.sticky_tokens(2.0) == STICKY_TOKENS
    speed.computed(1000, 0.1)
    assert speed.sticky_tokens(2.0) == 20_000
    speed.computed(1000, 1.0)  # one of ten batch mates
    assert speed.sticky_tokens(2.0) == pytest.approx(20_000, rel=0.03)
    for _ in range(300):
        speed.computed(1000, 1.0)
    assert speed.sticky_tokens(2.0) == pytest.approx(2000, rel=0.05)
