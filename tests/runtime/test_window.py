"""From expositions to samples: real metric definitions, counters across restarts, demand that no rank shows by itself."""

from collections.abc import Callable

import pytest
from prometheus_client import generate_latest

from services.decode import metrics as decode
from services.kv.metrics import BUSY_SECONDS, MAX_RUNNING, RANK, STEP_SECONDS, PageCounts
from services.prefill import metrics as prefill
from services.router import metrics as router
from services.runtime import window
from services.runtime.scrape import series_of
from services.runtime.window import Snapshot, measure

NAMES = {value for name, value in vars(window).items() if name.isupper() and isinstance(value, str) and value.startswith("baton_")}


def exposition() -> dict[str, float]:
    """What this process would answer a scrape with."""
    return series_of(generate_latest().decode())


def test_every_series_read_is_one_that_processes_export() -> None:
    series = exposition()
    assert {name for name in NAMES if name not in series} == {window.OUTCOMES, window.TTFT_BUCKET}, "those have a label more"
    outcomes = {name.partition("=")[2].rstrip("}") for name in series if name.startswith(f"{window.OUTCOMES}{{")}
    assert outcomes == set(router.OUTCOMES) and {*window.REFUSED, *window.NO_LOAD} < outcomes
    buckets = {name.partition("{")[0] for name in series if "bucket" in name}
    assert buckets == {window.TTFT_BUCKET}, "others say nothing that is asked"


def parts(series: dict[str, float]) -> dict[str, dict[str, float]]:
    """One process's series as those of three, since all roles' metrics are defined in this one."""
    def own(takes: Callable[[str], bool]) -> dict[str, float]:
        return {name: value for name, value in series.items() if takes(name)}

    return {
        "router": own(lambda name: name.startswith("baton_request")),
        "prefill/0": own(lambda name: not name.startswith(("baton_request", "baton_decode"))),
        "decode/0": own(lambda name: not name.startswith(("baton_request", "baton_prefill"))),
    }


def test_samples_from_real_expositions() -> None:
    RANK.show(PageCounts(free=90, cached=10, request=30, leased=20, quarantined=0), 0, 0)
    MAX_RUNNING.set(16)
    prefill.QUEUED_TOKENS.set(100)
    prefill.LEASED_PAGES.set(20)
    decode.RUNNING.set(6)
    decode.USED_PAGES.set(50)
    router.RUNNING.set(3)
    shots = [Snapshot(5.0, parts(exposition()))]
    for _ in range(20):
        router.REQUESTS.labels("ok").inc()
    router.REQUESTS.labels("overloaded").inc(5)
    router.REQUESTS.labels("invalid").inc(50)
    router.RUNNING.set(8)
    router.TTFT_SECONDS.observe(0.06, 15)
    router.TTFT_SECONDS.observe(0.25, 5)  # in the bucket from 0.2 to 0.3
    prefill.COMPUTED_TOKENS.inc(4000)
    prefill.QUEUED_TOKENS.set(1100)
    prefill.QUEUE_AGE.set_function(lambda: 1.5)  # as engines do, and those of other tests may have
    BUSY_SECONDS.inc(8)
    STEP_SECONDS.observe(0.02, 100)
    decode.TOKENS.add(800)
    decode.ACCEPT_LENGTH.observe(2.0, 400)
    decode.ITL_SECONDS.observe(0.02, 400)
    shots.append(Snapshot(15.0, parts(exposition())))
    found = measure(shots)
    first, second = found.prefill, found.decode
    assert (found.window_s, found.routers, found.ttft_s, found.itl_s) == (10.0, 1, pytest.approx(0.26), pytest.approx(0.02))
    assert first.tokens_per_s == pytest.approx((4000 + 1000) / 10 * 30 / 25), "computed, still queued, and refused: 5 beside 25"
    assert first.requests_per_s == pytest.approx(3.0), "20 ended well, 5 more run, 5 were refused; the invalid are no load"
    assert (first.token_s, first.queued_tokens, first.queue_age_s) == (pytest.approx(0.002), 1100, 1.5)
    assert (first.held_pages, first.rank_pages) == (50, 150)
    assert second.tokens_per_s == pytest.approx(80 * 30 / 25) and second.accept_length == pytest.approx(2.0)
    assert (second.batch, second.step_s, second.line) == (pytest.approx(4.0), pytest.approx(0.02), None)
    assert (second.running, second.used_pages, second.waiting_pages, second.max_running) == (6, 50, 20, 16)


def test_quantiles_without_observations_and_beyond_the_last_bound() -> None:
    def seen(*counts: float) -> dict[str, float]:
        return {window.REQUESTS_RUNNING: 0.0} | {f"{window.TTFT_BUCKET}{{le={bound}}}": count for bound, count in zip(
            ("0.1", "0.2", "+Inf"), counts, strict=True)}

    assert measure([shot(0.0, r=seen(5, 5, 5)), shot(1.0, r=seen(5, 5, 5))]).ttft_s is None
    assert measure([shot(0.0, r=seen(5, 5, 5)), shot(1.0, r=seen(5, 5, 9))]).ttft_s == 0.2
    assert measure([shot(0.0, r=seen(5, 5, 5)), shot(1.0, r=seen(15, 25, 25))], quantile=0.75).ttft_s == pytest.approx(0.15)


def shot(at: float, **processes: dict[str, float]) -> Snapshot:
    return Snapshot(at, processes)


def rank(tokens: float, queued: float = 0.0) -> dict[str, float]:
    return {window.QUEUED_TOKENS: queued, window.COMPUTED_TOKENS: tokens, window.BUSY_SECONDS: tokens / 100}


def test_counters_go_on_across_restarts_and_ranks_that_come_and_go() -> None:
    found = measure([
        shot(0.0, a=rank(1000), b=rank(500)),
        shot(5.0, a=rank(1100), b=rank(600), c=rank(9000)),
        shot(10.0, a=rank(50), c=rank(9200)),  # a was started again, b has gone
    ]).prefill
    assert found.ranks == 2 and found.requests_per_s is None, "nothing tells requests without a router"
    assert found.tokens_per_s == pytest.approx((100 + 50 + 200) / 10) and found.token_s == pytest.approx(0.01)


def test_a_queue_that_was_cancelled_is_no_negative_demand() -> None:
    assert measure([shot(0.0, a=rank(0, queued=500)), shot(10.0, a=rank(100))]).prefill.tokens_per_s == 0.0


def test_requests_that_routers_hold_back_count_as_queued() -> None:
    def ask(queued: float, ended: float) -> dict[str, float]:
        return {window.REQUESTS_RUNNING: 0.0, window.REQUESTS_QUEUED: queued, f"{window.OUTCOMES}{{outcome=ok}}": ended}

    found = measure([shot(0.0, r=ask(4, 0), a=rank(0)), shot(10.0, r=ask(4, 20), a=rank(1000))]).prefill
    assert found.queued_tokens == pytest.approx(4 * 50)
