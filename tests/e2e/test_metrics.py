"""What every process of a real cluster tells Prometheus, compared with what clients saw; probes while ranks die and drain.

One prefill and one decode rank of their own, so that every figure is known exactly.
"""

import asyncio
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from proto.baton.v1 import generation_pb2, generation_pb2_grpc
from services.router.metrics import OUTCOMES
from tests.clear import CLEAR
from tests.e2e.rig import Answer, Rig, generate, generate_all, wait_until

NUM_PAGES = 64
SETTINGS = (f"prefill.num_pages={NUM_PAGES}", f"decode.num_pages={NUM_PAGES}", "decode.max_running=8", "prefill.max_running=9",
            "router.retries=0")
PROMPT = [0, *range(100, 229)]  # 130 tokens: two full pages and two tokens
ENDLESS: dict[str, Any] = {"prompt": [0, *range(300, 340)], "max_tokens": 1900, "temperature": 0.0, "ignore_eos": True}

# What must be there, whether or not it has samples yet; counters without their _total.
EVERYWHERE = {"baton_incidents", "baton_build_info", "process_cpu_seconds", "process_resident_memory_bytes"}
ENGINES = {
    "baton_kv_pages", "baton_kv_pages_capacity", "baton_engine_busy_seconds", "baton_step_seconds", "baton_prefix_cache_hit_tokens",
    "baton_prefix_cache_query_tokens", "baton_max_running", "vllm:num_requests_waiting", "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc", "vllm:cache_config_info",
}
WANTED = {
    "router": EVERYWHERE | {
        "baton_requests", "baton_requests_running", "baton_requests_queued", "baton_request_queue_seconds", "baton_request_ttft_seconds",
        "baton_request_itl_seconds", "baton_request_seconds", "baton_prompt_tokens", "baton_cached_tokens", "baton_output_tokens",
        "baton_recoveries", "baton_ranks", "baton_routing_seconds", "baton_prefix_index_pages", "baton_kv_event_gaps",
    },
    "prefill": EVERYWHERE, "decode": EVERYWHERE,
    "prefill/0": EVERYWHERE | ENGINES | {
        "baton_prefill_queued_tokens", "baton_prefill_queued_requests", "baton_prefill_queue_age_seconds", "baton_prefill_leased_pages",
        "baton_prefill_computed_tokens",
    },
    "decode/0": EVERYWHERE | ENGINES | {
        "baton_decode_claims", "baton_decode_running", "baton_decode_running_tokens", "baton_decode_used_pages", "baton_decode_tokens",
        "baton_decode_itl_seconds", "baton_decode_accept_length", "baton_decode_preemptions", "baton_transfer_bytes",
        "baton_transfer_pages", "baton_transfer_seconds", "baton_transfer_exposed_seconds",
    },
}
GAUGES_AT_REST = {  # of whichever process has them
    "baton_requests_running", "baton_requests_queued", "baton_prefill_queued_tokens", "baton_prefill_queued_requests",
    "baton_prefill_queue_age_seconds", "baton_prefill_leased_pages", "baton_decode_claims", "baton_decode_running",
    "baton_decode_running_tokens", "baton_decode_used_pages", "vllm:num_requests_waiting", "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
}
Samples = dict[str, float]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(1, 1, SETTINGS, tmp_path_factory.mktemp("run"))
    yield rig
    rig.close()


def get(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def address_of(rig: Rig, process: str) -> str:
    return rig.cluster.metrics_targets()[process][1]


def scrape(rig: Rig, process: str) -> Samples:
    """Samples by name, with the value of the only label, if any, behind a slash."""
    families = list(text_string_to_metric_families(get(address_of(rig, process), "/metrics")[1]))
    assert all(family.documentation for family in families)
    return {"/".join([sample.name, *list(sample.labels.values())[:1]]): sample.value for family in families for sample in family.samples}


def at_rest(rig: Rig) -> dict[str, Samples]:
    """All processes once nothing runs: load gauges are at most a tenth of a second old."""
    def busy() -> dict[str, float]:
        return {name: value for process in WANTED for name, value in scrape(rig, process).items() if name in GAUGES_AT_REST and value}

    wait_until(lambda: not busy(), 20.0, lambda: f"not at rest: {busy()}")
    return {process: scrape(rig, process) for process in WANTED}


def outcomes(samples: Samples) -> Samples:
    return {name: value for name in OUTCOMES if (value := samples[f"baton_requests_total/{name}"])}


def check_pages(samples: Samples) -> None:
    states = [value for name, value in samples.items() if name.startswith("baton_kv_pages/")]
    assert len(states) == 5 and sum(states) == samples["baton_kv_pages_capacity"] == NUM_PAGES


async def ends_early(address: str, *, timeout_s: float | None) -> int:
    """A stream whose deadline passes, or, without one, whose client leaves at the third token. Returns how many came."""
    num_tokens = 0
    async with CLEAR.open_channel(address) as channel:
        fields = {name: value for name, value in ENDLESS.items() if name != "prompt"}
        request = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=ENDLESS["prompt"]), **fields)
        call = generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=timeout_s)
        try:
            async for reply in call:
                num_tokens += len(reply.delta.token_ids)
                if timeout_s is None and num_tokens >= 3:
                    break
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        call.cancel()
    return num_tokens


