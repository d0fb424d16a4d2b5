"""KV events over real sockets into the index: in step, whatever is lost, and only guessing when they cannot be followed."""

import asyncio
import random
import time
from pathlib import Path

import pytest

from proto.baton.v1 import common_pb2, registry_pb2
from services.kv import event_log
from services.kv.event_messages import AllBlocksCleared, sequence_frame
from services.kv.events import KvEventPublisher
from services.kv.hash import page_digests
from services.kv.kv_pool import KvPool
from services.kv.memory import KvMemory
from services.kv.pages import Holder, HolderKind
from services.router import kv_events
from services.router.kv_events import KvEvents, Source
from services.router.metrics import KV_EVENT_GAPS
from services.router.prefix_index import PrefixIndex
from services.runtime.config import SecuritySection
from services.runtime.security import Security
from services.runtime.serve import cancel
from services.runtime.telemetry import INCIDENTS, reason_name
from tests.kv.test_event_log import change
from tests.kv.test_prefix import TINY, cached, digests_of
from tests.router.fakes import until
from tests.router.kv_rig import MAX_PAGES, FakePublisher, following, page, removed, stored
from tests.router.rig import running


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "PAUSE_S", 0.02)
    monkeypatch.setattr(kv_events, "QUIET_S", 60.0)


def num_gaps() -> float:
    return KV_EVENT_GAPS._value.get()


def num_out_of_step(reason: int) -> float:
    return INCIDENTS.labels("KV events out of step", reason_name(reason))._value.get()


async def test_a_reader_that_joins_late_has_all_of_it() -> None:
    async with following() as world:
        await world.publisher.publish(stored(page(1), page(2)))
        await world.publisher.publish(removed(page(1)), stored(page(3)))
        await until(lambda: world.is_exact, "it is in step")
        await world.publisher.publish(stored(page(4)))
        await world.publisher.publish(AllBlocksCleared(), stored(page(5), page(6)))
        await until(lambda: world.is_right, "the index holds what the cache holds")
        assert world.index.num_hit_tokens("a", [page(5), page(6)], 0.0) == 128
        assert world.index.num_hit_tokens("a", [page(4)], 0.0) == 0


async def test_a_lost_batch_is_a_gap_that_is_filled() -> None:
    gaps = num_gaps()
    async with following() as world:
        await world.begin()
        await world.publisher.publish(stored(page(2)), is_lost=True)
        await world.publisher.publish(removed(page(1)), is_lost=True)
        await world.publisher.publish(stored(page(3)))
        await until(lambda: world.is_right and num_gaps() == gaps + 1, "the gap is filled and counted")
        assert world.publisher.starts[-1] == world.publisher.next - 3, "asked for what was missing, and no more"


async def test_a_lost_last_batch_is_found_in_the_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "QUIET_S", 0.05)
    async with following() as world:
        await world.begin()
        await world.publisher.publish(stored(page(9)), is_lost=True)
        assert not world.is_right
        await until(lambda: world.is_right, "it asked by itself")


async def test_too_old_a_gap_is_answered_with_the_whole_cache() -> None:
    async with following() as world:
        await world.begin()
        await world.publisher.publish(stored(*(page(2, number) for number in range(200))), is_lost=True)
        await world.publisher.publish(removed(page(1)), is_lost=True)
        world.publisher.forget()
        await world.publisher.publish(stored(page(3)))
        world.publisher.forget()
        await until(lambda: world.is_right, "the cache was told anew")


@pytest.mark.parametrize("frames", [
    (sequence_frame(7), b"\x93garbage"), (sequence_frame(7), b""), (b"short", b"\x90"), (b"\xff" * 8, b"\x90"), (sequence_frame(7),),
    (sequence_frame(7), b"\x90", b"more"), (),
])
async def test_nonsense_is_counted_and_survived(frames: tuple[bytes, ...]) -> None:
    """Until the rank can be followed again it is guessed, as one that publishes nothing."""
    counted = num_out_of_step(common_pb2.INVALID)
    async with following() as world:
        await world.begin()
        world.publisher.is_silent = True
        while world.publisher.next < 7:
            await world.publisher.publish(stored(page(2, world.publisher.next)))
        await world.publisher.send(*frames)
        await until(lambda: not world.is_exact, "it is out of step")
        world.index.keep("a", [page(8)])
        assert world.index.num_hit_tokens("a", [page(1)], 0.0) == world.index.num_hit_tokens("a", [page(8)], 0.0) == 64
        assert num_out_of_step(common_pb2.INVALID) == counted + 1
        world.publisher.is_silent = False
        await until(lambda: world.is_right, "it is in step again, and nothing guessed is left")


