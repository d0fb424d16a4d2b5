"""Every request counts once, by how it ended, whatever ended it; tokens, gaps and times are counted where clients see them."""

import asyncio
import contextlib
import json
import logging
from pathlib import Path

import grpc
import pytest
from prometheus_client import REGISTRY

from proto.baton.v1 import common_pb2, generation_pb2
from services.router.metrics import OUTCOMES
from services.runtime.telemetry import _JsonFormatter  # pyright: ignore[reportPrivateUsage]
from tests.router.byte_model import BOS, ids_of
from tests.router.fakes import refusal, until
from tests.router.rig import World, failing, request_of, running

PATIENCE = 30.0
COUNTED = ("baton_prompt_tokens_total", "baton_cached_tokens_total", "baton_output_tokens_total", "baton_request_ttft_seconds_count",
           "baton_request_itl_seconds_count", "baton_request_seconds_count", "baton_routing_seconds_count")


class Since:
    """What was counted since it was made; the registry is the whole test run's."""

    def __init__(self) -> None:
        self._outcomes, self._counts = self._now()

    @staticmethod
    def _now() -> tuple[dict[str, float], dict[str, float]]:
        outcomes = {name: REGISTRY.get_sample_value("baton_requests_total", {"outcome": name}) or 0.0 for name in OUTCOMES}
        return outcomes, {name: REGISTRY.get_sample_value(name) or 0.0 for name in COUNTED}

    def outcomes(self) -> dict[str, float]:
        return {name: number - self._outcomes[name] for name, number in self._now()[0].items() if number != self._outcomes[name]}

    def counts(self) -> dict[str, float]:
        return {name: number - self._counts[name] for name, number in self._now()[1].items()}


async def run(world: World, kind: str) -> None:
    """One request that ends as `kind` says."""
    prefill = world.prefills[0] if world.prefills else None
    match kind:
        case "ok":
            await world.generate(max_tokens=5)
        case "invalid":
            with failing(grpc.StatusCode.INVALID_ARGUMENT):
                await world.generate(max_tokens=-1)
        case "overloaded":
            with failing(grpc.StatusCode.RESOURCE_EXHAUSTED):
                await world.generate(max_tokens=3, n=3)
        case "failed" | "unavailable":
            assert prefill is not None
            reason = common_pb2.INTERNAL if kind == "failed" else common_pb2.LEASE_EXPIRED
            prefill.serve = lambda request: asyncio.sleep(0, refusal(reason))
            with failing(grpc.StatusCode.INTERNAL if kind == "failed" else grpc.StatusCode.UNAVAILABLE):
                await world.generate(max_tokens=3)
        case "no member":
            with failing(grpc.StatusCode.UNAVAILABLE):
                await world.generate(max_tokens=3)
        case "deadline":
            assert prefill is not None
            prefill.serve = lambda request: asyncio.sleep(PATIENCE, refusal(common_pb2.INTERNAL))
            with failing(grpc.StatusCode.DEADLINE_EXCEEDED):
                await world.generate(timeout_s=0.2, max_tokens=3)
        case _:  # the client leaves after so many tokens
            await leave(world, int(kind))


async def leave(world: World, after: int) -> None:
    if not after:
        world.prefills[0].serve = lambda request: asyncio.sleep(PATIENCE, refusal(common_pb2.INTERNAL))
    num_tokens = 0
    async with contextlib.aclosing(world.stream(max_tokens=60)) as replies:
        async for reply in replies:
            num_tokens += len(reply.delta.token_ids)
            if num_tokens >= after:
                return


@pytest.mark.parametrize(("kind", "outcome"), [
    ("ok", "ok"), ("invalid", "invalid"), ("overloaded", "overloaded"), ("failed", "failed"), ("unavailable", "unavailable"),
    ("no member", "unavailable"), ("deadline", "deadline"), ("0", "cancelled"), ("1", "cancelled"), ("7", "cancelled"),
])
async def test_a_request_counts_once(tmp_path: Path, kind: str, outcome: str) -> None:
    num_prefills = 0 if kind == "no member" else 1
    async with running(tmp_path, prefills=num_prefills, max_requests=2, retries=1) as world:
        since = Since()
        await run(world, kind)
        await until(lambda: bool(since.outcomes()), "it is counted")
        await world.settle()
        assert since.outcomes() == {outcome: 1.0}
        assert REGISTRY.get_sample_value("baton_requests_running") == 0.0
        assert since.counts()["baton_request_seconds_count"] == (outcome == "ok"), "times of whole requests are of those that ended well"


