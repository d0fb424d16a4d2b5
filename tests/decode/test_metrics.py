"""What a decode engine tells of its steps and of its load."""

from prometheus_client import REGISTRY

from services.decode.load import LoadReporter
from services.runtime.ipc import RankLoad
from tests.decode.rig import Rig, greedy
from tests.decode.test_preemption import OLD, YOUNG, run_to_preemption

NAMES = ("baton_decode_tokens_total", "baton_decode_itl_seconds_count", "baton_decode_itl_seconds_sum", "baton_decode_accept_length_sum",
         "baton_step_seconds_count", "baton_decode_preemptions_total", "baton_transfer_pages_total", "baton_engine_busy_seconds_total")


def told(name: str) -> float:
    value = REGISTRY.get_sample_value(name)
    assert value is not None, name
    return value


def step(rig: Rig, after_s: float) -> None:
    rig.clock.now += after_s
    rig.step()


def test_gaps_are_between_steps_of_a_request_that_ran_in_both() -> None:
    rig, before = Rig(), {name: told(name) for name in NAMES}
    rig.start(range(3, 73), greedy(20), handle=1)
    rig.exchange()
    step(rig, 5.0)  # the way to the first step is no gap
    rig.start(range(3, 10), greedy(20), handle=2)
    rig.exchange()
    step(rig, 0.25)
    step(rig, 0.5)
    counted = {name: told(name) - before[name] for name in NAMES}
    assert counted["baton_decode_tokens_total"] == counted["baton_decode_accept_length_sum"] == 5
    assert counted["baton_step_seconds_count"] == 3
    assert (counted["baton_decode_itl_seconds_count"], counted["baton_decode_itl_seconds_sum"]) == (3, 0.25 + 2 * 0.5)
    assert counted["baton_transfer_pages_total"] == 3
    rig.run()


def test_load_is_told_to_prometheus_as_to_routers() -> None:
    rig, sent = Rig(num_pages=8, max_running=1), list[RankLoad]()

    def look() -> None:
        LoadReporter(rig.kv, rig.fetcher, rig.loop, sent.append).report()

    for handle in (1, 2):
        rig.start(range(3 + handle, 73 + handle), greedy(20), handle=handle)
    rig.exchange()
    rig.submit(rig.spec(range(3, 30), greedy(5)), handle=3)  # nothing is announced
    rig.step()
    look()
    assert (told("baton_decode_claims"), told("baton_decode_running")) == (1, 2)
    assert (told("vllm:num_requests_waiting"), told("vllm:num_requests_running")) == (2, 1), "one waits for a place, one for its pages"
    assert told("baton_decode_used_pages") == 4 == 8 - sent[-1].num_free_pages, "two pages each"
    assert told("baton_decode_running_tokens") == sent[-1].num_running_tokens == 72
    for handle in (1, 2, 3):
        rig.cancel(handle)
    rig.run()
    look()
    assert told("baton_decode_claims") == told("baton_decode_running") == told("baton_decode_used_pages") == 0
    assert told("vllm:kv_cache_usage_perc") == told("vllm:num_requests_waiting") == 0


def test_preemptions_count() -> None:
    rig, before = Rig(num_pages=5), told("baton_decode_preemptions_total")
    rig.start(OLD, greedy(250), handle=1)
    rig.start(YOUNG, greedy(100), handle=2)
    run_to_preemption(rig, 2)
    assert told("baton_decode_preemptions_total") - before == 1
    rig.run()
