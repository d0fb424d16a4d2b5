"""What a prefill front and its engines say to each other over ZMQ.

front -> engine   Run, Cancel, Stop          engine -> front   RunDone, RunFailed, LeaseOver (and Up, RankLoad, ...)

Every Run is answered by exactly one RunDone or RunFailed, cancelled ones too. A RunDone that says `leased` is followed by one LeaseOver.
"""
import msgspec

from services.kv.messages import PeerRank, RequestKey
from services.model.params import SamplingParams
from services.runtime.ipc import Heartbeat, RankLoad, StartFailed, Stop, Up


class Run(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Compute a prompt. `token_ids` ends with the `num_output_tokens` tokens that were sent already; no reader = no lease."""

    key: RequestKey
    token_ids: list[int]
    num_output_tokens: int
    salt: bytes
    params: SamplingParams
    reader: PeerRank | None


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Give a request or its lease up; one that is over is no error. `reason` is a value of `baton.v1.Reason`."""

    key: RequestKey
    reason: int
    message: str


class RunDone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first token. `finish_reason` is a value of `baton.v1.FinishReason`, unspecified when the request goes on at the reader."""

    key: RequestKey
    token_id: int
    logprob: float | None  # None when none was asked for
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    finish_reason: int
    leased: bool
    num_cached_tokens: int
    queue_us: int
    compute_us: int


class RunFailed(msgspec.Struct, frozen=True, tag=True):
    """No first token; nothing is held for the request any more. `reason` is a value of `baton.v1.Reason`."""

    key: RequestKey
    reason: int
    message: str


class LeaseOver(msgspec.Struct, frozen=True, tag=True):
    """Pages of a finished Run are promised to nobody any more: released (reason 0), aborted or expired."""

    key: RequestKey
    reason: int
    message: str


Command = Run | Cancel | Stop
RequestEvent = RunDone | RunFailed | LeaseOver
Event = RequestEvent | Up | StartFailed | Heartbeat | RankLoad
