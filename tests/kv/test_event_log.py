"""What a rank tells of its prefix cache: vLLM's format byte for byte, and a copy that equals the cache whatever a reader misses."""

import random
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kv import event_log
from services.kv.event_log import KvEventLog
from services.kv.event_messages import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    DigestsStored,
    decode_batch,
    decode_digests,
    max_payload_bytes,
    sequence_frame,
    sequence_of,
)
from services.kv.hash import page_digests
from services.kv.kv_pool import KvPool
from services.kv.memory import KvMemory
from services.kv.pages import Holder, HolderKind
from tests.kv.event_reader import Copy
from tests.kv.test_prefix import TINY, cached, digests_of, ids_of, request


def make(num_pages: int) -> tuple[KvPool, KvEventLog]:
    log = KvEventLog(3, clock=lambda: 12.5)
    return KvPool(KvMemory(TINY, num_pages), log), log


def test_a_batch_is_what_vllm_writes():
    kv, log = make(3)
    cached(kv, 1, 70_000)
    cached(kv, 1, 70_000, 3)
    kv.take(2, request("x"))
    ((number, payload),) = log.number()
    first, second, third = digests_of(1, 70_000, 3)
    stored = {"type": "BlockStored", "block_size": 64, "lora_id": None, "medium": "GPU", "lora_name": None}
    old = digests_of(1, 70_000)[1]
    assert (number, msgspec.msgpack.decode(payload)) == (0, [12.5, [
        stored | {"block_hashes": [first, old], "parent_block_hash": None, "token_ids": [1] * 64 + [70_000] * 64},
        {"type": "BlockRemoved", "block_hashes": [old], "medium": "GPU"},
        stored | {"block_hashes": [second, third], "parent_block_hash": first, "token_ids": [70_000] * 64 + [3] * 64},
        {"type": "BlockRemoved", "block_hashes": [third, second], "medium": "GPU"},
    ], 3])
    assert log.number() == [] and log.digests == {first}


def test_our_own_decoders_read_it_with_and_without_ids():
    kv, log = make(2)
    cached(kv, 1, 2)
    kv.take(1, request("x"))
    log.number()
    first, second = digests_of(1, 2)
    ((_, payload),) = log.since(0)
    whole = BlockStored([first, second], None, ids_of(1, 2), 64, None, "GPU", None)
    assert decode_batch(payload).events == [whole, BlockRemoved([second], "GPU")] and decode_batch(payload).data_parallel_rank == 3
    assert decode_digests(payload).events == [DigestsStored([first, second], None), BlockRemoved([second], "GPU")]
    with pytest.raises(msgspec.MsgspecError):
        decode_digests(b"\xc1")


def test_numbers_travel_as_eight_bytes():
    assert sequence_frame(258) == b"\0\0\0\0\0\0\1\2" and sequence_of(sequence_frame(258)) == 258
    assert sequence_of(END_OF_REPLAY) == -1
    with pytest.raises(ValueError, match="7"):
        sequence_of(b"1234567")


def test_replay_gives_what_is_kept_and_a_snapshot_of_the_rest(monkeypatch):
    monkeypatch.setattr(event_log, "KEPT_BATCHES", 2)
    kv, log = make(8)
    assert list(log.since(0)) == [] and list(log.since(7)) == [], "nothing happened yet, so there is nothing to lack"
    batches = []
    for first in range(4):
        cached(kv, first, 9)
        batches += log.number()
    assert [number for number, _ in batches] == [0, 1, 2, 3]
    assert list(log.since(4)) == [] and list(log.since(3)) == batches[3:] and list(log.since(2)) == batches[2:]
    for start in (0, 1, 5):  # too old, too old, and of another incarnation
        ((number, payload),) = log.since(start)
        assert number == 3 == log.newest
        cleared, *stored = decode_batch(payload).events
        assert cleared == AllBlocksCleared()
        assert stored == [BlockStored(digests_of(n, 9), None, ids_of(n, 9), 64, None, "GPU", None) for n in range(4)]


def test_what_is_kept_is_bounded_in_bytes_too(monkeypatch):
    monkeypatch.setattr(event_log, "KEPT_BYTES", 1000)
    kv, log = make(64)
    cached(kv, *range(60))
    log.number()
    ((number, payload),) = log.since(0)
    assert number == 0 and isinstance(decode_batch(payload).events[0], AllBlocksCleared), "one batch is more than is kept"
    cached(kv, 99)
    ((number, payload),) = log.number()
    assert number == 1 and list(log.since(1)) == [(1, payload)]


