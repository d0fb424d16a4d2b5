"""A PrefillRequest of the wire checked and turned into a Run, and its RunDone or RunFailed into the reply.

Enums of the wire are open: a value that this release does not know is passed on as the number it is.
"""
import math
from typing import cast

from proto.baton.v1 import common_pb2, prefill_pb2
from services.kv.messages import PeerRank, RequestKey
from services.model.params import SamplingParams, check_params, check_token_ids
from services.prefill.messages import Run, RunDone, RunFailed
from services.runtime.errors import HandoffError, InvalidRequest
from services.runtime.ipc import Up


def check_form(request: prefill_pb2.PrefillRequest) -> None:
    """Refuse a call that no router of this version makes (InvalidRequest, a gRPC status)."""
    if not request.request_id:
        raise InvalidRequest("request_id", request.request_id, "every call names its request")
    for name in ("prompt", "sampling"):
        if not request.HasField(name):
            raise InvalidRequest(name, None, "every call must have it")


def to_run(request: prefill_pb2.PrefillRequest, up: Up) -> Run:
    """The engine's command. Raises HandoffError (INVALID, TOO_LARGE, FINGERPRINT_MISMATCH) for what this rank cannot serve."""
    if request.readers and request.fingerprint != up.fingerprint:
        raise HandoffError(
            common_pb2.FINGERPRINT_MISMATCH,
            f"the reader's fingerprint is {request.fingerprint or 'absent'} and this rank's is {up.fingerprint}; "
            "pair only ranks of one model, revision and version",
        )
    prompt, params = request.prompt, to_params(request.sampling)
    try:
        _check_values(request, up)
        check_params(params, up.vocab_size)
    except InvalidRequest as error:
        raise HandoffError(common_pb2.INVALID, str(error)) from None
    if -(-len(prompt.token_ids) // up.page_size) > up.num_pages:
        size = f"the prompt's {len(prompt.token_ids)} tokens do not fit this rank's {up.num_pages} pages of {up.page_size} tokens"
        raise HandoffError(common_pb2.TOO_LARGE, size)
    return Run(
        key=RequestKey(request.request_id, 0, request.attempt), token_ids=list(prompt.token_ids),
        num_output_tokens=prompt.num_output_tokens, salt=prompt.salt, params=params,
        reader=_reader(request.readers[0]) if request.readers else None,
    )


def to_params(sampling: common_pb2.Sampling) -> SamplingParams:
    """Sampling of the wire, whose every field the router has set."""
    return SamplingParams(
        max_tokens=sampling.max_tokens, seed=sampling.seed, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
        min_p=sampling.min_p, frequency_penalty=sampling.frequency_penalty, presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty, min_tokens=sampling.min_tokens, stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos, logprobs=sampling.logprobs,
    )


def to_reply(event: RunDone | RunFailed) -> prefill_pb2.PrefillReply:
    """The reply that answers Run. Raises ValueError or TypeError for values that no field holds."""
    return refused(event.reason, event.message) if isinstance(event, RunFailed) else _first_token(event)


def _first_token(done: RunDone) -> prefill_pb2.PrefillReply:
    token = common_pb2.Token(id=done.token_id, logprob=math.nan if done.logprob is None else done.logprob)
    if done.top_ids:
        token.top_logprobs.CopyFrom(common_pb2.TopLogprobs(token_ids=done.top_ids, logprobs=done.top_logprobs))
    finish_reason = cast(common_pb2.FinishReason, done.finish_reason)
    first = prefill_pb2.FirstToken(choice=done.key.choice, token=token, finish_reason=finish_reason)
    return prefill_pb2.PrefillReply(
        outcome=prefill_pb2.RequestOutcome(ok=True), first_tokens=[first], num_cached_tokens=done.num_cached_tokens,
        queue_us=done.queue_us, compute_us=done.compute_us,
    )


def refused(reason: int, message: str) -> prefill_pb2.PrefillReply:
    """Reply of a request that has none; `reason` is a value of `baton.v1.Reason`."""
    outcome = prefill_pb2.RequestOutcome(ok=False, reason=cast(common_pb2.Reason, reason), message=message)
    return prefill_pb2.PrefillReply(outcome=outcome)


def _check_values(request: prefill_pb2.PrefillRequest, up: Up) -> None:
    """Raises InvalidRequest."""
    ids, sampling = request.prompt.token_ids, request.sampling
    num_output = request.prompt.num_output_tokens
    if request.n != 1:
        raise InvalidRequest("n", request.n, "this rank samples 1 choice a request")
    if len(request.readers) > 1:
        raise InvalidRequest("readers", len(request.readers), "one choice at TP 1 has at most 1 reader")
    if sampling.grammar:
        raise InvalidRequest("sampling.grammar", f"{len(sampling.grammar)} bytes", "grammars are not supported")
    if not ids or len(ids) >= up.max_model_len:
        raise InvalidRequest("prompt.token_ids", f"{len(ids)} tokens", f"must have 1 to {up.max_model_len - 1}")
    check_token_ids("prompt.token_ids", ids, up.vocab_size)
    if num_output >= len(ids) or num_output >= sampling.max_tokens:
        raise InvalidRequest(
            "prompt.num_output_tokens", num_output, f"must be below max_tokens ({sampling.max_tokens}) and the {len(ids)} token_ids"
        )


def _reader(rank: common_pb2.Rank) -> PeerRank:
    return PeerRank(instance_id=rank.instance_id, address=rank.pool_address, rank=rank.rank, peer=rank.peer)