def test_every_process_tells_what_it_should(rig: Rig) -> None:
    for process, wanted in WANTED.items():
        text = get(address_of(rig, process), "/metrics")[1]
        names = {family.name for family in text_string_to_metric_families(text)}
        assert wanted <= names, f"{process} lacks {wanted - names}"
        if process in ("prefill", "decode"):
            others = {name for name in names if name.startswith(("baton_decode", "baton_prefill", "baton_kv_pages", "baton_request"))}
            assert not others, f"a front has figures that are its engines': {others}"
        assert f'process="{process}"' in text and 'tenant="' not in text and "request_id" not in text
        assert get(address_of(rig, process), "/readyz") == get(address_of(rig, process), "/livez") == (200, "ok\n")


def test_figures_are_what_clients_saw(rig: Rig) -> None:
    fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0.0, "ignore_eos": True}
    answers = generate_all(rig.address, [fields, fields], at_once=1)
    assert [answer.end.usage.cached_tokens for answer in answers] == [0, 128]
    told = at_rest(rig)
    router, prefill, decode = told["router"], told["prefill/0"], told["decode/0"]
    assert outcomes(router) == {"ok": 2.0}
    assert (router["baton_prompt_tokens_total"], router["baton_cached_tokens_total"], router["baton_output_tokens_total"]) == (260, 128, 10)
    assert router["baton_request_ttft_seconds_count"] == router["baton_request_seconds_count"] == router["baton_routing_seconds_count"] == 2
    assert 2 <= router["baton_request_itl_seconds_count"] <= 8, "one a token but those of the first message"
    assert router["baton_ranks/prefill"] == router["baton_ranks/decode"] == 1
    for engine in (prefill, decode):
        check_pages(engine)
        assert (engine["baton_prefix_cache_query_tokens_total"], engine["baton_prefix_cache_hit_tokens_total"]) == (260, 128)
        assert 0 < engine["baton_step_seconds_sum"] <= engine["baton_engine_busy_seconds_total"]
        assert engine["baton_kv_pages/cached"] == 2
    assert (prefill["baton_max_running"], decode["baton_max_running"]) == (9, 8)
    assert (prefill["baton_prefill_computed_tokens_total"], prefill["baton_step_seconds_count"]) == (132, 2)
    assert (decode["baton_decode_tokens_total"], decode["baton_step_seconds_count"], decode["baton_decode_itl_seconds_count"]) == (8, 8, 6)
    assert (decode["baton_decode_accept_length_count"], decode["baton_decode_accept_length_sum"]) == (8, 8), "a token a request a step"
    moved = [answer.end.timeline.transfer for answer in answers]
    assert decode["baton_transfer_pages_total"] == sum(one.num_pages for one in moved) == 4
    assert decode["baton_transfer_bytes_total"] == sum(one.num_bytes for one in moved)
    assert decode["baton_transfer_seconds_count"] == 2
    assert decode["baton_transfer_seconds_sum"] == pytest.approx(sum(one.read_us for one in moved) / 1e6)
    assert decode["baton_transfer_exposed_seconds_sum"] == pytest.approx(sum(one.exposed_us for one in moved) / 1e6)


def test_requests_that_fail_late_or_leave_count_once_and_leave_nothing(rig: Rig) -> None:
    before = scrape(rig, "router")
    with pytest.raises(grpc.aio.AioRpcError):
        generate_all(rig.address, [ENDLESS | {"temperature": -1.0}], at_once=1)
    left = asyncio.run(ends_early(rig.address, timeout_s=None))
    late = asyncio.run(ends_early(rig.address, timeout_s=1.5))
    told = at_rest(rig)
    router = told["router"]
    changed = {name: value - before[f"baton_requests_total/{name}"] for name, value in outcomes(router).items()}
    assert changed == {"ok": 0, "invalid": 1, "cancelled": 1, "deadline": 1}
    assert router["baton_output_tokens_total"] - before["baton_output_tokens_total"] >= left + late
    assert router["baton_prompt_tokens_total"] - before["baton_prompt_tokens_total"] == 41 * ((left > 0) + (late > 0))
    for engine in ("prefill/0", "decode/0"):
        check_pages(told[engine])


