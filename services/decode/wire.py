"""Between `baton.v1.Decode`'s messages and the commands and events of the engines: pure conversion.

Enums of the wire are open: a value that this release does not know is passed on as the number it is.
"""
import math
from collections.abc import Mapping
from typing import cast

from proto.baton.v1 import common_pb2, decode_pb2
from services.decode.messages import (
    CaughtUp,
    Claimed,
    Failed,
    Finished,
    FirstToken,
    Granted,
    MoveCommand,
    MovePause,
    MoveResume,
    MoveStart,
    Paused,
    Ready,
    RequestEvent,
    Resumed,
    StepOut,
    Submit,
)
from services.decode.request import RequestSpec
from services.kv.messages import PeerRank, RequestKey
from services.model.params import SamplingParams, check_params, check_token_ids
from services.runtime.errors import InvalidRequest


def to_submit(session: int, message: decode_pb2.Submit, vocab_size: int) -> Submit:
    """Raises InvalidRequest for what no router of this version sends."""
    prompt, params, num_tokens = message.prompt, to_params(message.sampling), len(message.prompt.token_ids)
    if not num_tokens or prompt.num_output_tokens >= num_tokens:
        raise InvalidRequest("prompt.num_output_tokens", prompt.num_output_tokens, f"it must leave a prompt in the {num_tokens} token ids")
    if message.sampling.grammar:
        raise InvalidRequest("sampling.grammar", f"{len(message.sampling.grammar)} bytes", "grammars are not supported; leave it empty")
    check_token_ids("prompt.token_ids", prompt.token_ids, vocab_size)
    check_params(params, vocab_size)
    spec = RequestSpec(
        key=RequestKey(message.key.request_id, message.key.choice, message.key.attempt),
        token_ids=list(prompt.token_ids),
        num_output_tokens=prompt.num_output_tokens,
        salt=prompt.salt,
        params=params,
        source=PeerRank.of(message.holder),
        num_preemptions=message.num_preemptions,
        timeout_s=message.deadline_us / 1e6,
        is_move=message.is_move,
    )
    return Submit(session, message.handle, spec)


def to_move(session: int, message: decode_pb2.Move) -> MoveCommand:
    """Raises InvalidRequest for a step that this release does not know. The reader's fingerprint is the front's to compare."""
    handle, new_attempt = message.handle, message.new_attempt
    match message.step:
        case decode_pb2.Move.START:
            return MoveStart(session, handle, new_attempt, PeerRank.of(message.reader))
        case decode_pb2.Move.PAUSE:
            return MovePause(session, handle, new_attempt)
        case decode_pb2.Move.RESUME:
            return MoveResume(session, handle, new_attempt)
        case step:
            raise InvalidRequest("move.step", step, "it must be START, PAUSE or RESUME")


def to_params(sampling: common_pb2.Sampling) -> SamplingParams:
    """Field by field; the router has filled every one in."""
    return SamplingParams(
        max_tokens=sampling.max_tokens, seed=sampling.seed, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
        min_p=sampling.min_p, frequency_penalty=sampling.frequency_penalty, presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty, min_tokens=sampling.min_tokens, stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos, logprobs=sampling.logprobs,
    )


def to_reason(said: int) -> int:
    """Reason of a router's Cancel: one that this release does not know is a cancel like any other."""
    return said if said in common_pb2.Reason.values() and said != common_pb2.REASON_UNSPECIFIED else common_pb2.CANCELLED


def to_reply(event: RequestEvent, attempts: Mapping[int, int]) -> decode_pb2.SessionReply:
    """`attempts` by handle; the sequence number is the session's to set. Raises ValueError or TypeError for what no field holds."""
    if isinstance(event, StepOut):
        return decode_pb2.SessionReply(step=_to_step(event, attempts))
    handle, attempt = event.handle, attempts.get(event.handle, 0)
    match event:
        case Claimed():
            return decode_pb2.SessionReply(claimed=decode_pb2.Claimed(handle=handle, num_cached_tokens=event.num_cached_tokens))
        case Granted():
            return decode_pb2.SessionReply(granted=decode_pb2.Granted(handle=handle, attempt=attempt))
        case CaughtUp():
            return decode_pb2.SessionReply(caught_up=decode_pb2.CaughtUp(handle=handle, attempt=attempt))
        case Paused():
            paused = decode_pb2.Paused(handle=handle, attempt=attempt, num_output_tokens=event.num_output_tokens)
            return decode_pb2.SessionReply(paused=paused)
        case Resumed():
            reason = cast(common_pb2.Reason, event.reason)
            resumed = decode_pb2.Resumed(handle=handle, attempt=attempt, reason=reason, message=event.message)
            return decode_pb2.SessionReply(resumed=resumed)
        case Ready():
            return decode_pb2.SessionReply(ready=_to_ready(event, attempt))
        case Finished():
            return decode_pb2.SessionReply(finished=decode_pb2.RequestFinished(
                handle=handle, attempt=attempt, reason=cast(common_pb2.FinishReason, event.reason),
                num_output_tokens=event.num_output_tokens, stop_token_id=event.stop_token_id, decode_us=event.decode_us,
            ))
        case Failed():
            return failed(handle, attempt, event.reason, event.message)


def failed(handle: int, attempt: int, reason: int, message: str) -> decode_pb2.SessionReply:
    """RequestFailed as a reply; `reason` is a value of `baton.v1.Reason`."""
    said = cast(common_pb2.Reason, reason)
    return decode_pb2.SessionReply(failed=decode_pb2.RequestFailed(handle=handle, attempt=attempt, reason=said, message=message))


def _to_ready(event: Ready, attempt: int) -> decode_pb2.Ready:
    times = event.transfer
    return decode_pb2.Ready(
        handle=event.handle, attempt=attempt, position=event.position, first_token=_to_token(event.first_token),
        transfer=common_pb2.Transfer(
            num_pages=times.num_pages, num_cached_pages=times.num_cached_pages, num_bytes=times.num_bytes, read_us=times.read_us,
            exposed_us=times.exposed_us, wait_us=times.wait_us, transport=times.transport,
        ),
    )


def _to_token(first: FirstToken) -> common_pb2.Token:
    top = common_pb2.TopLogprobs(token_ids=first.top_ids, logprobs=first.top_logprobs)
    return common_pb2.Token(id=first.token_id, logprob=math.nan if first.logprob is None else first.logprob, top_logprobs=top)


def _to_step(event: StepOut, attempts: Mapping[int, int]) -> decode_pb2.StepTokens:
    tops = zip(event.top_ids, event.top_logprobs, strict=True)
    return decode_pb2.StepTokens(
        handles=event.handles,
        attempts=[attempts.get(handle, 0) for handle in event.handles],
        first_index=event.first_index,
        num_tokens=event.num_tokens,
        token_ids=event.token_ids,
        logprobs=event.logprobs,
        top_logprobs=[common_pb2.TopLogprobs(token_ids=ids, logprobs=logprobs) for ids, logprobs in tops],
        step_us=event.step_us,
    )