async def test_a_log_with_nonsense_in_it_is_guessed_until_it_is_forgotten() -> None:
    async with following() as world:
        await world.begin()
        await world.publisher.publish(payload=b"\xc1")
        await until(lambda: not world.is_exact and len(world.publisher.starts) >= 4, "it tries again and again")
        assert not world.is_exact
        world.publisher.forget()
        await until(lambda: world.is_right, "it got the whole cache")


async def test_a_silent_rank_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "ANSWER_S", 0.05)
    counted = num_out_of_step(common_pb2.PEER_GONE)
    async with following() as world:
        world.publisher.is_silent = True
        await until(lambda: num_out_of_step(common_pb2.PEER_GONE) >= counted + 2, "it does not answer")
        world.index.keep("a", [page(8)])
        assert not world.is_exact and world.index.num_hit_tokens("a", [page(8)], 0.0) == 64
        monkeypatch.setattr(kv_events, "ANSWER_S", 10.0)
        world.publisher.is_silent = False
        await world.publisher.publish(stored(page(1)))
        await until(lambda: world.is_right, "it answers")


async def test_another_engine_at_the_same_ports_is_begun_anew() -> None:
    counted = num_out_of_step(common_pb2.STALE_INSTANCE)
    async with following() as world:
        await world.begin()
        world.publisher.restart()
        await world.publisher.publish(stored(page(7)))
        await until(lambda: world.is_right and world.publisher.next == world.follower._next, "only the new engine's pages are believed")
        assert num_out_of_step(common_pb2.STALE_INSTANCE) == counted + 1


async def test_another_engine_that_is_quiet_says_so_in_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not come as far as the one before it: nothing of that one is believed any more."""
    monkeypatch.setattr(kv_events, "QUIET_S", 0.05)
    async with following() as world:
        await world.begin()
        await world.publisher.publish(stored(page(2)))
        await until(lambda: world.is_right, "it took that")
        world.publisher.restart()
        await world.publisher.publish(stored(page(7)), is_lost=True)
        await until(lambda: world.is_right and world.follower._next == 1, "only the new engine's pages are believed")


async def test_an_engine_that_published_nothing_yet_voids_what_was_believed() -> None:
    async with following() as world:
        await world.begin()
        await world.publisher.send(sequence_frame(0), b"")
        world.publisher.restart()
        await until(lambda: world.is_right, "nothing is believed")


async def test_more_pages_than_the_rank_has_cannot_be_true() -> None:
    counted = num_out_of_step(common_pb2.TOO_LARGE)
    async with following() as world:
        await world.publisher.publish(stored(*(page(number % 256, number // 256) for number in range(MAX_PAGES + 1))))
        await until(lambda: num_out_of_step(common_pb2.TOO_LARGE) >= counted + 2, "it is refused")
        await world.publisher.publish(AllBlocksCleared())
        world.publisher.forget()
        await until(lambda: world.is_right, "it is in step")


async def test_a_renewed_rank_goes_on_under_its_new_id() -> None:
    async with following() as world:
        await world.begin()
        num_replays = len(world.publisher.starts)
        world.index.rename("a", "b")
        world.events.rename("a", "b")
        world.events.follow("b", world.publisher.source)  # as the front says with every change
        await world.publisher.publish(stored(page(5)))
        await until(lambda: world.is_right, "it follows")
        assert world.index.is_exact("b") and len(world.publisher.starts) == num_replays


async def test_a_rank_that_publishes_no_longer_is_guessed() -> None:
    async with following() as world:
        await world.begin()
        world.events.follow("a", None)
        assert world.index.num_hit_tokens("a", [page(1)], 0.0) == 0
        await until(lambda: not world.index.is_exact("a"), "it is guessed")
        world.events.follow("a", world.publisher.source)
        await until(lambda: world.is_right, "it publishes again")


async def test_no_socket_is_opened_in_the_clear_beyond_loopback() -> None:
    what = INCIDENTS.labels("KV events that may not be read", "")
    counted = what._value.get()
    async with following() as world:
        world.index.add("far", MAX_PAGES)
        world.events.follow("far", Source("tcp://192.0.2.1:5000", "tcp://192.0.2.1:5001", MAX_PAGES))
        await until(lambda: what._value.get() == counted + 1, "it is refused")
        world.index.keep("far", [page(8)])
        assert world.index.num_hit_tokens("far", [page(8)], 0.0) == 64
        world.events.forget("far")
        world.index.drop("far")


@pytest.mark.parametrize("seed", range(2))
async def test_a_real_ranks_cache_is_followed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine does to its cache, through its own publisher, which forgets all but its newest batches."""
    monkeypatch.setattr(event_log, "KEPT_BATCHES", 5)
    draw, running, truth = random.Random(seed), list[Holder](), {}
    publisher = KvEventPublisher("127.0.0.1", "kv@here@model", 0, Security.of(SecuritySection()))
    kv, index = KvPool(KvMemory(TINY, 16), publisher.log), PrefixIndex()
    events = KvEvents(index, Security.of(SecuritySection()))
    index.add("a", 16)
    turning = asyncio.create_task(turn(publisher))
    for step in range(300):
        if step == 100:
            ports = f"tcp://127.0.0.1:{publisher.port}", f"tcp://127.0.0.1:{publisher.replay_port}"
            events.follow("a", Source(*ports, 16))
            await until(lambda: index.is_exact("a"), "it is in step")
        change(kv, draw, running, truth, step)
        if draw.random() < 0.2:
            await asyncio.sleep(0.001)  # the publisher's turn comes at other moments each time
    monkeypatch.setattr(kv_events, "QUIET_S", 0.05)
    cached(kv, 1, 2, 3, 4)

    def is_right() -> bool:
        return index.is_exact("a") and index._holders["a"].events == set(kv.cache.digests)

    await until(is_right, "the index holds what the cache holds")
    chain = digests_of(1, 2, 3, 4)
    assert index.num_hit_tokens("a", chain, 0.0) == 64 * len(kv.match(chain, Holder(HolderKind.REQUEST, "asks"))) > 0
    await events.close()
    await cancel(turning)
    publisher.close()


