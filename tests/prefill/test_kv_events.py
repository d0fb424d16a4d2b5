"""A prefill engine's own process: a prompt's pages appear among its KV events, and leave them when they are evicted."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.kv.hash import page_digests
from services.kv.messages import RequestKey
from services.model.params import SamplingParams
from services.prefill.messages import Event, Run, RunDone
from services.runtime.ipc import FrontChannel, Stop, Up
from tests.kv.event_reader import Reader
from tests.runtime.waiting import until

NUM_PAGES = 8


class Engine:
    """The process, what it said, and a reader of its events."""

    def __init__(self, channel: FrontChannel[Any, Event], up: Up) -> None:
        self.channel, self.up = channel, up
        self.reader = Reader(up.kv_events_port, up.kv_replay_port)
        self._num_runs = 0

    async def run(self, token_ids: list[int], salt: bytes = b"") -> None:
        """Compute a prompt that nobody reads on."""
        self._num_runs += 1
        key = RequestKey(f"r{self._num_runs}", 0, 0)
        params = SamplingParams(max_tokens=1, seed=1, temperature=0.0)
        self.channel.send(Run(key=key, instance_id=self.up.instance_id, token_ids=token_ids, num_output_tokens=0, salt=salt, params=params,
                              readers=[]))
        while not isinstance(event := await self.channel.receive(), RunDone) or event.key != key:
            pass

    async def until_known(self, *digests: bytes) -> None:
        """Until exactly these pages are stored as far as the reader knows."""
        def is_so() -> bool:
            self.reader.ask()
            self.reader.hear()
            return self.reader.copy.pages.keys() == set(digests)

        await until(is_so, "the events say so")


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    address = f"ipc://{tmp_path}/rank0"
    channel: FrontChannel[Any, Event] = FrontChannel(address, Event)
    command = [sys.executable, "-m", "services.prefill.engine", "--rank", "0", "--ipc", address, "--die-with-parent", str(os.getpid()),
               "--config", "deploy/dev.toml", "--set", f"prefill.num_pages={NUM_PAGES}"]
    process = subprocess.Popen(command)  # noqa: ASYNC220  it returns at once
    try:
        while not isinstance(event := await channel.receive(), Up):
            assert process.poll() is None
        started = Engine(channel, event)
        yield started
        started.reader.close()
        channel.send(Stop())
        process.wait(10)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        channel.close()


async def test_pages_come_and_go_as_events_say(engine: Engine) -> None:
    first = [2 + 7 * i % 240 for i in range(3 * 64 + 10)]
    await engine.run(first)
    digests = page_digests(first)
    assert len(digests) == 3
    await engine.until_known(*digests)
    for index, digest in enumerate(digests):
        parent, ids = engine.reader.copy.pages[digest]
        assert parent == (digests[index - 1] if index else None) and ids == first[64 * index : 64 * (index + 1)]

    salted = page_digests(first[:65], b"tenant")
    await engine.run(first[:65], b"tenant")
    await engine.until_known(*digests, *salted)

    second = [2 + 5 * i % 240 for i in range(6 * 64 + 1)]
    await engine.run(second)  # takes 7 of 8 pages: one cached page may stay, and it is the one used last
    await engine.until_known(*page_digests(second), *salted)
