"""What a burst of KV events costs a router's event loop: `python -m tests.bench.kv_burst publish` is the rank, a process of its own."""

import asyncio
import os
import subprocess
import sys
import time

import msgspec
import uvloop
import zmq

from services.kv.event_messages import END_OF_REPLAY, BlockRemoved, BlockStored, KvEvent, KvEventBatch, sequence_frame, sequence_of
from services.kv.layout import PAGE_SIZE
from services.router.kv_events import KvEvents, Source
from services.router.prefix_index import PrefixIndex
from services.runtime.config import SecuritySection
from services.runtime.security import Security

PAGES_PER_S = 20_000
BATCH_PAGES = 20
SECONDS = 4.0


def publish() -> None:
    """Prints its two ports; from the first replay on PAGES_PER_S are stored and soon removed, until killed."""
    pub, replay = (zmq.Context.instance().socket(kind) for kind in (zmq.PUB, zmq.ROUTER))
    print(*(each.bind_to_random_port("tcp://127.0.0.1") for each in (pub, replay)), flush=True)
    payloads: list[bytes] = []
    before: list[bytes] = []
    for _ in range(400):
        pages = [os.urandom(16) for _ in range(BATCH_PAGES)]
        events: list[KvEvent] = [BlockStored(pages, None, [100_000] * PAGE_SIZE * BATCH_PAGES, PAGE_SIZE, None, "GPU", None)]
        payloads.append(msgspec.msgpack.encode(KvEventBatch(0.0, [*events, BlockRemoved(before, "GPU")])))  # type: ignore[list-item]
        before = pages
    sequence, began = 0, 0.0
    while True:
        if replay.poll(1):
            reader, start = replay.recv_multipart()
            for number in range(sequence_of(start), sequence):
                replay.send_multipart([reader, sequence_frame(number), payloads[number % len(payloads)]])
            replay.send_multipart([reader, END_OF_REPLAY, b""])
            began = began or time.perf_counter()
        while began and sequence * BATCH_PAGES < (time.perf_counter() - began) * PAGES_PER_S:
            pub.send_multipart([b"kv", sequence_frame(sequence), payloads[sequence % len(payloads)]])
            sequence += 1


async def _late() -> float:
    """p99 of how late a task is that wants to run every millisecond, in us: so long a stream's token waits for the loop."""
    late: list[float] = []
    end = time.perf_counter() + SECONDS
    while (began := time.perf_counter()) < end:
        await asyncio.sleep(0.001)
        late.append(time.perf_counter() - began - 0.001)
    return 1e6 * sorted(late)[int(0.99 * len(late))]


async def _measure(ports: list[str]) -> tuple[float, float, float]:
    index = PrefixIndex()
    index.add("rank", 65536)
    quiet = await _late()
    events = KvEvents(index, Security.of(SecuritySection()))
    events.follow("rank", Source(*(f"tcp://127.0.0.1:{port}" for port in ports), 65536))
    while not index.num_pages("rank", "events"):
        await asyncio.sleep(0.05)
    cpu = time.process_time()
    busy = await _late()
    cpu = (time.process_time() - cpu) / SECONDS
    assert index.is_exact("rank"), "it lost step"
    await events.close()
    return quiet, busy, cpu


def measure() -> tuple[float, float, float]:
    """p99 of the loop's lateness in us without and with PAGES_PER_S, and the share of a core that they take."""
    rank = subprocess.Popen([sys.executable, "-m", "tests.bench.kv_burst", "publish"], stdout=subprocess.PIPE, text=True)
    try:
        assert rank.stdout is not None
        return uvloop.run(_measure(rank.stdout.readline().split()))
    finally:
        rank.kill()
        rank.wait()


if __name__ == "__main__":
    publish()
