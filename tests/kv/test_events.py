"""KV events over real sockets: live stream, replays, the race between the two, and readers that are slow, odd or late."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq
import zmq.auth

from services.kv import event_log, events
from services.kv.event_messages import END_OF_REPLAY, decode_batch
from services.kv.events import KvEventPublisher
from services.kv.kv_pool import KvPool
from services.kv.memory import KvMemory
from services.kv.pages import Holder
from services.runtime.config import DecodeSection, PrefillSection, SecuritySection
from services.runtime.errors import ConfigError
from services.runtime.security import Security
from services.runtime.telemetry import INCIDENTS
from tests.kv.event_reader import Reader
from tests.kv.test_event_log import change
from tests.kv.test_prefix import TINY, cached

SECURITY = Security.of(SecuritySection())
PATIENCE_S = 10.0


class Stage:
    """A cache of `num_pages`, its publisher, and readers of it."""

    def __init__(self, num_pages: int = 16) -> None:
        publisher = KvEventPublisher.open(PrefillSection(), "prefill", 2, Path("folder/model"), SECURITY)
        assert publisher is not None
        self.events = publisher
        self.kv = KvPool(KvMemory(TINY, num_pages), publisher.log)
        self.readers: list[Reader] = []

    def reader(self, lose: Callable[[], bool] = lambda: False, *, applies_old: bool = False) -> Reader:
        """One that has joined: subscribed, and told the state."""
        reader = Reader(self.events.port, self.events.replay_port, lose, applies_old=applies_old)
        self.readers.append(reader)
        return reader

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain until {what}"
            self.events.turn()
            for reader in self.readers:
                reader.hear()
            time.sleep(0.0002)

    def until_equal(self, reader: Reader) -> None:
        def is_equal() -> bool:
            reader.ask()
            return reader.copy.pages.keys() == self.kv.cache.digests and reader.copy.last == self.events.log.newest

        self.until(is_equal, "the reader has what the cache has")

    def ask(self, requests: list[list[bytes]], kind: int = zmq.DEALER) -> list[list[bytes]]:
        """All that comes back up to the end of one replay; of a REQ socket, which takes one answer, that."""
        with zmq.Context() as context, context.socket(kind) as end:
            end.linger = 0
            end.connect(f"tcp://127.0.0.1:{self.events.replay_port}")
            for frames in requests:
                end.send_multipart(frames)
            answer: list[list[bytes]] = []

            def is_over() -> bool:
                while end.poll(0) and not (answer and kind == zmq.REQ):
                    answer.append(end.recv_multipart())
                return bool(answer) and (kind == zmq.REQ or answer[-1][-2:] == [END_OF_REPLAY, b""])

            self.until(is_over, "an answer comes")
            return answer


    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        self.events.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    with closing(Stage()) as made:
        yield made


def num_counted(what: str) -> float:
    return INCIDENTS.labels(what, "")._value.get()  # pyright: ignore[reportPrivateUsage]


def test_live_events_arrive_with_topic_and_number(stage: Stage) -> None:
    reader = stage.reader()
    stage.until_equal(reader)
    stage.until(lambda: bool(cached(stage.kv, len(stage.kv.cache), 7)) and reader.copy.last > 2, "live events come")
    stage.until_equal(reader)
    with zmq.Context() as context, context.socket(zmq.SUB) as raw:
        raw.connect(f"tcp://127.0.0.1:{stage.events.port}")
        raw.subscribe(b"")
        stage.until(lambda: bool(cached(stage.kv, random.randrange(1000))) and bool(raw.poll(0)), "the raw subscriber hears")
        topic, number, payload = raw.recv_multipart()
    assert topic.startswith(b"kv@") and topic.endswith(b"@model") and topic.count(b"@") == 2
    assert int.from_bytes(number, "big") <= stage.events.log.newest and decode_batch(payload).data_parallel_rank == 2


def test_req_and_dealer_ask_each_in_its_way(stage: Stage) -> None:
    cached(stage.kv, 1, 2)
    stage.events.turn()
    kept = [[(0).to_bytes(8, "big"), payload] for _, payload in stage.events.log.since(0)]
    end = [END_OF_REPLAY, b""]
    zero, one = (0).to_bytes(8, "big"), (1).to_bytes(8, "big")
    assert stage.ask([[zero]]) == [*kept, end]
    assert stage.ask([[b"", zero]]) == [[b"", *frames] for frames in [*kept, end]]
    assert stage.ask([[one]]) == [end]
    assert stage.ask([[zero]], zmq.REQ) == kept, "a REQ socket takes one answer"
    assert stage.ask([[one]], zmq.REQ) == [end]


@pytest.mark.parametrize("frames", [[b""], [b"1234567"], [b"", b"123456789"], [b"\0" * 8, b"more"]])
def test_malformed_requests_are_counted_and_not_answered(stage: Stage, frames: list[bytes]) -> None:
    before = num_counted("KV replay request malformed")
    assert stage.ask([frames, [b"good", (0).to_bytes(8, "big")]]) == [[b"good", END_OF_REPLAY, b""]]
    assert num_counted("KV replay request malformed") == before + 1


@pytest.mark.parametrize("applies_old", [False, True])
def test_snapshot_and_live_stream_race_and_every_copy_is_exact(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, *, applies_old: bool
) -> None:
    """Three batches are kept, so nearly each gap ends in a snapshot, with live messages on both sides of it."""
    monkeypatch.setattr(event_log, "KEPT_BATCHES", 3)
    draw = random.Random(5)
    truth: dict[bytes, tuple[bytes | None, list[int]]] = {}
    for _ in range(3):
        stage.reader(lambda: draw.random() < 0.2, applies_old=applies_old)
    running: list[Holder] = []
    step = 0
    while (num_snapshots := sum(reader.copy.num_cleared for reader in stage.readers)) < 30 and step < 20_000:
        step += 1
        change(stage.kv, draw, running, truth, step)
        for _ in range(draw.randrange(3)):
            stage.events.turn()
        listener = draw.choice(stage.readers)
        listener.hear()
        if draw.random() < 0.05:
            listener.ask()
        if step % 200 == 0 and len(stage.readers) < 8:
            stage.until_equal(stage.reader(applies_old=applies_old))  # joins in the middle
    for reader in stage.readers:
        stage.until_equal(reader)
        assert reader.copy.pages == {digest: truth[digest] for digest in stage.kv.cache.digests}
    assert num_snapshots >= 30, "no snapshots, no race"


def test_a_reader_that_does_not_read_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue is bounded: what does not fit is lost to it alone, it sees the gap and hears the whole state."""
    for module in (event_log, events):
        monkeypatch.setattr(module, "KEPT_BATCHES", 50)
    with closing(Stage()) as stage:
        slow = stage.reader()
        stage.until_equal(slow)
        stage.readers.remove(slow)
        for number in range(4000):
            cached(stage.kv, *(100_000 + 12 * number + page for page in range(12)))
            stage.events.turn()
        eager = stage.reader()
        stage.until_equal(eager)
        assert slow.copy.last < stage.events.log.newest
        stage.readers.append(slow)

        def is_told() -> bool:
            cached(stage.kv, stage.events.log.newest)  # what shows the gap
            return slow.copy.num_cleared > 0

        stage.until(is_told, "the slow one hears the whole state")
        stage.until_equal(slow)


