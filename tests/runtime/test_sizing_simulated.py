"""The rule end to end on simulated pools: what it recommends from their metrics meets the targets, and one rank fewer does not."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest

from services.runtime.sizing import Advice, DecodeSample, PrefillSample, Targets, size_decode, size_prefill
from services.runtime.window import measure
from tests.runtime.pool_simulation import BASE_S, REQUEST_S, TOKEN_S, decode_run, prefill_run

Sample = TypeVar("Sample", PrefillSample, DecodeSample)
TOLERANCE = 1.05  # of a simulated latency against the target


def rested(sample: Sample, size: Callable[[Sample, Targets], Advice], targets: Targets) -> Advice:
    """The advice, followed until it rests: a pool shrinks by one rank at a time."""
    while (advice := size(sample, targets)).wanted != sample.ranks:
        sample = dataclasses.replace(sample, ranks=advice.wanted)
    return advice


@pytest.mark.parametrize(("ranks", "requests_per_s", "ttft_s"), [(6, 10.0, 0.5), (8, 25.0, 0.4), (16, 50.0, 0.36)])
def test_prefill_at_the_recommended_size_meets_ttft_and_one_fewer_does_not(ranks: int, requests_per_s: float, ttft_s: float) -> None:
    targets = Targets(ttft_s=ttft_s, headroom=0.0)
    seen = measure(prefill_run(ranks, requests_per_s=requests_per_s, tokens=500.0, seconds=600.0, seed=1).snapshots)
    assert seen.prefill.ranks == ranks and seen.prefill.token_s == pytest.approx(TOKEN_S)
    assert seen.prefill.requests_per_s == pytest.approx(requests_per_s, rel=0.05)
    advice = rested(seen.prefill, size_prefill, targets)

    def ttft(size: int) -> float:
        waits = prefill_run(size, requests_per_s=requests_per_s, tokens=500.0, seconds=600.0, seed=2).latencies_s
        return float(np.quantile(waits, targets.quantile)) + 500 * TOKEN_S

    assert ttft(advice.wanted) <= TOLERANCE * ttft_s < ttft(advice.wanted - 1)
    assert advice.predicted_s == pytest.approx(ttft(advice.wanted), rel=0.2)


def test_an_overloaded_prefill_pool_grows_to_what_its_arrivals_need() -> None:
    """3 ranks get what keeps 5 busy. What they compute tells nothing of that; the growth of their queue does."""
    seen = measure(prefill_run(3, requests_per_s=25.0, tokens=500.0, seconds=60.0, seed=1).snapshots)
    assert seen.prefill.tokens_per_s == pytest.approx(25 * 500, rel=0.1)
    advice = size_prefill(seen.prefill, Targets(ttft_s=0.5))
    assert 7 <= advice.wanted <= 11 and seen.prefill.queued_tokens > 0


@pytest.mark.parametrize(("ranks", "requests_per_s", "itl_s"), [(4, 10.0, 0.03), (3, 20.0, 0.05), (12, 40.0, 0.0225)])
def test_decode_at_the_recommended_size_meets_itl_and_one_fewer_does_not(ranks: int, requests_per_s: float, itl_s: float) -> None:
    targets = Targets(itl_s=itl_s, headroom=0.0)
    seen = measure(decode_run(ranks, requests_per_s=requests_per_s, tokens=100.0, seconds=60.0, seed=1).snapshots)
    line = seen.decode.line
    assert line is not None and (line.base_s, line.request_s) == (pytest.approx(BASE_S), pytest.approx(REQUEST_S))
    advice = rested(seen.decode, size_decode, targets)

    def itl(size: int) -> float:
        return float(np.mean(decode_run(size, requests_per_s=requests_per_s, tokens=100.0, seconds=60.0, seed=2).latencies_s))

    assert itl(advice.wanted) <= TOLERANCE * itl_s < TOLERANCE * itl(advice.wanted - 1)
    assert advice.predicted_s == pytest.approx(itl(advice.wanted), rel=0.2)