def test_a_batch_takes_so_many_pages_and_no_more(monkeypatch):
    monkeypatch.setattr(event_log, "_BATCH_PAGES", 4)
    kv, log = make(16)
    for first in range(5):
        cached(kv, first, first, first)
    assert [len(decode_batch(payload).events) for _, payload in log.number()] == [2, 2, 1]


def test_a_payload_is_never_larger_than_readers_are_told():
    """Each page an event of its own, ids of five bytes, a cache as full as it gets."""
    kv, log = make(300)
    for first in range(300):
        cached(kv, 2**32 - 1 - first)
    payloads = [payload for _, payload in log.number()]
    snapshot = log._snapshot()  # pyright: ignore[reportPrivateUsage]
    spare = max_payload_bytes(0)
    assert max(map(len, payloads)) <= max_payload_bytes(300) and len(snapshot) - len(payloads[0]) < max_payload_bytes(300) - spare
    assert (len(snapshot) - 30) / 300 <= max_payload_bytes(1) - spare


class Lossy:
    """A reader that hears only some live batches, and of some replays only the beginning."""

    def __init__(self, draw: random.Random, loss: float) -> None:
        self.copy, self._draw, self._loss = Copy(), draw, loss

    def hear(self, log: KvEventLog, number: int, payload: bytes) -> None:
        if self._draw.random() < self._loss:
            return
        if number > self.copy.last + 1:
            self.replay(log, whole=self._draw.random() > self._loss)
        if number == self.copy.last + 1:
            self.copy.apply(number, payload)

    def replay(self, log: KvEventLog, *, whole: bool = True) -> None:
        answer = list(log.since(self.copy.last + 1))
        for number, payload in answer if whole else answer[: len(answer) // 2]:
            assert number > self.copy.last
            self.copy.apply(number, payload)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), loss=st.sampled_from([0.0, 0.2, 0.9]), kept=st.sampled_from([0, 1, 5, 1000]))
def test_copies_equal_the_cache_whatever_is_lost(seed: int, loss: float, kept: int):
    draw = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_log, "KEPT_BATCHES", kept)
        kv, log = make(12)
        truth: dict[bytes, tuple[bytes | None, list[int]]] = {}
        readers = [Lossy(draw, loss), Lossy(draw, 0.0)]
        running: list[Holder] = []
        for step in range(80):
            change(kv, draw, running, truth, step)
            kv.check_integrity()
            if draw.random() < 0.5:
                for number, payload in log.number():
                    for reader in readers:
                        reader.hear(log, number, payload)
                assert log.digests == kv.cache.digests == readers[1].copy.pages.keys()
            if draw.random() < 0.05:
                readers.append(Lossy(draw, loss))  # joins late
        log.number()
        for reader in readers:
            reader.replay(log)
            assert reader.copy.pages == {digest: truth[digest] for digest in kv.cache.digests}


def change(kv: KvPool, draw: random.Random, running: list[Holder], truth: dict, step: int) -> None:
    """One thing that an engine may do; at most three requests run at a time."""
    match draw.choice(["admit", "admit", "finish", "evict", "squeeze"]):
        case "admit" if len(running) < 3:
            ids = [draw.randrange(3) for _ in range(draw.randrange(1, 6)) for _ in range(64)]
            ids = [each for page in range(0, len(ids), 64) for each in [ids[page]] * 64] + [0]
            digests, holder = page_digests(ids), Holder(HolderKind.REQUEST, step)
            have = kv.match(digests, holder)
            if len(digests) - len(have) > kv.num_available:
                kv.release(holder)
                return
            running.append(holder)
            pages = have + kv.take(len(digests) - len(have), holder)
            num_final = draw.randrange(len(digests) + 1)  # chunk by chunk
            for end in sorted({num_final, len(digests)}):
                kv.insert(digests[:end], pages[:end], ids)
            truth |= {digest: (digests[i - 1] if i else None, ids[64 * i : 64 * (i + 1)]) for i, digest in enumerate(digests)}
        case "evict":
            kv.cache.evict(draw.randrange(1, 5))
        case "squeeze":
            kv.take(draw.randrange(kv.num_available + 1), Holder(HolderKind.REQUEST, "squeeze"))
            kv.release(Holder(HolderKind.REQUEST, "squeeze"))
        case _:
            if running:
                kv.release(running.pop(draw.randrange(len(running))))


def test_types_need_no_torch():
    """The router imports them."""
    code = "import sys, services.kv.event_messages, services.kv.hash; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
