"""The sizing rule: monotone, hysteretic, honest about what it lacks; and its formulas against exact numbers."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.runtime.queueing import StepLine, Steps, erlang_c, fit_steps, wait_quantile
from services.runtime.sizing import DecodeSample, PrefillSample, Targets, recommend, size_decode, size_prefill

PREFILL = PrefillSample(ranks=2, tokens_per_s=1000.0, requests_per_s=10.0, token_s=0.001, held_pages=20.0, rank_pages=256.0)
DECODE = DecodeSample(
    ranks=2, tokens_per_s=400.0, line=StepLine(0.01, 0.001), batch=8.0, step_s=0.018, running=16.0, claims=2.0, used_pages=64.0,
    rank_pages=256.0, max_running=64.0,
)
prefills = st.builds(
    PrefillSample, ranks=st.integers(1, 40), tokens_per_s=st.floats(0, 1e5), requests_per_s=st.none() | st.floats(0.1, 100),
    token_s=st.none() | st.floats(1e-5, 1e-2), queued_tokens=st.floats(0, 1e5), held_pages=st.floats(0, 5000),
    rank_pages=st.floats(0, 1000), service_cv2=st.floats(0, 3),
)
lines = st.builds(StepLine, base_s=st.floats(0, 0.05), request_s=st.floats(1e-5, 0.01))
decodes = st.builds(
    DecodeSample, ranks=st.integers(1, 40), tokens_per_s=st.floats(0, 1e5), line=st.none() | lines, batch=st.none() | st.floats(0.5, 64),
    step_s=st.none() | st.floats(1e-3, 0.2), accept_length=st.floats(1, 4), running=st.floats(0, 500), claims=st.floats(0, 500),
    used_pages=st.floats(0, 5000), waiting_pages=st.floats(0, 500), rank_pages=st.floats(0, 1000), max_running=st.floats(0, 64),
)
targets = st.builds(
    Targets, ttft_s=st.floats(0.01, 5), itl_s=st.floats(0.005, 0.5), headroom=st.floats(0, 0.6), quantile=st.floats(0.5, 0.99),
    most_ranks=st.integers(1, 64),
)


def loaded(sample: PrefillSample | DecodeSample, times: float) -> PrefillSample | DecodeSample:
    """As many ranks under `times` the load, with prompts and answers of the same lengths."""
    grown = {"tokens_per_s", "requests_per_s", "queued_tokens", "held_pages", "running", "claims", "used_pages", "waiting_pages"}
    values = {name: value * times for name, value in dataclasses.asdict(sample).items() if name in grown and value is not None}
    return dataclasses.replace(sample, **values)


@settings(max_examples=60, deadline=None)
@given(prefills, decodes, targets, st.floats(1, 10))
def test_more_load_never_wants_fewer(prefill: PrefillSample, decode: DecodeSample, wanted: Targets, times: float) -> None:
    assert size_prefill(loaded(prefill, times), wanted).wanted >= size_prefill(prefill, wanted).wanted
    assert size_decode(loaded(decode, times), wanted).wanted >= size_decode(decode, wanted).wanted


@settings(max_examples=60, deadline=None)
@given(decodes, targets, st.floats(1, 10))
def test_more_tokens_or_more_that_wait_never_want_fewer(decode: DecodeSample, wanted: Targets, times: float) -> None:
    for name in ("tokens_per_s", "waiting_pages", "used_pages"):
        if name == "used_pages" and decode.waiting_pages:
            continue  # larger requests: fewer of them are what waits
        more = dataclasses.replace(decode, **{name: getattr(decode, name) * times})
        assert size_decode(more, wanted).wanted >= size_decode(decode, wanted).wanted, name


@settings(max_examples=60, deadline=None)
@given(prefills, decodes, targets, st.floats(0.1, 1), st.floats(0, 0.3))
def test_tighter_targets_never_want_fewer(prefill: PrefillSample, decode: DecodeSample, loose: Targets, by: float, more: float) -> None:
    for change in ({"ttft_s": loose.ttft_s * by}, {"itl_s": loose.itl_s * by}, {"headroom": loose.headroom + more}):
        tight = dataclasses.replace(loose, **change)
        assert size_prefill(prefill, tight).wanted >= size_prefill(prefill, loose).wanted
        assert size_decode(decode, tight).wanted >= size_decode(decode, loose).wanted


@settings(max_examples=60, deadline=None)
@given(prefills, decodes, targets)
def test_always_between_one_and_the_ceiling_and_down_by_one_at_most_unless_idle(
    prefill: PrefillSample, decode: DecodeSample, wanted: Targets
) -> None:
    for advice in recommend(prefill, decode, wanted):
        assert advice.wanted >= 1
        if advice.has_data:
            assert advice.wanted <= wanted.most_ranks
            assert advice.wanted >= min(advice.ranks - 1, wanted.most_ranks) or advice.binding == "idle"
        else:
            assert advice.wanted == advice.ranks and advice.predicted_s is None
        assert advice.predicted_s is None or math.isfinite(advice.predicted_s)


@settings(max_examples=60, deadline=None)
@given(prefills, decodes, targets)
def test_a_size_just_taken_is_kept(prefill: PrefillSample, decode: DecodeSample, wanted: Targets) -> None:
    """Growth reaches its end in one step, and a pool that has grown does not shrink under the same load."""
    for sample, size in ((prefill, size_prefill), (decode, size_decode)):
        first = size(sample, wanted)
        is_sure = sample.queued_tokens == 0 if isinstance(sample, PrefillSample) else sample.line is not None
        if first.wanted > first.ranks and is_sure:
            again = size(dataclasses.replace(sample, ranks=first.wanted), wanted)
            assert again.wanted == first.wanted, (first, again)


@pytest.mark.parametrize(("load", "wanted"), [(0.5, 3), (2.3, 3), (2.5, 3), (2.69, 3), (2.71, 4), (6.0, 8)])
def test_prefill_grows_with_half_the_headroom_gone_and_shrinks_with_all_of_it(load: float, wanted: int) -> None:
    """3 ranks, short prompts and a loose TTFT, so that compute alone binds: they serve 2.4 with 20 % free, 2.7 with 10 %."""
    sample = PrefillSample(ranks=3, tokens_per_s=load * 1e5, requests_per_s=load * 1e4, token_s=1e-5)
    assert size_prefill(sample, Targets()).wanted == (2 if load == 0.5 else wanted)


def test_ttft_binds_before_compute_for_long_prompts() -> None:
    sample = PrefillSample(ranks=1, tokens_per_s=500.0, requests_per_s=1.0, token_s=0.001)
    advice = size_prefill(sample, Targets(ttft_s=0.7))
    assert (advice.wanted, advice.binding) == (2, "TTFT")
    assert advice.predicted_s == pytest.approx(0.5), "of a prompt that does not wait, as 90 % do not"
    assert "TTFT is 2943 ms with 1 rank and 645 ms with 2, of at most 700 ms" in advice.reason


def test_an_unreachable_target_asks_for_no_endless_pool() -> None:
    prefill = size_prefill(dataclasses.replace(PREFILL, tokens_per_s=500.0, requests_per_s=1.0), Targets(ttft_s=0.01))
    decode = size_decode(DECODE, Targets(itl_s=0.001))
    assert prefill.wanted < 6 and prefill.predicted_s is not None and prefill.predicted_s >= 0.5
    assert "the target of 10 ms is out of reach: it takes 500 ms with nobody else there" in prefill.reason
    assert decode.wanted < 20 and decode.predicted_s is not None and decode.predicted_s > 0.011


def test_backlog_asks_for_ranks_that_clear_it() -> None:
    calm = size_prefill(PREFILL, Targets())
    assert size_prefill(dataclasses.replace(PREFILL, queued_tokens=60_000.0, queue_age_s=20.0), Targets()).wanted > calm.wanted


def test_leases_that_wait_for_decode_grow_decode_and_not_prefill() -> None:
    full = dataclasses.replace(PREFILL, held_pages=500.0)
    assert size_prefill(full, Targets()).binding == "KV pages" and size_prefill(full, Targets()).wanted == 3
    short = dataclasses.replace(DECODE, used_pages=500.0, waiting_pages=480.0, claims=40.0)
    prefill, decode = recommend(full, short, Targets())
    assert (decode.binding, decode.wanted) == ("KV pages", 5) and prefill.wanted == 2


@pytest.mark.parametrize(("changes", "binding"), [
    ({"tokens_per_s": 1500.0}, "ITL"),
    ({"used_pages": 500.0}, "KV pages"),
    ({"running": 120.0, "used_pages": 200.0}, "max_running"),
])
def test_decode_names_what_binds(changes: dict[str, float], binding: str) -> None:
    advice = size_decode(dataclasses.replace(DECODE, **changes), Targets(itl_s=0.04))
    assert advice.binding == binding and advice.wanted > 2 and binding in advice.reason


def test_without_a_slope_decode_moves_by_what_is_certain() -> None:
    flat = dataclasses.replace(DECODE, ranks=3, line=None, step_s=0.06)
    slow = size_decode(flat, Targets(itl_s=0.05))
    assert (slow.wanted, slow.binding, slow.predicted_s) == (4, "ITL", None), "slower than the target: one more, and then look again"
    assert size_decode(dataclasses.replace(flat, step_s=0.045), Targets(itl_s=0.05)).wanted == 3, "fast enough, but fewer may not be"
    light = dataclasses.replace(flat, step_s=0.012, batch=1.0, tokens_per_s=20.0, running=0.3, claims=0.0, used_pages=2.0)
    assert size_decode(light, Targets(itl_s=0.05)).wanted == 2, "even steps as long as their batch would be fast enough"
    alone = dataclasses.replace(light, step_s=0.2, tokens_per_s=5.0)
    assert size_decode(alone, Targets(itl_s=0.05)).wanted <= 3, "more ranks do not help a request that runs alone"


def test_idle_goes_to_one_at_once_and_what_was_not_measured_stays() -> None:
    idle = recommend(
        PrefillSample(ranks=7, tokens_per_s=0.0, requests_per_s=0.0, token_s=None), DecodeSample(ranks=5, tokens_per_s=0.0, line=None),
        Targets(),
    )
    assert [(each.wanted, each.binding) for each in idle] == [(1, "idle"), (1, "idle")]
    stuck = recommend(
        PrefillSample(ranks=7, tokens_per_s=0.0, requests_per_s=0.0, token_s=None, queued_tokens=500.0, queue_age_s=9.0),
        DecodeSample(ranks=5, tokens_per_s=0.0, line=None, running=3.0), Targets(),
    )
    assert [(each.wanted, each.has_data) for each in stuck] == [(7, False), (5, False)]
    assert "500 tokens wait (the oldest 9.0 s)" in stuck[0].reason and "no step was seen" in stuck[1].reason
    none = size_decode(DecodeSample(ranks=0, tokens_per_s=0.0, line=None), Targets())
    assert not none.has_data and none.wanted == 1


def test_without_a_router_compute_alone_sizes_prefill() -> None:
    advice = size_prefill(dataclasses.replace(PREFILL, ranks=1, tokens_per_s=3000.0, requests_per_s=None), Targets())
    assert (advice.wanted, advice.binding, advice.predicted_s) == (4, "compute", None)


def test_the_ceiling_is_kept_and_named() -> None:
    advice = size_prefill(dataclasses.replace(PREFILL, tokens_per_s=50_000.0), Targets(most_ranks=8))
    assert advice.wanted == 8 and "the ceiling of 8 is too low" in advice.reason


def test_erlang_c_and_waits_are_the_textbooks() -> None:
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(5, 4.0) == pytest.approx(0.55411, abs=1e-5)
    assert erlang_c(3, 3.0) == 1.0
    assert wait_quantile(1, 0.8, 1.0, 0.9) == pytest.approx(math.log(8) / 0.2)
    assert wait_quantile(1, 0.8, 1.0, 0.9, service_cv2=0.0) == pytest.approx(math.log(8) / 0.4)
    assert wait_quantile(4, 0.1, 1.0, 0.9) == 0.0 and math.isinf(wait_quantile(2, 2.0, 1.0, 0.5))


def test_steps_are_fitted_where_batches_vary_and_not_where_they_do_not() -> None:
    line = fit_steps([Steps(batch, 0.01 + 0.002 * batch, 10 * batch) for batch in (1.0, 4.0, 9.0, 10.0)])
    assert line is not None and (line.base_s, line.request_s) == (pytest.approx(0.01), pytest.approx(0.002))
    noise = (0.004, -0.004, -0.004, 0.004, 0.0)
    assert fit_steps([Steps(4.0 + 0.1 * number, 0.02 + 0.001 * number + noise[number], 10) for number in range(5)]) is None
    assert fit_steps([Steps(batch, 0.02 - 0.001 * batch, 10) for batch in (1.0, 4.0, 9.0, 16.0)]) is None
    assert fit_steps([Steps(4.0, 0.02 + shift, 10) for shift in noise]) is None
    assert fit_steps([Steps(1.0, 0.01, 5), Steps(9.0, 0.05, 5)]) is None and fit_steps([]) is None
    steep = fit_steps([Steps(batch, 0.01 * batch**1.5, 10) for batch in (1.0, 4.0, 9.0, 12.0)])
    assert steep is not None and steep.base_s == 0.0, "no step costs less than nothing"
