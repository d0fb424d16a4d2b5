"""Requests that wait at the router: who is let in when, and everything that ends a wait. Real dispatch, scripted ranks."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from proto.baton.v1 import common_pb2, decode_pb2, prefill_pb2, registry_pb2
from services.router.gate import room_of
from services.router.metrics import QUEUED, RUNNING
from services.router.pool import Model
from services.runtime.serve import cancel
from tests.router.byte_model import BOS, ids_of
from tests.router.fakes import DecodeSession, FakeDecode, until
from tests.router.rig import Answer, World, failing, running

PLACES = 3  # of a decode rank with max_running 2: one is the lead


class Stage:
    """One decode rank whose requests end only when they are told to, in the order of `submits`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.decode: FakeDecode = world.decodes[0]
        self.decode.serve = self._serve
        self._may_end: dict[str, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[Answer]] = []

    async def _serve(self, session: DecodeSession, submit: decode_pb2.Submit) -> None:
        await self._event(submit.key.request_id).wait()
        await self.decode.decode(session, submit)

    def _event(self, request_id: str) -> asyncio.Event:
        return self._may_end.setdefault(request_id, asyncio.Event())

    async def send(self, tenant: str, number: int = 1, **fields: Any) -> list[asyncio.Task[Answer]]:
        """`number` requests of `tenant`, one after the other, each once the router has the one before."""
        tasks: list[asyncio.Task[Answer]] = []
        for _ in range(number):
            before = self.num_known
            task = asyncio.create_task(self.world.generate(**{"max_tokens": 3, "tenant": tenant, **fields}))
            self._tasks.append(task)
            tasks.append(task)
            await until(lambda before=before, task=task: self.num_known > before or task.done(), "the router has it")
        return tasks

    @property
    def num_known(self) -> int:
        dispatcher = self.world.router.dispatcher
        return dispatcher.num_requests + dispatcher.num_queued

    @property
    def num_queued(self) -> int:
        return self.world.router.dispatcher.num_queued

    @property
    def order(self) -> str:
        """Tenants in the order in which they reached the rank."""
        return "".join(submit.prompt.salt.decode() for submit in self.decode.submits)

    async def end_one(self) -> None:
        """The one that has been at the rank for longest."""
        number = self.world.router.dispatcher.num_requests + self.num_queued
        self._event(next(s.key.request_id for s in self.decode.submits if not self._event(s.key.request_id).is_set())).set()
        await until(lambda: self.num_known < number, "it is over")

    async def end_all(self) -> None:
        while True:
            def is_held() -> bool:
                return any(not self._event(submit.key.request_id).is_set() for submit in self.decode.submits)

            await until(lambda: is_held() or not self.num_known, "one more is at the rank, or all are over")
            if not self.num_known:
                return
            await self.end_one()


@contextlib.asynccontextmanager
async def stage(folder: Path, **router_keys: Any) -> AsyncIterator[Stage]:
    async with running(folder, decodes=0, **router_keys) as world:
        await world.add("decode", max_running=2)
        yield Stage(world)


def hint_ms(error: BaseException | None) -> int:
    assert isinstance(error, grpc.aio.AioRpcError) and error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, error
    return int(dict(error.trailing_metadata() or ())["retry-after-ms"])


