"""A rank that publishes KV events over real sockets and does as a test says: loses batches, forgets old ones, falls silent."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import zmq
import zmq.asyncio

from proto.baton.v1 import registry_pb2
from services.kv.event_messages import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventBatch,
    sequence_frame,
    sequence_of,
)
from services.kv.layout import PAGE_SIZE
from services.router.kv_events import Follower, KvEvents, Source
from services.router.prefix_index import PrefixIndex
from services.runtime.config import SecuritySection
from services.runtime.security import Security
from services.runtime.serve import cancel
from tests.router.fakes import until

MAX_PAGES = 1000
Event = BlockStored | BlockRemoved | AllBlocksCleared


def stored(*pages: bytes) -> BlockStored:
    return BlockStored([*pages], None, [7] * PAGE_SIZE * len(pages), PAGE_SIZE, None, "GPU", None)


def removed(*pages: bytes) -> BlockRemoved:
    return BlockRemoved([*pages], "GPU")


def page(*numbers: int) -> bytes:
    return bytes(numbers).ljust(16, b"\0")


class FakePublisher:
    """`held` = what its cache truly holds; `log` = the batches that it can replay."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.held: dict[bytes, None] = {}
        self.log: dict[int, bytes] = {}
        self.next = 0
        self.is_silent = False
        self.starts: list[int] = []  # of the replays asked for
        self.num_readers = 0  # whose subscription is here
        self.pub, self.endpoint = self._bind(zmq.XPUB)
        self.router, self.replay_endpoint = self._bind(zmq.ROUTER)
        self._tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._count_readers())]

    def _bind(self, kind: int) -> tuple[zmq.asyncio.Socket, str]:
        socket = self.context.socket(kind)
        socket.set(zmq.LINGER, 0)
        return socket, f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"

    @property
    def source(self) -> Source:
        return Source(self.endpoint, self.replay_endpoint, MAX_PAGES)

    def member_source(self, instance_id: str) -> registry_pb2.KvEventSource:
        return registry_pb2.KvEventSource(instance_id=instance_id, endpoint=self.endpoint, replay_endpoint=self.replay_endpoint)

    async def publish(self, *events: Event, is_lost: bool = False, payload: bytes | None = None) -> None:
        """A batch, `payload` in its place; `is_lost`: nobody gets it live."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
            elif isinstance(event, BlockRemoved):
                for each in event.block_hashes:
                    self.held.pop(each, None)
            else:
                self.held |= dict.fromkeys(event.block_hashes)
        self.log[self.next] = msgspec.msgpack.encode(KvEventBatch(0.0, list(events))) if payload is None else payload
        self.next += 1
        if not is_lost:
            await self.send(sequence_frame(self.next - 1), self.log[self.next - 1])

    async def send(self, *frames: bytes) -> None:
        await self.pub.send_multipart([b"kv", *frames])

    def forget(self) -> None:
        """Whoever asks for what came before gets the whole cache."""
        self.log = {}

    def restart(self) -> None:
        """Another engine at the same ports."""
        self.held, self.log, self.next = {}, {}, 0

    async def _serve(self) -> None:
        while True:
            reader, start = await self.router.recv_multipart()
            self.starts.append(sequence_of(start))
            if self.is_silent:
                continue
            wanted = range(sequence_of(start), self.next)
            replies = {number: self.log[number] for number in wanted if number in self.log}
            if self.next and sequence_of(start) != self.next and sequence_of(start) not in self.log:
                whole = KvEventBatch(0.0, [AllBlocksCleared(), stored(*self.held)])
                replies = {self.next - 1: msgspec.msgpack.encode(whole)}
            for number, payload in replies.items():
                await self.router.send_multipart([reader, sequence_frame(number), payload])
            await self.router.send_multipart([reader, END_OF_REPLAY, b""])

    async def _count_readers(self) -> None:
        while True:
            self.num_readers += 1 if (await self.pub.recv())[:1] == b"\x01" else -1

    async def close(self) -> None:
        await cancel(*self._tasks)
        self.pub.close(0)
        self.router.close(0)
        self.context.term()


class World:
    """A publisher and an index that follows it as "a"."""

    def __init__(self, events: KvEvents, index: PrefixIndex, publisher: FakePublisher) -> None:
        self.events, self.index, self.publisher = events, index, publisher

    @property
    def follower(self) -> Follower:
        (follower,) = self.events._followers.values()
        return follower

    @property
    def is_exact(self) -> bool:
        return self.index.is_exact(self.follower.instance_id)

    @property
    def is_right(self) -> bool:
        """In step, and nothing is believed but what is held."""
        holder = self.index._holders[self.follower.instance_id]
        return self.publisher.num_readers == 1 and holder.is_exact and holder.events == set(self.publisher.held) and not holder.approximate


    async def begin(self) -> None:
        """In step, with page 1, and live batches have reached it."""
        await until(lambda: self.is_right, "it is in step")
        await self.publisher.publish(stored(page(1)))
        await until(lambda: self.is_right, "it took that")


@contextlib.asynccontextmanager
async def following() -> AsyncIterator[World]:
    """At the end nothing is left of the rank."""
    publisher, index = FakePublisher(), PrefixIndex()
    events = KvEvents(index, Security.of(SecuritySection()))
    index.add("a", MAX_PAGES)
    events.follow("a", publisher.source)
    world = World(events, index, publisher)
    try:
        yield world
        index.check_integrity()
    finally:
        instance_id = world.follower.instance_id
        await events.close()
        await publisher.close()
        assert not index.is_exact(instance_id)
        index.drop(instance_id)
        assert not index._masks
