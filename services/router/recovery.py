"""What a failure of an attempt means: whether it costs a retry, whom the choice avoids from now on, what the client is told at last."""

import time

from proto.baton.v1 import common_pb2
from services.router.legs import DecodeLeg, Failure, PrefillLeg, Ticket
from services.runtime.errors import BatonError, DeadlineExceeded, EngineError, HandoffError, InvalidRequest, Overloaded

# nobody's fault: no retry is spent
_FREE = frozenset({common_pb2.PREEMPTED, common_pb2.STALE_INSTANCE, common_pb2.DRAINING, common_pb2.REPLACED, common_pb2.FENCED})
# told by one side of a hand-off, but either may be the broken one
_BOTH = frozenset({common_pb2.PEER_GONE, common_pb2.READ_FAILED, common_pb2.READ_DEADLINE})
# the same ranks may do better
_NOBODY = frozenset({
    common_pb2.PREEMPTED, common_pb2.EPOCH_MISMATCH, common_pb2.LEASE_EXPIRED, common_pb2.FENCED, common_pb2.UNKNOWN_REQUEST,
})
_MAX_ATTEMPTS = 64  # free ones included
_BACKOFF_S = 0.05  # before the second new pair, doubled for each one after
_MAX_BACKOFF_S = 0.8  # the calls of a new pair go out within 1 s of the failure


def is_free(failure: Failure, num_attempts: int) -> bool:
    """Whether `failure` costs no retry. A refused redirect does not: what it was to mend has been paid for."""
    return (failure.reason in _FREE or failure.is_drained or failure.is_redirect) and num_attempts < _MAX_ATTEMPTS


def is_hopeless(failure: Failure) -> bool:
    """Whether no other rank could do better."""
    return not failure.is_redirect and failure.reason in (common_pb2.INVALID, common_pb2.DEADLINE)


def backoff_s(num_new_pairs: int) -> float:
    """Wait before another pair is called, after `num_new_pairs` were: nothing before the first."""
    return min(_BACKOFF_S * 2 ** (min(num_new_pairs, 10) - 1), _MAX_BACKOFF_S) if num_new_pairs else 0.0


def blame(ticket: Ticket, failure: Failure, prefill: PrefillLeg | None, decode: DecodeLeg | None) -> None:
    """This choice avoids whoever may have failed it; a rank that cannot be reached, by us or by its peer, is left alone by all."""
    failed, other = (prefill, decode) if failure.role == "prefill" else (decode, prefill)
    broken = (failed, other) if failure.reason in _BOTH and failure.is_told and not failure.is_redirect else (failed,)
    if failure.reason not in _NOBODY:
        ticket.avoid.update(leg.rank.instance_id for leg in broken if leg is not None)
    gone = other if failure.is_told and not failure.is_redirect else failed
    if failure.reason == common_pb2.PEER_GONE and gone is not None:
        gone.state.cool_down.failed(time.monotonic())


def final_error(failure: Failure, request_id: str) -> BatonError:
    """What the client is told when no retry is left."""
    if failure.reason in (common_pb2.INVALID, common_pb2.TOO_LARGE):
        return InvalidRequest("request", request_id, f"{failure.role} refuses it: {failure}")
    if failure.reason == common_pb2.DEADLINE:
        return DeadlineExceeded(str(failure))
    if failure.reason == common_pb2.OVERLOADED:
        return Overloaded(str(failure))
    if failure.reason == common_pb2.INTERNAL:
        return EngineError(str(failure))
    return HandoffError(failure.reason, str(failure))
