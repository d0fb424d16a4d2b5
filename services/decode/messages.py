"""What a decode front and its engines say to each other over ZMQ. A session is named by a small integer that the front draws.

front -> engine   Submit, Cancel, SessionLost, MoveStart, MovePause, MoveResume, Stop
engine -> front   Claimed, Granted, CaughtUp, Ready, StepOut, Paused, Resumed, Finished, Failed (and Up, RankLoad, ...)

A cancelled request is never mentioned again; every other ends in exactly one Finished or Failed; one that moved away, in Failed(REPLACED).
A move's target says Claimed, Granted, CaughtUp, Ready. Its source says Paused, then Failed(REPLACED); or Resumed, whenever the move ends.
"""
import msgspec

from services.decode.request import RequestSpec
from services.kv.messages import PeerRank
from services.runtime.ipc import Heartbeat, RankLoad, StartFailed, Stop, Up


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Book a claim."""

    session: int
    handle: int
    spec: RequestSpec


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Forget a request; one that is over is no error. `reason` is a value of `baton.v1.Reason`."""

    session: int
    handle: int
    reason: int


class SessionLost(msgspec.Struct, frozen=True, tag=True):
    """Forget all requests of a session."""

    session: int


class MoveStart(msgspec.Struct, frozen=True, tag=True):
    """Announce the running request to `reader`, as attempt `new_attempt`; it runs on."""

    session: int
    handle: int
    new_attempt: int
    reader: PeerRank


class MovePause(msgspec.Struct, frozen=True, tag=True):
    """Stop at the end of a step and announce the rest; without effect unless the move to `new_attempt` is under way."""

    session: int
    handle: int
    new_attempt: int


class MoveResume(msgspec.Struct, frozen=True, tag=True):
    """The target failed: the request runs on here; without effect unless the move to `new_attempt` is under way."""

    session: int
    handle: int
    new_attempt: int


class FirstToken(msgspec.Struct, frozen=True):
    """The token that the holder sampled; `logprob` is None when none was asked for."""

    token_id: int
    logprob: float | None
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class TransferTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One hand-off as its reader saw it; times in microseconds."""

    num_pages: int
    num_cached_pages: int
    num_bytes: int
    read_us: int
    exposed_us: int
    wait_us: int
    transport: str


class Claimed(msgspec.Struct, frozen=True, tag=True):
    """A claim is booked; `num_cached_tokens` of its prompt are here already."""

    session: int
    handle: int
    num_cached_tokens: int


class Granted(msgspec.Struct, frozen=True, tag=True):
    """Target of a move: pages are taken."""

    session: int
    handle: int


class CaughtUp(msgspec.Struct, frozen=True, tag=True):
    """Target of a move, once: all that its source has announced is read."""

    session: int
    handle: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Pages are here and verified; `position` is the first token's index among the output tokens."""

    session: int
    handle: int
    position: int
    first_token: FirstToken
    transfer: TransferTimes


class StepOut(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One step's tokens of all requests of a session, column by column.

    logprobs       empty when no request asked; else one a token, NaN for requests that did not ask
    top_ids, top_logprobs    likewise, one list a token
    """

    session: int
    handles: list[int]
    first_index: list[int]
    num_tokens: list[int]
    token_ids: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    step_us: int


class Paused(msgspec.Struct, frozen=True, tag=True):
    """Source of a move: the request takes part in no step, the rest is announced; its tokens were told before."""

    session: int
    handle: int
    num_output_tokens: int


class Resumed(msgspec.Struct, frozen=True, tag=True):
    """Source of a move that came to nothing: the request runs on here. `reason` is a value of `baton.v1.Reason`."""

    session: int
    handle: int
    reason: int
    message: str


class Finished(msgspec.Struct, frozen=True, tag=True):
    """No token follows. `reason` is a value of `baton.v1.FinishReason`; unspecified when the holder ended the request."""

    session: int
    handle: int
    reason: int
    num_output_tokens: int
    stop_token_id: int
    decode_us: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request ended without its end; `reason` is a value of `baton.v1.Reason`."""

    session: int
    handle: int
    reason: int
    message: str


MoveCommand = MoveStart | MovePause | MoveResume
Command = Submit | Cancel | SessionLost | MoveCommand | Stop
RequestEvent = Claimed | Granted | CaughtUp | Ready | StepOut | Paused | Resumed | Finished | Failed
Event = RequestEvent | Up | StartFailed | Heartbeat | RankLoad
