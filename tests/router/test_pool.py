"""Who is a member, who may be paired, and what is said when nobody is there."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proto.baton.v1 import common_pb2, generation_pb2, generation_pb2_grpc, registry_pb2, registry_pb2_grpc
from services.router.pool import Pool
from services.router.validate import Limits
from services.runtime.errors import InvalidRequest
from services.runtime.serve import WIRE_VERSION, open_channel
from tests.router.byte_model import MAX_MODEL_LEN, VOCAB, ids_of
from tests.router.fakes import until
from tests.router.rig import Answer, failing, running

FALLBACK = Limits(7, 8)


def member(role: str, *instance_ids: str, front: str = "f", address: str = "127.0.0.1:9", length: int = 64,
           fingerprint: str = "fp") -> registry_pb2.Member:
    ranks = [common_pb2.Rank(instance_id=name, role=role, pool_address=address, rank=i) for i, name in enumerate(instance_ids)]
    limits = registry_pb2.Limits(max_model_len=length, vocab_size=VOCAB, page_size=64, num_pages=100, max_running=8)
    return registry_pb2.Member(
        front_id=front, role=role, address=address, fingerprint=fingerprint, wire_version=WIRE_VERSION, limits=limits, ranks=ranks,
    )


def ids(pool: Pool, role: str = "prefill") -> set[str]:
    return {state.instance_id for state in pool.usable(role)}


async def test_ranks_come_and_go_with_their_front() -> None:
    pool = Pool("r")
    pool.join(member("prefill", "a", "b"))
    pool.join(member("prefill", "c", front="g", address="127.0.0.1:10"))
    assert ids(pool) == {"a", "b", "c"}
    pool.join(member("prefill", "b"))  # a is no longer listed
    assert ids(pool) == {"b", "c"}
    pool.leaving("g")
    assert ids(pool) == {"b"}
    pool.lose("f")
    assert ids(pool) == set()
    await pool.close()


async def test_new_incarnation_replaces_the_old_one() -> None:
    """B02: same place, new instance id, whoever lists it."""
    pool = Pool("r")
    pool.join(member("prefill", "old"))
    pool.join(member("prefill", "new", front="restarted"))
    assert ids(pool) == {"new"}
    pool.lose("f")  # the old front's stream ends late
    assert ids(pool) == {"new"}
    await pool.close()


async def test_own_count_corrects_a_stale_report() -> None:
    pool = Pool("r")
    pool.join(member("prefill", "a"))
    state = pool.usable("prefill")[0]
    pool.report(registry_pb2.Load(instance_id="a", num_queued_tokens=100))
    state.begin(30)
    state.begin(20)
    assert state.num_tokens == 150
    pool.report(registry_pb2.Load(instance_id="a", num_queued_tokens=10))  # older than what it says
    assert state.num_tokens == 50
    state.end(30)
    state.end(20)
    assert state.num_tokens == 10
    pool.report(registry_pb2.Load(instance_id="unknown"))
    await pool.close()


@pytest.mark.parametrize(("change", "word"), [
    ({"wire_version": 99}, "wire_version"), ({"role": "both"}, "role"), ({"tp": 2}, "tp"), ({"front_id": ""}, "front_id"),
    *(({"pool_address": address}, "pool_address") for address in (
        "", "host", "host:", ":1", "host:0", "host:65536", "host:99999999", "no such host:1", "host:1:2", "host:-1", "host:1\n", "[::1:5",
    )),
])
async def test_unfit_members_are_refused(change: dict[str, object], word: str) -> None:
    message = member("prefill", "a")
    for name, value in change.items():
        setattr(message.ranks[0] if name == "pool_address" else message, name, value)
    pool = Pool("r")
    with pytest.raises(InvalidRequest, match=word):
        pool.join(message)
    assert ids(pool) == set()


async def test_limits_without_a_pair_are_the_models() -> None:
    pool = Pool("r")
    assert pool.limits(FALLBACK) == FALLBACK
    pool.join(member("prefill", "a"))
    assert pool.limits(FALLBACK) == FALLBACK
    await pool.close()


@pytest.mark.parametrize(("prefills", "decodes", "missing"), [
    (0, 0, "the prefill and the decode pool has no rank"), (1, 0, "the decode pool has no rank"), (0, 1, "the prefill pool has no rank"),
])
async def test_no_member_is_said_at_once(tmp_path: Path, prefills: int, decodes: int, missing: str) -> None:
    """B46: nobody gets half a pair."""
    async with running(tmp_path, prefills, decodes) as world:
        with failing(grpc.StatusCode.UNAVAILABLE) as details:
            await world.generate(max_tokens=4)
        assert missing in details[0]
        assert all(not decode.submits for decode in world.decodes) and all(not prefill.runs for prefill in world.prefills)


@pytest.mark.parametrize("change", [{"fingerprint": "other"}, {"max_model_len": 48}])
async def test_unlike_ranks_are_never_paired(tmp_path: Path, change: dict[str, object]) -> None:
    """B55, B25."""
    async with running(tmp_path, decodes=0) as world:
        await world.add("decode", **change)
        with failing(grpc.StatusCode.UNAVAILABLE) as details:
            await world.generate(max_tokens=4)
        assert "fingerprint" in details[0] and world.prefills[0].runs == []
        await world.add("decode")
        assert (await world.generate(max_tokens=4)).text == "abcd"
        assert world.decodes[0].submits == []


async def test_bad_input_reaches_no_pool(tmp_path: Path) -> None:
    """B40, B25: INVALID_ARGUMENT from the router with field, value and limit."""
    async with running(tmp_path) as world:
        for fields, word in (({"prompt": []}, "token_ids"), ({"prompt": [5] * MAX_MODEL_LEN}, f"max_model_len {MAX_MODEL_LEN}"),
                             ({"max_tokens": 0}, "max_tokens"), ({"top_p": float("nan")}, "top_p"), ({"text": ""}, "text")):
            with failing(grpc.StatusCode.INVALID_ARGUMENT) as details:
                await world.generate(**fields)
            assert word in details[0]
        assert world.prefills[0].runs == [] and world.decodes[0].submits == []
        assert (await world.generate(max_tokens=2)).text == "ab"


async def test_stream_waits_for_a_rank_that_comes(tmp_path: Path) -> None:
    """With tokens out a request outlives an empty pool; the new rank gets prompt and tokens."""
    async with running(tmp_path) as world:
        first = world.decodes[0]
        first.serve = lambda session, submit: first.decode(session, submit, stop_after=4)
        answer = Answer()
        task = asyncio.create_task(world.generate(answer, max_tokens=8))
        await until(lambda: len(answer.token_ids) == 4, "four tokens are out")
        await first.leave()
        await until(lambda: not world.usable("decode"), "the router sees it go")
        with failing(grpc.StatusCode.UNAVAILABLE):
            await world.generate(max_tokens=4)  # a new request does not wait
        second = await world.add("decode")
        assert (await task).token_ids == ids_of("abcdefgh")
        assert second.submits[0].prompt.num_output_tokens == 4


async def test_waiting_for_a_rank_ends(tmp_path: Path) -> None:
    async with running(tmp_path, member_wait_s=0.2) as world:
        first = world.decodes[0]
        first.serve = lambda session, submit: first.decode(session, submit, stop_after=4)
        answer = Answer()
        task = asyncio.create_task(world.generate(answer, max_tokens=8))
        await until(lambda: len(answer.token_ids) == 4, "four tokens are out")
        await first.leave()
        with failing(grpc.StatusCode.UNAVAILABLE) as details:
            await task
        assert "decode pool" in details[0]


async def test_lost_prefill_rank_fails_over(tmp_path: Path) -> None:
    """The front's stream ends while Run is under way: nobody waits for the call itself."""
    async with running(tmp_path, prefills=2) as world:
        for prefill in world.prefills:
            prefill.serve = lambda request, rank=prefill: asyncio.Event().wait() if not request.attempt else rank.reply(request)  # type: ignore[misc]
        task = asyncio.create_task(world.generate(max_tokens=4))
        await until(lambda: any(prefill.runs for prefill in world.prefills), "prefill is called")
        lost = next(prefill for prefill in world.prefills if prefill.runs)
        lost.updates.put_nowait(registry_pb2.MemberUpdate(member=lost.member(common_pb2.Rank(
            instance_id="reborn", role="prefill", pool_address=lost.server.address,
        ))))
        assert (await task).text == "abcd"