def test_off_is_off_and_beyond_loopback_needs_curve() -> None:
    assert KvEventPublisher.open(DecodeSection(kv_events=False), "decode", 0, Path("m"), SECURITY) is None
    with pytest.raises(ConfigError, match=r"security\.curve_key.*decode\.kv_events = false"):
        KvEventPublisher.open(DecodeSection(address="0.0.0.0:0"), "decode", 0, Path("m"), SECURITY)


def test_beyond_loopback_only_who_holds_the_key_hears(tmp_path: Path) -> None:
    _, key = zmq.auth.create_certificates(tmp_path, "cluster")
    ours = Security.of(SecuritySection(curve_key=key))
    publisher = KvEventPublisher.open(DecodeSection(address="0.0.0.0:0", advertise="node-7"), "decode", 0, Path("m"), ours)
    assert publisher is not None
    kv = KvPool(KvMemory(TINY, 64), publisher.log)
    with zmq.Context() as context, context.socket(zmq.SUB) as member, context.socket(zmq.SUB) as stranger:
        for end, endpoint in ((member, f"tcp://127.0.0.1:{publisher.port}"), (stranger, f"tcp://localhost:{publisher.port}")):
            end.linger = 0
            end.subscribe(b"kv@node-7@m")
            (ours if end is member else SECURITY).connect_zmq(end, endpoint)
        deadline, number = time.monotonic() + PATIENCE_S, 0
        while not member.poll(1):
            assert time.monotonic() < deadline
            number += 1
            cached(kv, number)
            publisher.turn()
        assert not stranger.poll(0)
    publisher.close()