async def turn(publisher: KvEventPublisher) -> None:
    """As the engine's thread does."""
    while True:
        publisher.turn()
        await asyncio.sleep(0.001)


async def test_requests_go_where_events_say_their_prefix_is(tmp_path: Path) -> None:
    """Though this router never sent anything there; once the rank says that it has dropped the pages, they count for nothing."""
    prompt = [3] * 200
    chain = page_digests(prompt)
    publisher = FakePublisher()
    async with running(tmp_path, prefills=4, max_model_len=512) as world:
        rank, index = world.prefills[2], world.router.pool.index
        await publisher.publish(stored(*chain))
        member = rank.member()
        member.kv_events.append(publisher.member_source(rank.instance_id))
        rank.updates.put_nowait(registry_pb2.MemberUpdate(member=member))
        await until(lambda: index.is_exact(rank.instance_id), "the router follows the rank")
        for _ in range(4):
            answer = await world.generate(prompt=prompt, max_tokens=3)
            assert answer.finished is not None and "prefix 192/200" in answer.finished.timeline.routing
        assert len(rank.runs) == 4
        await until(lambda: publisher.num_readers == 1, "it has subscribed")
        await publisher.publish(removed(chain[0]))
        await until(lambda: chain[0] not in index._holders[rank.instance_id].events, "it hears of that")
        assert index.num_hit_tokens(rank.instance_id, chain, time.monotonic() + 10.0) == 0
        await rank.leave()
        await until(lambda: not index.is_exact(rank.instance_id), "the rank is gone")
        await until(lambda: publisher.num_readers == 0, "and so is its reader")
    await publisher.close()


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_is_lost_the_index_ends_up_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "QUIET_S", 0.05)
    rng = random.Random(seed)
    async with following() as world:
        for number in range(300):
            held = list(world.publisher.held)
            kind = rng.random()
            if kind < 0.02:
                event = AllBlocksCleared()
            elif kind < 0.4 and held:
                event = removed(*rng.sample(held, min(len(held), rng.randrange(1, 5))))
            else:
                event = stored(*(page(rng.randrange(100)) for _ in range(rng.randrange(1, 6))))
            await world.publisher.publish(event, is_lost=rng.random() < 0.2)
            if rng.random() < 0.05:
                world.publisher.forget()
            if number % 10 == 0:
                await asyncio.sleep(0.005)  # not to synchronise: for the reader to be somewhere else each time
        await until(lambda: world.is_right, "it is in step")
