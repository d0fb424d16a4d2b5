"""What a prefill front and its engines say to each other over ZMQ.

front -> engine   Run, Cancel, Redirect, Stop     engine -> front   RunDone, RunFailed, LeaseOver, RedirectDone (and Up, RankLoad, ...)

Every Run is answered by exactly one RunDone or RunFailed, cancelled ones too; each choice that a RunDone calls `leased` is followed by one
LeaseOver, under the key that its last redirect gave it. Every Redirect is answered by exactly one RedirectDone.
"""
import msgspec

from services.kv.messages import PeerRank, RequestKey
from services.model.params import SamplingParams
from services.runtime.ipc import Heartbeat, RankLoad, StartFailed, Stop, Up


class Run(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Compute a prompt and choose `n` first tokens, for the choices from `key.choice` on.

    `token_ids` ends with the `num_output_tokens` tokens that were sent already. `readers`: one a choice, or none at all and then no lease.
    """

    key: RequestKey  # of its first choice
    instance_id: str  # the incarnation meant
    n: int = 1
    token_ids: list[int]
    num_output_tokens: int
    salt: bytes
    params: SamplingParams
    readers: list[PeerRank]

    @property
    def keys(self) -> list[RequestKey]:
        """One a choice, as they are before any redirect."""
        return [RequestKey(self.key.request_id, self.key.choice + i, self.key.attempt) for i in range(self.n)]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Give up a Run that is not answered, with all its choices, or one choice. What is over is no error.

    `key`: of a Run, or of a choice. `reason` is a value of `baton.v1.Reason`.
    """

    key: RequestKey
    reason: int
    message: str


class Redirect(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Let `reader` pull what another reader was to pull; `key` has the attempt that is the hand-off's from here on."""

    key: RequestKey
    instance_id: str  # the incarnation meant
    reader: PeerRank


class ChoiceDone(msgspec.Struct, frozen=True, kw_only=True):
    """A choice's first token. `finish_reason` is a value of `baton.v1.FinishReason`, unspecified when the choice goes on at its reader.

    One that goes on but is not `leased` has lost its reader while it was computed.
    """

    key: RequestKey  # of the lease: a redirect has raised the attempt
    token_id: int
    logprob: float | None  # None when none was asked for
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    finish_reason: int
    leased: bool


class RunDone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first tokens, in the order of the choices."""

    key: RequestKey
    choices: tuple[ChoiceDone, ...]
    num_cached_tokens: int
    queue_us: int
    compute_us: int


class RunFailed(msgspec.Struct, frozen=True, tag=True):
    """No first token; nothing is held for the request any more. `reason` is a value of `baton.v1.Reason`."""

    key: RequestKey
    reason: int
    message: str


class LeaseOver(msgspec.Struct, frozen=True, tag=True):
    """A choice's pages are promised to nobody any more: released (reason 0), aborted or expired."""

    key: RequestKey
    reason: int
    message: str


class RedirectDone(msgspec.Struct, frozen=True, tag=True):
    """The new reader has the hand-off (reason 0), which was `former`'s; or why it has not, and nothing has changed."""

    key: RequestKey
    former: RequestKey | None
    reason: int
    message: str


Command = Run | Cancel | Redirect | Stop
RequestEvent = RunDone | RunFailed | LeaseOver | RedirectDone
Event = RequestEvent | Up | StartFailed | Heartbeat | RankLoad
