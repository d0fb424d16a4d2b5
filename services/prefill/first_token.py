"""The first token of each prompt that ended in a step, and whether it is the last one too."""
from collections.abc import Sequence

import msgspec
import torch

from proto.baton.v1 import common_pb2
from services.kv.messages import HandoffState, PenaltyCounts
from services.model.penalties import PenaltyState
from services.model.sampling import RowState, sample
from services.prefill.messages import Run


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

    def sample(self, logits: torch.Tensor, runs: Sequence[Run]) -> list[FirstToken | None]:
        """One token a row of logits [len(runs), vocab] fp32; None for a row that holds a NaN, which no sampler can use."""
        if not runs:
            return []
        penalties = [_penalties(run) for run in runs]
        sampled = sample(logits, [self._row(run, state) for run, state in zip(runs, penalties, strict=True)])
        broken = logits.isnan().any(-1).tolist()
        token_ids = sampled.token_ids.tolist()
        logprobs = sampled.logprobs.tolist() if sampled.logprobs is not None else []
        top_ids = sampled.top_ids.tolist() if sampled.top_ids is not None else []
        top_logprobs = sampled.top_logprobs.tolist() if sampled.top_logprobs is not None else []
        tokens: list[FirstToken | None] = []
        for i, run in enumerate(runs):
            k = max(run.params.logprobs, 0) if top_ids else 0
            token = FirstToken(
                token_id=token_ids[i],
                logprob=logprobs[i] if run.params.logprobs >= 0 else None,
                top_ids=tuple(top_ids[i][:k]) if k else (),
                top_logprobs=tuple(top_logprobs[i][:k]) if k else (),
                finish_reason=self.finish_reason(run, token_ids[i]),
                penalties=_counts(penalties[i], token_ids[i]),
            )
            tokens.append(None if broken[i] else token)
        return tokens

    def finish_reason(self, run: Run, token_id: int) -> int:
        """Why nothing may follow this token; FINISH_UNSPECIFIED when something may."""
        if token_id in run.params.stop_token_ids or (token_id in self._eos_token_ids and not run.params.ignore_eos):
            return common_pb2.STOP
        if run.num_output_tokens + 1 >= run.params.max_tokens or len(run.token_ids) + 1 >= self._max_model_len:
            return common_pb2.LENGTH
        return common_pb2.FINISH_UNSPECIFIED

    def _row(self, run: Run, penalties: PenaltyState | None) -> RowState:
        return RowState(
            params=run.params, position=len(run.token_ids), num_output_tokens=run.num_output_tokens, eos_token_ids=self._eos_token_ids,
            choice=run.key.choice, penalties=penalties,
        )


def handoff_state(run: Run, token: FirstToken, *, num_cached_tokens: int, queue_us: int, compute_us: int) -> HandoffState:
    """Where the reader goes on."""
    return HandoffState(
        first_token=token.token_id, first_logprob=token.logprob, top_ids=token.top_ids, top_logprobs=token.top_logprobs,
        penalties=token.penalties, num_prompt_tokens=len(run.token_ids), num_output_tokens=run.num_output_tokens + 1,
        num_cached_tokens=num_cached_tokens, queue_us=queue_us, compute_us=compute_us,
    )


def _penalties(run: Run) -> PenaltyState | None:
    """Counts before the first token: of the tokens given, the last `num_output_tokens` are output."""
    if not run.params.has_penalties:
        return None
    num_prompt = len(run.token_ids) - run.num_output_tokens
    return PenaltyState(run.token_ids[:num_prompt], run.token_ids[num_prompt:])


def _counts(penalties: PenaltyState | None, token_id: int) -> PenaltyCounts:
    if penalties is None:
        return PenaltyCounts()
    penalties.add(token_id)
    prompt_ids, output_ids, output_counts = penalties.export()
    return PenaltyCounts(tuple(prompt_ids), dict(zip(output_ids, output_counts, strict=True)))
