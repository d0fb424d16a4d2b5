"""What the two sides of a hand-off say to each other in NIXL notifications (msgpack; never pickle).

    holder -> reader   Announce, RenewAnswer, Ended          reader -> holder   Renew, Done, Ended
    payload = encode(message); message = decode(payload)     decode raises ValueError for anything else

Every message carries the request's key and the instance ids of both sides; what does not match is counted, logged and ignored.
Reasons are values of `baton.v1.Reason`; in `Ended`, reason 0 says that the request finished with its first token: nothing to pull.
"""
from collections.abc import Sequence

import msgspec

from proto.baton.v1 import common_pb2

# 1: announcements by sequence number, renewals that ask for gaps, one Ended for both directions.
# 2: the state of a running request carries its output tokens.
WIRE_VERSION = 2

FINISHED = 0  # Reason of an Ended that is no failure


class RequestKey(msgspec.Struct, frozen=True, array_like=True):
    """Which request, and which life of it: the key of every table here."""

    request_id: str
    choice: int
    attempt: int


class PeerRank(msgspec.Struct, frozen=True):
    """The rank at the other end. `address` and `rank` stay when its engine is restarted, `instance_id` does not."""

    instance_id: str
    address: str
    rank: int
    peer: bytes

    @classmethod
    def of(cls, rank: common_pb2.Rank) -> "PeerRank":
        """As a router names it."""
        return cls(rank.instance_id, rank.pool_address, rank.rank, rank.peer)


class PenaltyCounts(msgspec.Struct, frozen=True):
    """Token counts that the sampler's penalties need, as plain ints."""

    prompt_ids: tuple[int, ...] = ()  # distinct ids of the prompt
    output_counts: dict[int, int] = {}

    @classmethod
    def of(cls, prompt_ids: Sequence[int], output_ids: Sequence[int], output_counts: Sequence[int]) -> "PenaltyCounts":
        """From what PenaltyState.export() gives."""
        return cls(tuple(prompt_ids), dict(zip(output_ids, output_counts, strict=True)))


class HandoffState(msgspec.Struct, frozen=True, kw_only=True):
    """Where decoding goes on: travels with the last announcement."""

    first_token: int
    first_logprob: float | None = None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    output_ids: tuple[int, ...] = ()  # of a running request: every output token before first_token, which is then its latest
    drafts: tuple[int, ...] = ()  # none until MTP exists
    penalties: PenaltyCounts = PenaltyCounts()
    grammar: bytes | None = None
    num_prompt_tokens: int  # tokens whose KV is handed over, replayed output included
    num_output_tokens: int = 1  # of the whole request, first_token included
    num_cached_tokens: int = 0  # of the prompt, at the holder
    queue_us: int = 0
    compute_us: int = 0


class AnnouncedPage(msgspec.Struct, frozen=True, array_like=True):
    """One final page: its index in the request, the holder's page number, its epoch."""

    index: int
    page: int
    epoch: int


class _Envelope(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    key: RequestKey
    holder: str
    reader: str


class Announce(_Envelope, frozen=True, kw_only=True, tag="announce"):
    """Pages that became final; `sequence` counts from 0 without gaps. `state` is set in the last one and only there."""

    sequence: int
    pages: tuple[AnnouncedPage, ...]
    state: HandoffState | None = None


class Renew(_Envelope, frozen=True, kw_only=True, tag="renew"):
    """Keep the lease; tell me what was announced from `next_sequence` on."""

    next_sequence: int


class RenewAnswer(_Envelope, frozen=True, kw_only=True, tag="answer"):
    """`known` false: not admitted here (yet). Otherwise what was announced from the sequence asked for."""

    known: bool
    announcements: tuple[Announce, ...] = ()


class Done(_Envelope, frozen=True, kw_only=True, tag="done"):
    """Pages read and verified; the lease is needed no more."""


class Ended(_Envelope, frozen=True, kw_only=True, tag="ended"):
    """The sender gave the hand-off up, refused it, or (FINISHED) needs none."""

    reason: int
    message: str = ""


Message = Announce | Renew | RenewAnswer | Done | Ended
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Message to notification payload."""
    return _encoder.encode(message)


def decode(payload: bytes) -> Message:
    """Notification payload to message; ValueError when it is none."""
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:  # ValidationError is one too
        raise ValueError(f"not a hand-off message: {error}") from error