async def test_clients_that_leave_at_any_point_are_cancelled_ones(tmp_path: Path) -> None:
    """A write that finds its client gone is no failure of ours."""
    async with running(tmp_path) as world:
        for decode in world.decodes:
            decode.step_s = 0.001
        since = Since()
        await asyncio.gather(*(leave(world, 1 + number) for number in range(40)))
        await until(lambda: sum(since.outcomes().values()) == 40, "all are counted")
        assert since.outcomes() == {"cancelled": 40.0}


async def test_tokens_and_gaps_of_a_request(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        since = Since()
        answer = await world.generate(prompt=[BOS, *ids_of("hello")], max_tokens=9)
        assert answer.finished is not None
        assert since.counts() == {
            "baton_prompt_tokens_total": 6, "baton_cached_tokens_total": answer.finished.usage.cached_tokens,
            "baton_output_tokens_total": 9, "baton_request_ttft_seconds_count": 1,
            "baton_request_itl_seconds_count": 9 - len(answer.deltas[0]),  # a byte a token: those of the first message have no gap
            "baton_request_seconds_count": 1, "baton_routing_seconds_count": 1,
        }


async def test_choices_are_one_request_with_one_prompt(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        since = Since()
        await world.generate(prompt=[BOS, *ids_of("hello")], max_tokens=4, n=3)
        assert since.outcomes() == {"ok": 1.0}
        counts = since.counts()
        assert counts["baton_prompt_tokens_total"] == 6 and counts["baton_output_tokens_total"] == 12
        assert counts["baton_request_ttft_seconds_count"] == counts["baton_request_seconds_count"] == 1


async def test_ranks_are_those_that_take_requests(tmp_path: Path) -> None:
    async with running(tmp_path, prefills=1, decodes=2) as world:
        def ranks() -> tuple[float | None, ...]:
            return tuple(REGISTRY.get_sample_value("baton_ranks", {"role": role}) for role in ("prefill", "decode"))

        await until(lambda: ranks() == (1.0, 2.0), "all are counted")
        assert world.router.why_not_ready() == ""
        await world.decodes[0].leave()
        await until(lambda: ranks() == (1.0, 1.0), "one has left")
        await world.decodes[1].leave()
        await until(lambda: ranks() == (1.0, 0.0) and "paired" in world.router.why_not_ready(), "nobody can be paired")


async def test_a_replay_counts_no_token_twice(tmp_path: Path) -> None:
    """The rank dies after some tokens: its successor's first token is the client's next one."""
    async with running(tmp_path, decodes=2) as world:
        for decode in world.decodes:
            decode.step_s = 0.004
        since = Since()

        async def kill_when_streaming() -> None:
            await until(lambda: any(decode.sessions and decode.submits for decode in world.decodes), "it runs somewhere")
            await until(lambda: since.counts()["baton_output_tokens_total"] >= 3, "tokens flow")
            await next(decode for decode in world.decodes if decode.submits).leave()

        answer, _ = await asyncio.gather(world.generate(max_tokens=40), kill_when_streaming())
        assert len(answer.token_ids) == 40 and since.outcomes() == {"ok": 1.0}
        assert since.counts()["baton_output_tokens_total"] == 40 and since.counts()["baton_prompt_tokens_total"] == 6
        reason = common_pb2.Reason.Name(answer.recoveries[0].reason)
        assert REGISTRY.get_sample_value("baton_recoveries_total", {"path": "replay", "reason": reason})


async def test_log_lines_about_a_request_have_its_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path, retries=1) as world:
        world.prefills[0].serve = lambda request: asyncio.sleep(0, refusal(common_pb2.INTERNAL))
        with caplog.at_level(logging.WARNING, "services.router"), failing(grpc.StatusCode.INTERNAL):
            await world.generate(max_tokens=3)
        request_id = world.prefills[0].runs[0].request_id
    lines = [json.loads(_JsonFormatter("router").format(record)) for record in caplog.records if "attempt" in record.getMessage()]
    assert lines and all(line["request_id"] == request_id and line["process"] == "router" for line in lines)
    assert lines[0]["time"].endswith("Z") and lines[0]["level"] == "warning"


async def test_tokens_whose_write_is_cut_off_count(tmp_path: Path) -> None:
    """A client may hold what the router was still writing when its deadline passed or it left: no token that it has is missing."""
    async with running(tmp_path) as world:
        since, given, stuck = Since(), list[int](), asyncio.Event()

        async def write(reply: generation_pb2.GenerateReply) -> None:
            given.append(len(reply.delta.token_ids))
            if sum(given) >= 3:
                stuck.set()
                await asyncio.Event().wait()

        request = await world.router.servicer.check(request_of(max_tokens=40, temperature=0.0))
        task = asyncio.create_task(world.router.dispatcher.run(request, write, None))
        await asyncio.wait_for(stuck.wait(), PATIENCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert since.counts()["baton_output_tokens_total"] == sum(given)
