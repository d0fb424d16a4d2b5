"""Fronts that dial again and ranks that go on under a new id keep what runs there."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from proto.baton.v1 import common_pb2, decode_pb2, registry_pb2, registry_pb2_grpc
from services.router.pool import Pool
from services.router.rank_state import RankState
from services.router.registry import RegistryServicer
from services.runtime.serve import Server
from services.runtime.telemetry import INCIDENTS
from tests.clear import CLEAR
from tests.router.byte_model import ids_of
from tests.router.fakes import DecodeSession, FakeDecode, FakeRank, until
from tests.router.rig import Answer, World, running

LONG_S = 60.0  # longer than any test


def state_of(world: World, rank: FakeRank) -> RankState:
    return world.router.pool._ranks[rank.instance_id]


def pausing(world: World, decode: FakeDecode) -> asyncio.Event:
    """`decode` stops after four tokens until the event is set."""
    go_on = asyncio.Event()

    async def serve(session: DecodeSession, submit: decode_pb2.Submit) -> None:
        await decode.decode(session, submit, stop_after=4)
        await go_on.wait()
        session.step(submit, 4, [world.token(4), world.token(5)])
        session.finished(submit, 6, common_pb2.LENGTH)

    decode.serve = serve
    return go_on


async def test_a_renewed_rank_keeps_its_session_counts_and_cache(tmp_path: Path) -> None:
    async with running(tmp_path, max_model_len=200) as world:
        (decode,) = world.decodes
        go_on = pausing(world, decode)
        seen = Answer()
        answer = asyncio.create_task(world.generate(seen, max_tokens=6, prompt=[1] * 130))
        state = state_of(world, decode)
        await until(lambda: len(seen.token_ids) == 4 and state.num_own_requests == 1, "the request runs there")
        former, session = decode.instance_id, state.session
        decode.instance_id = "decode-0-renewed"
        rank = decode.rank
        rank.former_instance_id = former
        decode.updates.put_nowait(registry_pb2.MemberUpdate(member=decode.member(rank)))
        await until(lambda: decode.instance_id in world.usable("decode"), "the rank is there under its new id")
        assert state_of(world, decode) is state and state.session is session and state.instance_id == decode.instance_id
        assert state.num_own_requests == 1 and former not in world.router.pool._ranks
        index = world.router.pool.index
        assert index.num_pages(decode.instance_id, "approximate") == 2 and index.num_pages(former, "approximate") == 0
        decode.updates.put_nowait(registry_pb2.MemberUpdate(member=decode.member(rank)))  # a front says it again with every change
        go_on.set()
        assert (await answer).token_ids == ids_of("abcdef") and len(decode.sessions) == 1
        await world.generate(max_tokens=1)
        (again,) = [await world.generate(max_tokens=6)]
        assert again.token_ids == ids_of("abcdef")
        assert [run.readers[0].instance_id for run in world.prefills[0].runs if run.readers] == [former, decode.instance_id]


async def test_an_unknown_former_id_is_a_new_rank(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        (decode,) = world.decodes
        state = state_of(world, decode)
        decode.instance_id = "decode-0-again"
        rank = decode.rank
        rank.former_instance_id = "never-seen"
        decode.updates.put_nowait(registry_pb2.MemberUpdate(member=decode.member(rank)))
        await until(lambda: decode.instance_id in world.usable("decode"), "the rank is there")
        assert state_of(world, decode) is not state and len(decode.sessions) == 2


async def test_a_front_that_dials_again_keeps_its_ranks(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        (decode,) = world.decodes
        go_on = pausing(world, decode)
        seen = Answer()
        answer = asyncio.create_task(world.generate(seen, max_tokens=6))
        await until(lambda: len(seen.token_ids) == 4, "the request runs there")
        state = state_of(world, decode)
        assert decode._join is not None
        decode._join.cancel()
        await until(lambda: not world.usable("decode"), "nothing new goes there while its front is away")
        assert state.num_own_requests == 1
        await decode.join()
        assert state_of(world, decode) is state
        go_on.set()
        assert (await answer).token_ids == ids_of("abcdef") and len(decode.sessions) == 1 and len(decode.submits) == 1


class Front:
    """A front's Join stream, spoken by hand."""

    def __init__(self, address: str) -> None:
        self.channel = CLEAR.open_channel(address)
        self.updates: asyncio.Queue[registry_pb2.MemberUpdate] = asyncio.Queue()
        self.call: Any = registry_pb2_grpc.RegistryStub(self.channel).Join(self._updates())

    async def _updates(self) -> AsyncIterator[registry_pb2.MemberUpdate]:
        while True:
            yield await self.updates.get()

    async def joined(self, member: registry_pb2.Member) -> None:
        self.updates.put_nowait(registry_pb2.MemberUpdate(member=member))
        assert (await self.call.read()).HasField("welcome")


def member(*instance_ids: str) -> registry_pb2.Member:
    front = FakeRank(None, "prefill", 0)  # type: ignore[arg-type]
    ranks = [common_pb2.Rank(instance_id=name, role="prefill", pool_address="127.0.0.1:9", rank=i) for i, name in enumerate(instance_ids)]
    return front.member(*ranks)


@pytest.mark.parametrize("resume_s", [0.01, LONG_S], ids=["in vain", "in time"])
async def test_ranks_wait_for_their_front_as_long_as_sessions_do(resume_s: float) -> None:
    pool, server = Pool("router", CLEAR), Server("127.0.0.1:0", [], CLEAR)
    server.add(registry_pb2_grpc.add_RegistryServicer_to_server, RegistryServicer(pool, resume_s))
    await server.start()
    first = Front(server.address)
    await first.joined(member("p1", "p2"))
    kept = pool._ranks["p2"]
    first.call.cancel()
    await until(lambda: not pool.usable("prefill"), "the front is away")
    if resume_s < 1:
        await until(lambda: not pool._ranks, "it is given up")
    second = Front(server.address)
    await second.joined(member("p2", "p3"))
    assert {state.instance_id for state in pool.usable("prefill")} == {"p2", "p3"}
    assert (pool._ranks["p2"] is kept) == (resume_s > 1)
    await pool.close()
    await server.stop(0)


async def test_a_second_stream_of_a_front_replaces_the_first() -> None:
    """The first one's break has not been noticed yet; what still comes out of it is old."""
    pool, server = Pool("router", CLEAR), Server("127.0.0.1:0", [], CLEAR)
    server.add(registry_pb2_grpc.add_RegistryServicer_to_server, RegistryServicer(pool, 0.0))
    await server.start()
    stale, replaced = (INCIDENTS.labels(*labels) for labels in (
        ("load report ignored", "STALE_INSTANCE"), ("registry message of a stream that was replaced", "REPLACED"),
    ))
    num_stale, num_replaced = stale._value.get(), replaced._value.get()
    first, second = Front(server.address), Front(server.address)
    await first.joined(member("p1"))
    kept = pool._ranks["p1"]
    await second.joined(member("p1", "p2"))
    first.updates.put_nowait(registry_pb2.MemberUpdate(member=member("p0")))
    await until(lambda: replaced._value.get() == num_replaced + 1, "the old stream's word is counted")
    first.call.cancel()
    second.updates.put_nowait(registry_pb2.MemberUpdate(load=registry_pb2.Load(instance_id="p0", num_queued_tokens=9)))
    await until(lambda: stale._value.get() == num_stale + 1, "a load of nobody is counted")
    assert {state.instance_id for state in pool.usable("prefill")} == {"p1", "p2"} and pool._ranks["p1"] is kept
    await pool.close()
    await server.stop(0)