async def test_info_and_health_follow_the_pools(tmp_path: Path) -> None:
    async with running(tmp_path, decodes=0) as world, open_channel(world.router.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def status() -> int:
            reply = await health.Check(health_pb2.HealthCheckRequest(service="baton.v1.Generation"))
            return reply.status

        assert await status() == health_pb2.HealthCheckResponse.NOT_SERVING
        await world.add("decode")
        deadline = time.monotonic() + 5
        while await status() != health_pb2.HealthCheckResponse.SERVING:
            assert time.monotonic() < deadline
        info = await generation_pb2_grpc.GenerationStub(channel).GetInfo(generation_pb2.GetInfoRequest())
        assert (info.model, info.max_model_len, info.vocab_size) == ("fake", MAX_MODEL_LEN, VOCAB)
        assert {(pool.role, pool.num_ranks, pool.fingerprint) for pool in info.pools} == {("prefill", 1, "fp"), ("decode", 1, "fp")}


async def test_registry_wants_a_member_first(tmp_path: Path) -> None:
    async with running(tmp_path, 0, 0) as world, open_channel(world.router.address) as channel:
        call = registry_pb2_grpc.RegistryStub(channel).Join(iter([registry_pb2.MemberUpdate(load=registry_pb2.Load())]))
        with failing(grpc.StatusCode.INVALID_ARGUMENT) as details:
            async for _ in call:
                pass
        assert "member" in details[0]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "prefill-0.pool.local:65535", "[::1]:50051"])
async def test_dialable_addresses_are_taken(address: str) -> None:
    pool = Pool("r")
    pool.join(member("prefill", "a", address=address))
    assert ids(pool) == {"a"}
    await pool.close()


@pytest.mark.parametrize("second", [
    member("prefill", "b", front="other"), member("prefill", front="other"), member("decode", "b", front="f"),
])
async def test_stream_that_changes_its_front_loses_all_ranks(tmp_path: Path, second: registry_pb2.Member) -> None:
    """One stream speaks for one front: nothing of it may outlive the stream."""
    async def updates() -> AsyncIterator[registry_pb2.MemberUpdate]:
        yield registry_pb2.MemberUpdate(member=member("prefill", "a", front="f"))
        await until(lambda: world.usable("prefill") == {"a"}, "the first front joins")
        yield registry_pb2.MemberUpdate(member=second)
        await asyncio.Event().wait()

    async with running(tmp_path, 0, 0) as world, open_channel(world.router.address) as channel:
        with failing(grpc.StatusCode.INVALID_ARGUMENT) as details:
            async for _ in registry_pb2_grpc.RegistryStub(channel).Join(updates()):
                pass
        assert "front_id" in details[0]
        await until(lambda: not world.usable("prefill") | world.usable("decode"), "all ranks of the stream are gone")
