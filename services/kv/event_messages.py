"""KV events on the wire: what a rank's prefix cache stores and removes, in vLLM's format (no torch here: the router imports it).

PUB      [topic, sequence (8 bytes, big-endian), payload]     payload = msgpack of KvEventBatch; the sequence begins at 0, no gaps
ROUTER   a request [start (8 bytes)] or, as REQ sends it, ["", start]: every batch from there on as [sequence, payload], behind the same
         empty frame if there was one; at last [END_OF_REPLAY, ""]

A batch is an array [time, events, rank], an event a map whose "type" is its name. vLLM wrote events as arrays until 0.23 and writes maps
since (its change 42892); of the readers, llm-d's kv-cache takes both since 0.9, Dynamo's both, and typed msgspec readers (vLLM's own
example, kthena) whichever their vLLM wrote: so maps are what every reader of today's vLLM decodes, and a field more breaks none of them.

How a reader keeps an exact copy:

1. Subscribe, then ask for a replay from 0. Apply what comes; a sequence that is not above the last one taken is old, skip it.
2. A live batch whose sequence is not the next one: ask for a replay from the next one. Ask so every few seconds too: what got lost may
   have been the last thing that happened.
3. What is kept is bounded. A start that is too old is answered with *one* batch, [AllBlocksCleared, BlockStored, ...]: the whole cache,
   under the number of the newest batch in it. Applied like any other it is right, wherever the live stream stands: up to it all is old.
4. An engine that starts again begins at 0 under another instance id, most often at other ports (KvEventSource in registry.proto): begin
   at 1. A renewed transfer agent changes the instance id alone: ports, sequence and cache go on.

Hashes are our digests (`hash.py`): 16 bytes, chained, salted by tenant. The digest of page i covers token 64 * (i + 1) too, which is not
among the `token_ids` of the page. These go out in the clear, whoever's they are: the stream belongs on the inner plane, like the pages.
"""
from typing import Any

import msgspec

from services.kv.layout import PAGE_SIZE

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MEDIUM = "GPU"  # vLLM's word for the memory that attention reads, which on a CPU rank is the host's
_PAGE_BYTES = 160 + 5 * PAGE_SIZE  # of a stored page: its ids, and an event of its own for them
_BATCH_BYTES = 1 << 20  # of what a batch holds besides one whole cache, see event_log.py


class KvEvent(msgspec.Struct, frozen=True, tag=True, gc=False):
    """What every event is: a map with its name under "type"."""


class BlockStored(KvEvent, frozen=True, tag=True, gc=False):
    """Pages of one chain entered the cache; `token_ids` has `block_size` ids a page, `parent_block_hash` is of the page before the first.

    Fields without a default are always on the wire: vLLM's readers insist on them.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class DigestsStored(KvEvent, frozen=True, tag="BlockStored", gc=False):
    """BlockStored for a reader that wants no token ids: they are skipped unread, which is several times as fast."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None


class BlockRemoved(KvEvent, frozen=True, tag=True, gc=False):
    """Pages left the cache; the last of a chain before those above it."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(KvEvent, frozen=True, tag=True, gc=False):
    """The cache is empty; what follows in the batch is all that it holds."""


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`ts` in seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class DigestBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """KvEventBatch without token ids."""

    ts: float
    events: list[DigestsStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


_batches: msgspec.msgpack.Decoder[KvEventBatch] = msgspec.msgpack.Decoder(KvEventBatch)
_digest_batches: msgspec.msgpack.Decoder[DigestBatch] = msgspec.msgpack.Decoder(DigestBatch)


def decode_batch(payload: bytes) -> KvEventBatch:
    """A payload with all that is in it. Raises msgspec.MsgspecError."""
    return _batches.decode(payload)


def decode_digests(payload: bytes) -> DigestBatch:
    """A payload for a reader that wants digests alone. Raises msgspec.MsgspecError."""
    return _digest_batches.decode(payload)


def sequence_frame(sequence: int) -> bytes:
    """A sequence number as it travels; not negative."""
    return sequence.to_bytes(8, "big")


def sequence_of(frame: Any) -> int:
    """The number in a frame of 8 bytes, -1 for END_OF_REPLAY. Raises ValueError for a frame of another size."""
    if len(frame) != 8:
        raise ValueError(f"a sequence number has 8 bytes but this frame has {len(frame)}")
    return int.from_bytes(frame, "big", signed=True)


def max_payload_bytes(num_pages: int) -> int:
    """No payload of a rank with `num_pages` pages is larger: a reader's ZMQ_MAXMSGSIZE."""
    return _BATCH_BYTES + num_pages * _PAGE_BYTES
