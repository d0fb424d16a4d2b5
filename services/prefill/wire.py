"""A PrefillRequest of the wire checked and turned into a Run, and its RunDone or RunFailed into the reply.

Enums of the wire are open: a value that this release does not know is passed on as the number it is.
"""
import math
from typing import cast

from proto.baton.v1 import common_pb2, prefill_pb2
from services.kv.messages import PeerRank, RequestKey
from services.model.params import SamplingParams, check_params, check_token_ids
from services.prefill.messages import ChoiceDone, Redirect, Run, RunDone, RunFailed
from services.runtime.errors import Amount, HandoffError, InvalidRequest
from services.runtime.ipc import Up

MAX_RUN_CHOICES = 128
"""The most choices of one request: each costs a page, a lease and a row of logits."""


def check_form(request: prefill_pb2.PrefillRequest) -> None:
    """Refuse a call that no router of this version makes (InvalidRequest, a gRPC status)."""
    if not request.request_id:
        raise InvalidRequest("request_id", request.request_id, "every call names its request")
    for name in ("prompt", "sampling"):
        if not request.HasField(name):
            raise InvalidRequest(name, None, "every call must have it")


def to_run(request: prefill_pb2.PrefillRequest, up: Up) -> Run:
    """The engine's command. Raises HandoffError (INVALID, TOO_LARGE, FINGERPRINT_MISMATCH) for what this rank cannot serve."""
    if request.readers:
        _check_fingerprint(request.fingerprint, up)
    prompt, params = request.prompt, to_params(request.sampling)
    try:
        _check_values(request, up)
        check_params(params, up.vocab_size)
    except InvalidRequest as error:
        raise HandoffError(common_pb2.INVALID, str(error)) from None
    run = Run(
        key=RequestKey(request.request_id, request.first_choice, request.attempt), instance_id=up.instance_id, n=request.n,
        token_ids=list(prompt.token_ids), num_output_tokens=prompt.num_output_tokens, salt=prompt.salt, params=params,
        readers=[PeerRank.of(reader) for reader in request.readers],
    )
    num_copies = max(len(run.readers) - 1, 0)
    if -(-len(run.token_ids) // up.page_size) + num_copies > up.num_pages:
        what = f"the prompt's {len(run.token_ids)} tokens" + (f" and {num_copies} copies of its last page" if num_copies else "")
        raise HandoffError(common_pb2.TOO_LARGE, f"{what} do not fit this rank's {up.num_pages} pages of {up.page_size} tokens")
    return run


def check_redirect_form(request: prefill_pb2.RedirectRequest) -> None:
    """Refuse a call that no router of this version makes (InvalidRequest, a gRPC status)."""
    if not request.key.request_id:
        raise InvalidRequest("key.request_id", request.key.request_id, "every call names its request")
    if request.key.choice >= MAX_RUN_CHOICES:
        raise InvalidRequest("key.choice", request.key.choice, f"must be below {MAX_RUN_CHOICES}")
    if not request.reader.instance_id:
        raise InvalidRequest("reader.instance_id", request.reader.instance_id, "every call names the rank that is to read")


def to_redirect(request: prefill_pb2.RedirectRequest, up: Up) -> Redirect:
    """The engine's command. Raises HandoffError (FINGERPRINT_MISMATCH) for a reader that may not have these pages."""
    _check_fingerprint(request.fingerprint, up)
    key = RequestKey(request.key.request_id, request.key.choice, request.key.attempt)
    return Redirect(key=key, instance_id=up.instance_id, reader=PeerRank.of(request.reader))


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
    if isinstance(event, RunFailed):
        return refused(event.reason, event.message)
    return prefill_pb2.PrefillReply(
        outcome=prefill_pb2.RequestOutcome(ok=True), first_tokens=[_first_token(choice) for choice in event.choices],
        num_cached_tokens=event.num_cached_tokens, queue_us=event.queue_us, compute_us=event.compute_us,
    )


def _first_token(done: ChoiceDone) -> prefill_pb2.FirstToken:
    token = common_pb2.Token(id=done.token_id, logprob=math.nan if done.logprob is None else done.logprob)
    if done.top_ids:
        token.top_logprobs.CopyFrom(common_pb2.TopLogprobs(token_ids=done.top_ids, logprobs=done.top_logprobs))
    finish_reason = cast(common_pb2.FinishReason, done.finish_reason)
    return prefill_pb2.FirstToken(choice=done.key.choice, token=token, finish_reason=finish_reason)


def refused(reason: int, message: str) -> prefill_pb2.PrefillReply:
    """Reply of a request that has none; `reason` is a value of `baton.v1.Reason`."""
    return prefill_pb2.PrefillReply(outcome=outcome(reason, message))


def outcome(reason: int, message: str) -> prefill_pb2.RequestOutcome:
    """How a call ended: well when `reason`, a value of `baton.v1.Reason`, is 0."""
    return prefill_pb2.RequestOutcome(ok=not reason, reason=cast(common_pb2.Reason, reason), message=message)


def _check_fingerprint(fingerprint: str, up: Up) -> None:
    if fingerprint != up.fingerprint:
        raise HandoffError(
            common_pb2.FINGERPRINT_MISMATCH,
            f"the reader's fingerprint is {fingerprint or 'absent'} and this rank's is {up.fingerprint}; "
            "pair only ranks of one model, revision and version",
        )


def _check_values(request: prefill_pb2.PrefillRequest, up: Up) -> None:
    """Raises InvalidRequest."""
    ids, sampling = request.prompt.token_ids, request.sampling
    num_output = request.prompt.num_output_tokens
    if not 1 <= request.n <= MAX_RUN_CHOICES:
        raise InvalidRequest("n", request.n, f"must be 1 to {MAX_RUN_CHOICES}")
    if request.first_choice + request.n > MAX_RUN_CHOICES:
        raise InvalidRequest("first_choice", request.first_choice, f"must be at most {MAX_RUN_CHOICES - request.n} with n {request.n}")
    if len(request.readers) not in (0, request.n):
        raise InvalidRequest("readers", Amount(len(request.readers), "ranks"), f"must have one a choice, {request.n}, or none")
    if sampling.grammar:
        raise InvalidRequest("sampling.grammar", f"{len(sampling.grammar)} bytes", "grammars are not supported")
    if not ids or len(ids) >= up.max_model_len:
        raise InvalidRequest("prompt.token_ids", f"{len(ids)} tokens", f"must have 1 to {up.max_model_len - 1}")
    check_token_ids("prompt.token_ids", ids, up.vocab_size)
    if num_output >= len(ids) or num_output >= sampling.max_tokens:
        raise InvalidRequest(
            "prompt.num_output_tokens", num_output, f"must be below max_tokens ({sampling.max_tokens}) and the {len(ids)} token_ids"
        )
