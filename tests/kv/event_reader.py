"""Readers of KV events as others write them: vLLM's types, its example subscriber's loop, and the cache that both add up to."""

from collections.abc import Callable
from typing import Any

import msgspec
import zmq

END = -1


class VllmEvent(msgspec.Struct, tag=True):
    """As vLLM has had it since it writes maps: fields without a default must be there."""


class BlockStored(VllmEvent, tag=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class BlockRemoved(VllmEvent, tag=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(VllmEvent, tag=True):
    pass


class VllmBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(VllmBatch)


class Copy:
    """A rank's cache as its events tell it: parent and ids of each page. `last` is the number of the last batch applied."""

    def __init__(self) -> None:
        self.pages: dict[bytes, tuple[bytes | None, list[int]]] = {}
        self.last = -1
        self.num_cleared = 0

    def apply(self, sequence: int, payload: bytes) -> None:
        """Any batch, in or out of turn."""
        for event in _decoder.decode(payload).events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for digest in event.block_hashes:
                        assert isinstance(digest, bytes)
                        self.pages.pop(digest, None)
                case AllBlocksCleared():
                    self.num_cleared += 1
                    self.pages.clear()
        self.last = sequence

    def _store(self, event: BlockStored) -> None:
        assert event.medium == "GPU" and event.lora_id is None and event.lora_name is None
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        parent = event.parent_block_hash
        for index, digest in enumerate(event.block_hashes):
            assert isinstance(digest, bytes) and not isinstance(parent, int)
            self.pages[digest] = parent, event.token_ids[size * index : size * (index + 1)]
            parent = digest


class Reader:
    """Subscribes, asks for what it missed. `lose` decides about each live message; `applies_old` is what vLLM's example does."""

    def __init__(self, port: int, replay_port: int, lose: Callable[[], bool] = lambda: False, *, applies_old: bool = False) -> None:
        self.copy = Copy()
        self._lose, self._applies_old = lose, applies_old
        self._context = zmq.Context()
        self._sub, self._replay = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._sub.subscribe(b"kv@")
        self._sub.rcvbuf = 1 << 16  # so that a test can fill it
        self._sub.connect(f"tcp://127.0.0.1:{port}")
        self._replay.connect(f"tcp://127.0.0.1:{replay_port}")
        self._awaits = False  # a replay's end

    def ask(self) -> None:
        """For everything behind what was applied, unless the answer to that is still to come."""
        if not self._awaits:
            self._awaits = True
            self._replay.send_multipart([b"", (self.copy.last + 1).to_bytes(8, "big")])

    def hear(self) -> None:
        """What has come by now; live messages wait while a replay is under way."""
        while self._awaits and self._replay.poll(0):
            _, number, payload = self._replay.recv_multipart()
            sequence = int.from_bytes(number, "big", signed=True)
            self._awaits = sequence != END
            if sequence > self.copy.last:
                self.copy.apply(sequence, payload)
        while not self._awaits and self._sub.poll(0):
            _, number, payload = self._sub.recv_multipart()
            sequence = int.from_bytes(number, "big")
            # Who applies old batches must hear all of them; vLLM's publisher asks the same of its example.
            if (sequence > self.copy.last or not self._applies_old) and self._lose():
                continue
            if sequence > self.copy.last + 1:
                self.ask()  # this one is in the answer
            elif sequence > self.copy.last or self._applies_old:
                self.copy.apply(max(sequence, self.copy.last), payload)

    def close(self) -> None:
        self._context.destroy(linger=0)
