"""What a prefill engine tells of its queue, by a clock that moves by hand."""

from prometheus_client import REGISTRY

from services.kv.pages import HolderKind
from tests.prefill.rig import Rig


def told(name: str) -> float | None:
    return REGISTRY.get_sample_value(name)


def turn(rig: Rig, times: int = 1) -> None:
    """Reports are at least 0.05 s apart."""
    for _ in range(times):
        rig.now += 0.1
        rig.turn()


def test_a_prompt_that_waits_for_leased_pages() -> None:
    rig = Rig(num_pages=4, chunk_tokens=128, max_running=3)
    computed = told("baton_prefill_computed_tokens_total") or 0.0
    first = rig.run(num_tokens=200)
    turn(rig, 4)
    assert told("baton_max_running") == 3 and told("baton_prefill_queued_requests") == told("baton_prefill_queue_age_seconds") == 0
    assert told("baton_prefill_leased_pages") == 4 == rig.kv.pool.pages.num_holds(HolderKind.LEASE), "its reader has not come"
    assert told("vllm:kv_cache_usage_perc") == 1.0
    rig.run(num_tokens=200, name="second", first=3, read=False, max_tokens=1)
    rig.run(num_tokens=70, name="third", first=4, read=False, max_tokens=1)
    turn(rig)
    arrived = rig.now
    assert (told("baton_prefill_queued_requests"), told("baton_prefill_queued_tokens")) == (2, 270)
    assert told("vllm:num_requests_waiting") == 2
    rig.now += 7.0
    assert told("baton_prefill_queue_age_seconds") == rig.now - arrived, "it ages without a turn of the loop"
    rig.cancel(first)
    turn(rig, 4)
    assert told("baton_prefill_queued_requests") == told("baton_prefill_queued_tokens") == told("baton_prefill_queue_age_seconds") == 0
    assert (told("baton_prefill_computed_tokens_total") or 0.0) - computed == 470
    states = {state: REGISTRY.get_sample_value("baton_kv_pages", {"state": state}) for state in ("leased", "request", "quarantined")}
    assert set(states.values()) == {0.0}
    rig.engine.close()


def test_a_prompt_that_is_refused_or_cancelled_leaves_the_queue() -> None:
    rig = Rig(num_pages=4, max_queued=1)
    first = rig.run(num_tokens=200)
    turn(rig, 3)
    waiting = rig.run(num_tokens=100, name="waits", first=3, read=False, max_tokens=1)
    rig.run(num_tokens=100, name="one too many", first=4, read=False, max_tokens=1)
    turn(rig)
    assert (told("baton_prefill_queued_requests"), told("baton_prefill_queued_tokens")) == (1, 100)
    rig.cancel(waiting)
    turn(rig)
    assert told("baton_prefill_queued_requests") == told("baton_prefill_queued_tokens") == told("baton_prefill_queue_age_seconds") == 0
    rig.cancel(first)
    turn(rig, 2)
    rig.engine.close()
