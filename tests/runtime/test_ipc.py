"""Front and engine over real ZMQ sockets: order, bounds, bytes that mean nothing."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from services.runtime import ipc
from services.runtime.errors import EngineError
from services.runtime.ipc import EngineChannel, FrontChannel, Heartbeat, StartFailed, Stop, Up

Event = Up | StartFailed | Heartbeat
BOUND = 5


@pytest.fixture
def front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FrontChannel[Any, Any]]:
    monkeypatch.setattr(ipc, "_QUEUE_BOUND", BOUND)
    channel: FrontChannel[Any, Any] = FrontChannel(address_of(tmp_path), Event)
    yield channel
    channel.close()


def address_of(folder: Path) -> str:
    return f"ipc://{folder}/rank0"


async def test_messages_keep_type_and_order(front: FrontChannel[Any, Any], tmp_path: Path) -> None:
    engine: EngineChannel[Any, Any] = EngineChannel(address_of(tmp_path), Stop | Heartbeat)
    sent = [Up("i", b"\x00\xff", "f", 1, 2, 3, 4, 5), Heartbeat(1.5, 2.5), StartFailed("no")]
    for event in sent:
        engine.send(event)
    assert [await asyncio.wait_for(front.receive(), 5) for _ in sent] == sent
    front.send(Heartbeat(0.5, 0.0))
    front.send(Stop())
    got: list[Any] = []
    while len(got) < 2:
        got += engine.receive(5.0)
    assert got == [Heartbeat(0.5, 0.0), Stop()]
    engine.close()


def test_commands_to_nobody_are_an_error_at_once(front: FrontChannel[Any, Any]) -> None:
    with pytest.raises(EngineError):
        front.send(Stop())


def test_commands_that_nobody_reads_are_bounded(front: FrontChannel[Any, Any], tmp_path: Path) -> None:
    engine: EngineChannel[Any, Any] = EngineChannel(address_of(tmp_path), Stop)
    engine.send(Heartbeat(0.0, 0.0))
    asyncio.run(asyncio.wait_for(front.receive(), 5))  # connected now
    with pytest.raises(EngineError, match="unread"):
        for _ in range(100_000):
            front.send(Stop())
    engine.close()


def test_events_that_nobody_reads_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "_QUEUE_BOUND", BOUND)
    engine: EngineChannel[Any, Any] = EngineChannel(address_of(tmp_path), Stop)
    with pytest.raises(EngineError, match="front left 5 events unread"):
        for _ in range(BOUND + 1):
            engine.send(Heartbeat(0.0, 0.0))
    engine._events.close(linger=0)
    engine.close()


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa4Nope", b"\x93\x01\x02\x03", b"garbage" * 100])
def test_bytes_that_are_no_event_are_an_engine_error(front: FrontChannel[Any, Any], tmp_path: Path, frame: bytes) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(f"{address_of(tmp_path)}.events")
        stranger.send(frame)

        async def receive() -> Any:
            return await asyncio.wait_for(front.receive(), 5)

        with pytest.raises(EngineError, match="cannot be read"):
            asyncio.run(receive())