async def test_beyond_the_pools_room_requests_wait_and_come_in_fair_order(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        tasks = await on.send("a", 8)
        assert on.order == "a" * PLACES and on.num_queued == 5, "the rest waits at the router"
        tasks += await on.send("b", 2)
        tasks += await on.send("z", priority=1)
        await on.end_all()
        assert on.order == "aaaababaaaz"
        answers = await asyncio.gather(*tasks)
        assert all(answer.text == "abc" for answer in answers)
        queue_us = [answer.finished.timeline.queue_us for answer in answers if answer.finished is not None]
        assert min(queue_us[PLACES:]) > max(queue_us[:PLACES]), "the wait shows in the timeline"


async def test_no_wait_without_overload(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await asyncio.gather(*(world.generate(max_tokens=4, tenant=str(i % 3)) for i in range(30)))
        assert world.router.dispatcher.num_queued == 0 and len(world.decodes[0].submits) == 30


async def test_a_full_queue_refuses_with_a_hint_or_makes_room(tmp_path: Path) -> None:
    async with stage(tmp_path, max_queued=4) as on:
        flood = await on.send("a", PLACES + 4)
        refused, = await on.send("a")
        await asyncio.wait([refused])
        assert 100 <= hint_ms(refused.exception()) <= 60_000
        assert "max_queued 4" in str(refused.exception()) and "4 wait" in str(refused.exception())
        modest = asyncio.create_task(on.world.generate(max_tokens=3, tenant="b", n=2))
        await asyncio.wait(flood[-2:])
        assert [hint_ms(task.exception()) for task in flood[-2:]] and on.num_queued == 4, "a's newest went"
        await on.end_all()
        assert on.order.count("b") == 2 and (await modest).choices[1].text == "bcd"
        assert [(await task).text for task in flood[:-2]] == ["abc"] * 5


async def test_hint_follows_the_pace_of_the_queue(tmp_path: Path) -> None:
    async with stage(tmp_path, max_queued=4) as on:
        tasks = await on.send("a", PLACES + 4)
        for _ in range(3):
            await on.end_one()
            tasks += await on.send("a")
        refused, = await on.send("a")
        await asyncio.wait([refused])
        assert hint_ms(refused.exception()) != 1000, "measured by now"
        await on.end_all()
        await asyncio.gather(*tasks)


async def test_deadline_passes_while_waiting(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        tasks = await on.send("a", PLACES)
        with failing(grpc.StatusCode.DEADLINE_EXCEEDED):
            await on.world.generate(timeout_s=0.2, max_tokens=3)
        await until(lambda: on.num_queued == 0, "it has left the queue")
        await on.end_all()
        await asyncio.gather(*tasks)
        assert len(on.decode.submits) == len(on.world.prefills[0].runs) == PLACES, "no rank has heard of it"


async def test_waits_no_longer_than_the_bound(tmp_path: Path) -> None:
    async with stage(tmp_path, max_queue_s=0.1) as on:
        tasks = await on.send("a", PLACES)
        with failing(grpc.StatusCode.RESOURCE_EXHAUSTED) as details:
            await on.world.generate(max_tokens=3)
        assert "max_queue_s is 0.1" in details[0] and "try again in" in details[0]
        await on.end_all()
        await asyncio.gather(*tasks)


async def test_a_client_that_leaves_is_out_of_the_queue_at_once(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        tasks = await on.send("a", PLACES)
        gone, stays = await on.send("a", 2)
        await cancel(gone)
        await until(lambda: on.num_queued == 1, "it has left the queue")
        await on.end_all()
        assert (await stays).text == "abc" and len(on.decode.submits) == PLACES + 1
        await asyncio.gather(*tasks)


async def test_more_choices_than_places_do_not_wait_for_ever(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        tasks = await on.send("a", PLACES)
        tasks += await on.send("b", n=5)
        assert on.num_queued == 5
        await on.end_one()
        await until(lambda: len(on.decode.submits) == PLACES + 5, "one free place lets all of them in")
        await on.end_all()
        assert len((await tasks[-1]).choices) == 5


async def test_what_runs_counts_against_max_requests(tmp_path: Path) -> None:
    async with stage(tmp_path, max_requests=2) as on:
        tasks = await on.send("a", 2)
        tasks += await on.send("b", n=2)
        tasks += await on.send("c")
        await on.end_one()
        assert on.num_queued == 3, "two choices need both places; nobody passes them"
        await on.end_one()
        await until(lambda: on.order == "aabb", "they are in")
        await on.end_all()
        await asyncio.gather(*tasks)


async def test_first_token_that_is_the_last_needs_no_decode_room(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        tasks = await on.send("a", PLACES + 2)
        assert (await on.world.generate(max_tokens=1, tenant="b")).text == "a"
        assert on.num_queued == 2
        await on.end_all()
        await asyncio.gather(*tasks)


async def test_a_long_prefill_queue_holds_requests_back(tmp_path: Path) -> None:
    async with running(tmp_path, prefill_queue_tokens=10) as world:
        prefill, may_go = world.prefills[0], asyncio.Event()

        async def slow(request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillReply:
            await may_go.wait()
            return await prefill.reply(request)

        prefill.serve = slow
        tasks = [asyncio.create_task(world.generate(prompt=[BOS, *ids_of(f"hello{i}")], max_tokens=2)) for i in range(6)]
        await until(lambda: world.router.dispatcher.num_queued == 4 and len(prefill.runs) == 2, "7 + 7 tokens are beyond 10")
        may_go.set()
        assert [answer.text for answer in await asyncio.gather(*tasks)] == ["ab"] * 6


async def test_load_reports_say_what_others_send(tmp_path: Path) -> None:
    """Another replica of the router fills the rank."""
    async with stage(tmp_path) as on:
        def report(num_running: int, num_claims: int) -> registry_pb2.MemberUpdate:
            load = registry_pb2.Load(instance_id=on.decode.instance_id, num_running=num_running, num_claims=num_claims)
            return registry_pb2.MemberUpdate(load=load)

        on.decode.updates.put_nowait(report(2, 1))
        state, = on.world.router.pool.usable("decode")
        await until(lambda: state.num_requests == 3, "the router knows")
        tasks = await on.send("a", 2)
        assert on.num_queued == 2
        on.decode.updates.put_nowait(report(2, 0))
        await until(lambda: on.order == "a" and on.num_queued == 1, "there is one place")
        on.decode.updates.put_nowait(report(0, 0))
        await until(lambda: on.num_queued == 0, "and now for all")
        await on.end_all()
        await asyncio.gather(*tasks)


async def test_a_rank_that_says_nothing_new_is_not_full_for_ever(tmp_path: Path) -> None:
    """It reports what has changed: requests that come and go between two reports leave it as it was."""
    async with running(tmp_path, decodes=0) as world:
        await world.add("decode", max_running=1)
        for _ in range(8):
            assert (await world.generate(max_tokens=3)).text == "abc"


async def test_who_was_let_in_is_replayed_past_the_queue(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        tasks = await on.send("a", PLACES + 2)
        first = on.decode.submits[0]
        on.decode.sessions[-1].failed(first, common_pb2.PREEMPTED)
        await until(lambda: len(on.decode.submits) == PLACES + 1, "it is back at a rank")
        assert on.decode.submits[-1].key.request_id == first.key.request_id and on.num_queued == 2
        on._event(first.key.request_id).set()
        await on.end_all()
        assert [answer.text for answer in await asyncio.gather(*tasks)] == ["abc"] * 5


async def test_no_rank_left_ends_the_wait(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        running_ones = await on.send("a", PLACES)
        waiting = await on.send("a", 3)
        on.world.router.pool.lose(on.world.prefills[0].front_id)
        await asyncio.wait(waiting)
        for task in waiting:
            error = task.exception()
            assert isinstance(error, grpc.aio.AioRpcError) and error.code() == grpc.StatusCode.UNAVAILABLE, error
            assert "prefill pool has no rank" in (error.details() or "")
        await cancel(*running_ones)


async def test_a_router_that_stops_refuses_who_waits_and_ends_what_runs(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        streams = await on.send("a", PLACES)
        waiting = await on.send("b", 4)
        stopping = asyncio.create_task(on.world.router.stop(30.0))
        await asyncio.wait(waiting)
        for task in waiting:
            error = task.exception()
            assert isinstance(error, grpc.aio.AioRpcError) and error.code() == grpc.StatusCode.UNAVAILABLE, error
            assert "another replica" in (error.details() or "")
        assert not any(task.done() for task in (*streams, stopping))
        await on.end_all()
        assert [answer.text for answer in await asyncio.gather(*streams)] == ["abc"] * PLACES
        await stopping
        assert on.order == "a" * PLACES


@pytest.mark.parametrize("seed", range(3))
async def test_any_mix_of_ends_leaves_nothing_behind(tmp_path: Path, seed: int) -> None:
    """Clients leave, run out of time, are refused, displaced or served, ranks are preempting: nobody hangs, nothing is left."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    queued, running_ones = QUEUED._value.get(), RUNNING._value.get()
    async with running(tmp_path, decodes=0, max_queued=12, max_queue_s=0.3, max_requests=9) as world:
        decode = await world.add("decode", max_running=4)
        decode.step_s = 0.002

        async def moody(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            await asyncio.sleep(draw.uniform(0.0, 0.03))
            if submit.num_preemptions < 2 and draw.random() < 0.2:
                session.failed(submit, common_pb2.PREEMPTED)
            else:
                await decode.decode(session, submit)

        decode.serve = moody

        async def client() -> str:
            await asyncio.sleep(draw.uniform(0.0, 0.6))
            fields = {"tenant": draw.choice("aaab"), "priority": draw.choice((0, 0, 3)), "n": draw.choice((1, 1, 4))}
            timeout_s = draw.choice((None, None, 0.05, 0.2))
            task = asyncio.create_task(world.generate(timeout_s=timeout_s, max_tokens=draw.choice((1, 5, 9)), **fields))
            if draw.random() < 0.2:
                await asyncio.wait([task], timeout=draw.uniform(0.0, 0.1))
                await cancel(task)
                return "left"
            try:
                assert all(choice.finished is not None for choice in (await task).choices)
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return "ok"

        async with asyncio.timeout(60.0):
            outcomes = await asyncio.gather(*(client() for _ in range(120)))
        counts = {outcome: outcomes.count(outcome) for outcome in outcomes}
        assert set(counts) <= {"ok", "left", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"} and counts["ok"] > 10, counts
        await until(lambda: world.router.dispatcher.num_requests + world.router.dispatcher.num_queued == 0, "nothing runs or waits")
        await until(lambda: (QUEUED._value.get(), RUNNING._value.get()) == (queued, running_ones), "the gauges are back")
        assert (await world.generate(max_tokens=3)).text == "abc"


class Rank:
    """What room_of() looks at."""

    def __init__(
        self, *, tokens: int = 0, requests: int = 0, max_running: int = 16, cool_until: float = 0.0, num_routers: int = 1
    ) -> None:
        self.num_tokens, self.num_requests, self.max_running, self.num_routers = tokens, requests, max_running, num_routers
        self.num_own_tokens, self.num_own_requests = tokens, requests
        self.cool_down = self
        self.until = cool_until


def room(*models: tuple[list[Rank], list[Rank]]) -> tuple[bool, bool]:
    found: Any = [Model(("fp", None), prefills, decodes) for prefills, decodes in models]
    return tuple(room_of(found, 1000, 0.125, now=10.0))


def test_room_is_what_policy_would_use() -> None:
    free, full = Rank(), Rank(requests=18, tokens=1000)
    assert room(([full, free], [full, free])) == (True, True)
    assert room(([free], [full])) == (False, True) and room(([full], [free])) == (False, False)
    assert room(([free], [Rank(requests=17)])) == (True, True), "16 and an eighth of it"
    assert room(([free], [Rank(requests=1, max_running=1)])) == (True, True), "or one, if that is more"
    assert room(([free], [Rank(requests=2, max_running=1)])) == (False, True)


def test_room_is_within_one_model() -> None:
    free, full = Rank(), Rank(requests=18, tokens=1000)
    assert room(([free], [full]), ([full], [free])) == (False, True)
    assert room(([free], [full]), ([free], [free])) == (True, True)


def test_a_rank_that_cools_down_has_room_only_when_it_is_all_there_is() -> None:
    cooling, full = Rank(cool_until=11.0), Rank(requests=18, tokens=1000)
    assert room(([cooling, full], [cooling])) == (False, False) and room(([Rank()], [cooling, full])) == (False, True)
    assert room(([cooling], [cooling])) == (True, True)


def test_where_there_is_no_rank_nobody_waits() -> None:
    assert room() == (True, True) and room(([], [Rank()])) == (True, True) and room(([Rank()], [])) == (True, True)
    assert room(([Rank(tokens=1000)], [])) == (True, False), "prefill alone can still be full"


@pytest.mark.parametrize("num_routers", [2, 3])
def test_replicas_share_what_is_full(num_routers: int) -> None:
    """One had all places before the others came. Each fills what its own requests leave before the others hear of it."""
    draw = random.Random(num_routers)
    own, limit, lead = [0] * num_routers, 64 + 8, 8
    own[0] = limit

    def fill(router: int) -> None:
        while True:
            decode = Rank(requests=sum(own), max_running=64, num_routers=num_routers)
            decode.num_own_requests = own[router]
            if room(([Rank()], [decode])) != (True, True):
                return
            own[router] += 1

    for _ in range(2000):
        leaves = draw.choices(range(num_routers), own)[0]
        own[leaves] -= 1
        fill(leaves)  # it hears of it first
        for router in draw.sample(range(num_routers), num_routers):
            fill(router)
        assert limit <= sum(own) <= limit + lead
    assert min(own) >= limit // num_routers, own


def test_a_replica_that_comes_late_gets_its_part_of_prefill() -> None:
    others = Rank(tokens=1000, num_routers=2)
    assert room(([others], [])) == (True, False)
    others.num_own_tokens = 499
    assert room(([others], [])) == (True, True)
    others.num_tokens = 2000
    assert room(([others], [])) == (True, False), "within bounds"
