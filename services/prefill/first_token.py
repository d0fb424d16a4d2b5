"""The first tokens of each prompt that ended in a step, one a choice, and whether they are the last ones too."""
from collections.abc import Callable, Sequence

import msgspec
import torch

from proto.baton.v1 import common_pb2
from services.kv.messages import HandoffState, PenaltyCounts, RequestKey
from services.model.penalties import PenaltyState
from services.model.sampling import RowState, Sampled, sample
from services.prefill.messages import ChoiceDone, Run, RunDone
from services.prefill.request import Request


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled token. `finish_reason` is a value of `baton.v1.FinishReason`; `penalties` count the token already."""

    token_id: int
    logprob: float | None
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    finish_reason: int
    penalties: PenaltyCounts


class FirstTokenSampler:
    """Knows the model's ends: `eos_token_ids`, and `max_model_len` tokens of prompt and output together."""

    def __init__(self, eos_token_ids: tuple[int, ...], max_model_len: int) -> None:
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len

    def sample(self, logits: torch.Tensor, runs: Sequence[Run]) -> list[list[FirstToken] | None]:
        """`run.n` tokens a row of logits [len(runs), vocab] fp32; None for a row that holds a NaN, which no sampler can use."""
        if not runs:
            return []
        penalties = [_penalties(run) for run in runs]
        rows = [self._row(run, key.choice, state) for run, state in zip(runs, penalties, strict=True) for key in run.keys]
        sampled = sample(logits.repeat_interleave(torch.tensor([run.n for run in runs]), 0), rows)
        broken = logits.isnan().any(-1).tolist()
        tokens: list[list[FirstToken] | None] = []
        begin = 0
        for run, state, is_broken in zip(runs, penalties, broken, strict=True):
            counts = PenaltyCounts() if state is None else PenaltyCounts.of(*state.export())
            tokens.append(None if is_broken else self._first_tokens(run, sampled, begin, counts))
            begin += run.n
        return tokens

    def _first_tokens(self, run: Run, sampled: Sampled, begin: int, counts: PenaltyCounts) -> list[FirstToken]:
        """The run's rows of `sampled`, from row `begin` on; `counts` are those before its first token."""
        k, rows = max(run.params.logprobs, 0), slice(begin, begin + run.n)
        logprobs = [None] * run.n if sampled.logprobs is None or run.params.logprobs < 0 else sampled.logprobs[rows].tolist()
        top_ids = [()] * run.n if sampled.top_ids is None else sampled.top_ids[rows, :k].tolist()
        top_logprobs = [()] * run.n if sampled.top_logprobs is None else sampled.top_logprobs[rows, :k].tolist()
        return [
            FirstToken(
                token_id=token_id, logprob=logprobs[i], top_ids=tuple(top_ids[i]), top_logprobs=tuple(top_logprobs[i]),
                finish_reason=self.finish_reason(run, token_id), penalties=_with(counts, token_id) if run.params.has_penalties else counts,
            )
            for i, token_id in enumerate(sampled.token_ids[rows].tolist())
        ]

    def finish_reason(self, run: Run, token_id: int) -> int:
        """Why nothing may follow this token; FINISH_UNSPECIFIED when something may."""
        if token_id in run.params.stop_token_ids or (token_id in self._eos_token_ids and not run.params.ignore_eos):
            return common_pb2.STOP
        if run.num_output_tokens + 1 >= run.params.max_tokens or len(run.token_ids) + 1 >= self._max_model_len:
            return common_pb2.LENGTH
        return common_pb2.FINISH_UNSPECIFIED

    def _row(self, run: Run, choice: int, penalties: PenaltyState | None) -> RowState:
        return RowState(
            params=run.params, position=len(run.token_ids), num_output_tokens=run.num_output_tokens, eos_token_ids=self._eos_token_ids,
            choice=choice, penalties=penalties,
        )


def handoff_state(run: Run, token: FirstToken, *, num_cached_tokens: int, queue_us: int, compute_us: int) -> HandoffState:
    """Where the reader goes on."""
    return HandoffState(
        first_token=token.token_id, first_logprob=token.logprob, top_ids=token.top_ids, top_logprobs=token.top_logprobs,
        penalties=token.penalties, num_prompt_tokens=len(run.token_ids), num_output_tokens=run.num_output_tokens + 1,
        num_cached_tokens=num_cached_tokens, queue_us=queue_us, compute_us=compute_us,
    )


def run_done(request: Request, tokens: Sequence[FirstToken], has_lease: Callable[[RequestKey], bool]) -> RunDone:
    """The engine's answer to a Run whose first tokens are chosen."""
    keys = [choice.key for choice in request.choices] or request.run.keys
    choices = [
        ChoiceDone(
            key=key, token_id=token.token_id, logprob=token.logprob, top_ids=token.top_ids, top_logprobs=token.top_logprobs,
            finish_reason=token.finish_reason, leased=token.finish_reason == common_pb2.FINISH_UNSPECIFIED and has_lease(key),
        )
        for key, token in zip(keys, tokens, strict=True)
    ]
    return RunDone(
        key=request.run.key, choices=tuple(choices), num_cached_tokens=request.prompt.num_cached, queue_us=request.queue_us,
        compute_us=request.compute_us,
    )


def _penalties(run: Run) -> PenaltyState | None:
    """Counts before the first token: of the tokens given, the last `num_output_tokens` are output."""
    if not run.params.has_penalties:
        return None
    num_prompt = len(run.token_ids) - run.num_output_tokens
    return PenaltyState(run.token_ids[:num_prompt], run.token_ids[num_prompt:])


def _with(counts: PenaltyCounts, token_id: int) -> PenaltyCounts:
    """The same with one output token more."""
    outputs = counts.output_counts
    return PenaltyCounts(counts.prompt_ids, outputs | {token_id: outputs.get(token_id, 0) + 1})
