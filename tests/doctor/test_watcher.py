"""What the watcher knows of ranks that come, go, leave and come back."""

import asyncio
from collections.abc import AsyncIterator

from proto.baton.v1 import common_pb2, registry_pb2
from services.doctor.watcher import Watcher


class Front:
    """A front's stream to the watcher."""

    def __init__(self, watcher: Watcher) -> None:
        self._queue: asyncio.Queue[registry_pb2.MemberUpdate | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._join(watcher))

    async def _join(self, watcher: Watcher) -> None:
        async for _ in watcher.Join(self._updates(), None):
            pass

    async def _updates(self) -> AsyncIterator[registry_pb2.MemberUpdate]:
        while (update := await self._queue.get()) is not None:
            yield update

    async def say(self, *updates: registry_pb2.MemberUpdate) -> None:
        for update in updates:
            self._queue.put_nowait(update)
        while not self._queue.empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def end(self) -> None:
        self._queue.put_nowait(None)
        await self._task


def member(*instance_ids: str) -> registry_pb2.MemberUpdate:
    ranks = [common_pb2.Rank(instance_id=each, role="decode", pool_address="h:1", rank=rank) for rank, each in enumerate(instance_ids)]
    return registry_pb2.MemberUpdate(member=registry_pb2.Member(address="h:1", limits=registry_pb2.Limits(num_pages=10), ranks=ranks))


def load(instance_id: str, free: int, **held: int) -> registry_pb2.MemberUpdate:
    return registry_pb2.MemberUpdate(load=registry_pb2.Load(instance_id=instance_id, num_free_pages=free, **held))


async def test_conservation_needs_a_load_of_every_rank_and_nothing_held() -> None:
    watcher = Watcher()
    front = Front(watcher)
    await front.say(member("a", "b"), load("a", 10))
    assert watcher.untidy() == {"b": "has reported no load yet"}
    await front.say(load("b", 9))
    assert list(watcher.untidy()) == ["b"] and "num_free_pages: 9 " in watcher.untidy()["b"]
    await front.say(load("b", 10, num_leased_pages=1))
    assert list(watcher.untidy()) == ["b"]
    await front.say(load("b", 10))
    assert not watcher.untidy()
    await front.end()


async def test_a_leaving_front_serves_no_more_and_its_engine_that_died_is_forgotten() -> None:
    watcher = Watcher()
    front = Front(watcher)
    await front.say(member("a", "b"))
    assert set(watcher.serving("decode")) == {"h:1/0", "h:1/1"} and not watcher.serving("prefill")
    await front.say(member("a"))
    assert set(watcher.ranks) == {"a"}
    await front.say(registry_pb2.MemberUpdate(leaving=registry_pb2.Leaving()))
    assert not watcher.serving("decode") and set(watcher.ranks) == {"a"}
    await front.end()
    assert not watcher.ranks and not watcher.loads


async def test_an_old_streams_end_does_not_forget_who_joined_again() -> None:
    """After a partition the old connection may be found dead only when the front has long been back."""
    watcher = Watcher()
    old = Front(watcher)
    await old.say(member("a"), load("a", 10))
    new = Front(watcher)
    await new.say(member("a"), load("a", 10))
    await old.end()
    assert set(watcher.serving("decode")) == {"h:1/0"} and not watcher.untidy()
    await new.end()
    assert not watcher.ranks