def test_scrapes_under_load_harm_nobody_and_see_whole_states(rig: Rig) -> None:
    before, over, failures = scrape(rig, "router"), threading.Event(), list[BaseException]()
    seen: list[Samples] = []

    def keep_scraping() -> None:
        try:
            while not over.is_set():
                for process in ("router", "prefill/0", "decode/0"):
                    samples = scrape(rig, process)
                    if process != "router":
                        check_pages(samples)
                    seen.append(samples)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=keep_scraping) for _ in range(3)]
    for thread in threads:
        thread.start()
    work = [{"prompt": [0, *range(50 * number, 50 * number + 150)], "max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
            for number in range(12)]
    try:
        answers = generate_all(rig.address, work, at_once=12)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failures, failures
    assert all(len(answer.token_ids) == 24 for answer in answers)
    router = at_rest(rig)["router"]
    assert router["baton_requests_total/ok"] - before["baton_requests_total/ok"] == 12
    assert router["baton_output_tokens_total"] - before["baton_output_tokens_total"] == 12 * 24
    assert max(samples.get("baton_requests_running", 0.0) for samples in seen) > 1, "the load was seen"
    assert max(samples.get("baton_decode_used_pages", 0.0) for samples in seen) > 3


@pytest.mark.slow
def test_a_rank_that_dies_is_told_and_comes_back(rig: Rig) -> None:
    before = scrape(rig, "router")
    died = rig.cluster.metrics_targets()["decode/0"][1]

    killed: list[int] = []

    def kill(answer: Answer) -> None:
        if len(answer.token_ids) >= 3 and not killed:  # prefill's lease is over by then
            killed.append(rig.engine_pid("decode", 0))
            os.kill(killed[0], signal.SIGKILL)

    async def run() -> None:
        async with CLEAR.open_channel(rig.address) as channel:
            await generate(generation_pb2_grpc.GenerationStub(channel), on_delta=kill, **ENDLESS)

    with pytest.raises(grpc.aio.AioRpcError):
        asyncio.run(run())
    wait_until(lambda: outcomes(scrape(rig, "router")).get("unavailable") == 1, 20.0, lambda: f"{outcomes(scrape(rig, 'router'))}")
    assert scrape(rig, "router")["baton_requests_total/failed"] == before["baton_requests_total/failed"]

    def is_back() -> bool:
        address = address_of(rig, "decode/0")
        try:
            return address != died and get(address, "/readyz")[0] == 200
        except OSError:
            return False

    wait_until(is_back, 60.0, lambda: "the engine's successor is not ready")
    rig.wait_for_ranks("decode", 1)
    wait_until(lambda: get(address_of(rig, "router"), "/readyz")[0] == 200, 20.0, lambda: "the router is not ready")


def test_a_front_that_drains_is_live_and_not_ready(rig: Rig) -> None:
    front = rig.cluster.processes["decode"]
    seen: dict[str, tuple[int, str]] = {}

    async def run() -> None:
        async with CLEAR.open_channel(rig.address) as channel:
            request = generation_pb2.GenerateRequest(
                token_ids=generation_pb2.TokenIds(ids=ENDLESS["prompt"]), max_tokens=1900, ignore_eos=True, temperature=0.0,
            )
            call = generation_pb2_grpc.GenerationStub(channel).Generate(request)
            is_draining, num_tokens = False, 0
            async for reply in call:
                num_tokens += len(reply.delta.token_ids)
                if num_tokens >= 3 and not is_draining:
                    is_draining = True
                    front.send_signal(signal.SIGTERM)
                if is_draining and get(address_of(rig, "decode"), "/readyz")[0] == 503:
                    break
            for name, process, path in (("live", "decode", "/livez"), ("ready", "decode", "/readyz"), ("engine", "decode/0", "/readyz")):
                seen[name] = get(address_of(rig, process), path)
            wait_until(lambda: get(address_of(rig, "router"), "/readyz")[0] == 503, 20.0, lambda: "the router still pairs")
            seen["router"] = get(address_of(rig, "router"), "/readyz")
            call.cancel()

    asyncio.run(run())
    assert seen["live"] == seen["engine"] == (200, "ok\n")
    assert seen["ready"] == (503, "the front drains\n")
    assert seen["router"][0] == 503 and "no prefill rank and decode rank" in seen["router"][1]
    front.wait(30)
    assert front.returncode == 0
