"""A rank's life with an engine that has no model."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest

from services.runtime import supervisor as supervisor_module
from services.runtime.errors import EngineError, SetupError
from services.runtime.ipc import FrontChannel, Heartbeat, StartFailed, Stop, Up
from services.runtime.supervisor import RankProcess, Supervisor
from tests.runtime.waiting import until

Event = Up | StartFailed | Heartbeat


class World:
    """A supervisor of one fake rank, and what it reported."""

    def __init__(self) -> None:
        self.ups: list[int | None] = []
        self.downs = 0
        self.supervisor = Supervisor(
            num_ranks=1, module="tests.runtime.fake_engine", arguments=[], event_type=Event, on_event=self._on_event, on_down=self._on_down
        )
        self.rank = self.supervisor.ranks[0]

    def _on_event(self, rank: RankProcess, event: Any) -> None:
        assert isinstance(event, Up)
        self.ups.append(rank.pid)

    def _on_down(self, rank: RankProcess) -> None:
        self.downs += 1


@contextlib.asynccontextmanager
async def supervised() -> AsyncIterator[tuple[World, "asyncio.Task[None]"]]:
    world = World()
    task = asyncio.create_task(world.supervisor.run())
    try:
        yield world, task
    finally:
        await world.supervisor.stop()
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda behaviour: monkeypatch.setenv("BATON_FAKE_ENGINE", behaviour)


async def test_a_killed_engine_is_restarted_with_longer_and_longer_pauses(
    behave: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    behave("serves")
    pauses: list[float] = []
    backoff = (0.011, 0.021, 0.031)
    monkeypatch.setattr(supervisor_module, "_BACKOFF_S", backoff)
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds in backoff:
            pauses.append(seconds)
        await real_sleep(seconds)

    monkeypatch.setattr(supervisor_module.asyncio, "sleep", sleep)
    async with supervised() as (world, _):
        for number in range(1, 4):
            await until(lambda number=number: len(world.ups) == number, "the engine is up")
            assert world.rank.pid is not None
            os.kill(world.rank.pid, 9)
            await until(lambda number=number: world.downs == number, "its end is reported")
        await until(lambda: len(world.ups) == 4, "it is up again")
        assert len(set(world.ups)) == 4
    assert pauses == [0.021, 0.031, 0.031]


@pytest.mark.parametrize("behaviour", ["serves", "long step"])
async def test_a_stuck_engine_is_killed_and_replaced(
    behave: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, behaviour: str
) -> None:
    behave(behaviour)
    monkeypatch.setattr(supervisor_module, "STEP_S", 0.1)
    monkeypatch.setattr(supervisor_module, "HEARTBEAT_S", 1.0)
    async with supervised() as (world, _):
        await until(lambda: bool(world.ups), "the engine is up")
        first = world.rank.pid
        assert first is not None
        if behaviour == "serves":
            os.kill(first, signal.SIGSTOP)  # heartbeat and all
        behave("serves")
        await until(lambda: len(world.ups) == 2, "another has taken its place")
        assert world.rank.pid != first and not psutil.pid_exists(first)


@pytest.mark.parametrize("behaviour", ["hand-off hangs", "fails"])
async def test_b49_an_engine_whose_hand_off_thread_hangs_or_is_dead_is_replaced(
    behave: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, behaviour: str
) -> None:
    behave(behaviour)
    monkeypatch.setattr(supervisor_module, "STEP_S", 0.1)
    async with supervised() as (world, _):
        await until(lambda: bool(world.ups), "the engine is up")
        behave("serves")
        await until(lambda: world.downs == 1 and len(world.ups) == 2, "another has taken its place")


@pytest.mark.parametrize("behaviour", ["long step that was predicted", "serves"])
async def test_b49_a_long_step_that_was_predicted_and_idleness_end_nothing(
    behave: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, behaviour: str
) -> None:
    """Both last many times every bound."""
    behave(behaviour)
    monkeypatch.setattr(supervisor_module, "STEP_S", 0.05)
    monkeypatch.setattr(supervisor_module, "_WATCH_S", 0.02)
    async with supervised() as (world, _):
        await until(lambda: bool(world.ups), "the engine is up")
        await asyncio.sleep(2.0)  # of heartbeats, each of which might be judged wrongly
        assert world.downs == 0 and world.rank.up is not None


async def test_a_front_that_was_stopped_blames_no_engine(behave: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP and SIGCONT of the front: heartbeats wait in the socket, and the silence was its own."""
    behave("serves")
    monkeypatch.setattr(supervisor_module, "HEARTBEAT_S", 1.5)
    async with supervised() as (world, _):
        await until(lambda: bool(world.ups), "the engine is up")
        for _ in range(2):
            time.sleep(2.0)  # noqa: ASYNC251 - the whole event loop stands still
            await asyncio.sleep(0.6)
        assert world.downs == 0 and world.rank.up is not None


@pytest.mark.parametrize(("behaviour", "words"), [("refuses", "truncated"), ("dies", "exited with code 7")])
async def test_an_engine_that_cannot_start_the_first_time_ends_the_front(
    behave: Callable[[str], None], behaviour: str, words: str
) -> None:
    behave(behaviour)
    async with supervised() as (_, task):
        with pytest.raises(SetupError, match=words):
            await task


async def test_an_engine_that_dies_at_once_after_up_is_no_failed_start(behave: Callable[[str], None]) -> None:
    behave("dies after up")
    async with supervised() as (world, task):
        await until(lambda: world.downs == 1, "its end is reported")
        behave("serves")
        await until(lambda: world.rank.up is not None and len(world.ups) >= 2, "it is up again")
        assert not task.done()


@pytest.mark.parametrize("behaviour", ["loads", "stopped", "serves"])
async def test_stop_leaves_no_engine_whatever_it_does(
    behave: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, behaviour: str
) -> None:
    """Stop was sent to an engine that had not connected yet, and the front ended in a traceback."""
    behave("loads" if behaviour == "loads" else "serves")
    monkeypatch.setattr(supervisor_module, "LEAVE_S", 0.2)
    async with supervised() as (world, task):
        await until(lambda: world.rank.pid is not None if behaviour == "loads" else bool(world.ups), "the engine runs")
        pid = world.rank.pid
        assert pid is not None
        if behaviour == "stopped":
            os.kill(pid, signal.SIGSTOP)
        await world.supervisor.stop()
        await asyncio.wait_for(task, 10.0)
        assert not psutil.pid_exists(pid)


async def test_channel_is_closed_even_when_cancelled_twice(
    behave: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ZMQ context that is only forgotten blocks the whole process when it is collected."""
    behave("serves")
    closed: list[FrontChannel[Any, Any]] = []
    real_close = FrontChannel.close
    monkeypatch.setattr(FrontChannel, "close", lambda channel: (closed.append(channel), real_close(channel)))
    world = World()
    life = asyncio.create_task(world.rank.live_once(lambda _rank, _event: None, lambda _rank: None))
    await until(lambda: world.rank.up is not None, "the engine is up")
    life.cancel()
    await asyncio.sleep(0)  # it is killing the engine now
    life.cancel()
    await asyncio.wait({life})
    assert len(closed) == 1


async def test_commands_to_a_rank_that_is_down_are_refused(behave: Callable[[str], None]) -> None:
    behave("loads")
    async with supervised() as (world, _):
        await until(lambda: world.rank.pid is not None, "the engine runs")
        with pytest.raises(EngineError, match="rank 0 is down"):
            world.rank.send(Stop())
