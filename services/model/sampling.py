"""From logits to tokens: one batched sampler for Mono and both pools.

Order: penalties (`penalties.py`), min_tokens mask, temperature, top-k, top-p, min-p (`filters.py`), then the best of
logits + Gumbel noise (`philox.py`). Temperature 0 takes the best penalised logit: no filter and no noise can change it.
Of equal scores the lowest id wins. Logprobs are log_softmax of the logits as they came, in every mode.

A row's token is a function of its own logits and RowState alone, bit for bit: nothing here reduces across rows, and what
decides how far a batch is sorted or padded never reaches a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.model.filters import filter_logits, top_values
from services.model.params import SamplingParams
from services.model.penalties import PenaltyState
from services.model.philox import gumbel_noise


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """What the sampler must know of one request for one token."""

    params: SamplingParams
    position: int  # absolute index (prompt included) of the token being chosen
    num_output_tokens: int  # output tokens before it, those of earlier attempts too
    eos_token_ids: tuple[int, ...] = ()
    choice: int = 0
    penalties: PenaltyState | None = None  # needed when params.has_penalties


@dataclass(frozen=True, slots=True)
class Sampled:
    """The batch's tokens; row i belongs to rows[i]."""

    token_ids: torch.Tensor  # [b] int64
    logprobs: torch.Tensor | None  # [b] fp32, of the chosen token; NaN for a row that did not ask; None when none did
    top_ids: torch.Tensor | None  # [b, k] int64, best first, k = the most that a row asked for; None when none did
    top_logprobs: torch.Tensor | None  # [b, k] fp32
    scores: torch.Tensor | None  # [b, vocab] fp32 after filters and noise, when asked for


def sample(logits: torch.Tensor, rows: Sequence[RowState], *, return_scores: bool = False) -> Sampled:
    """Choose the next token of each row.

    logits  [b, vocab] fp32 on CPU, not written to
    rows    b states, in the same order; parameters may differ freely from row to row
    """
    assert logits.ndim == 2 and logits.shape[0] == len(rows), f"{logits.shape=} {len(rows)=}"
    assert logits.dtype == torch.float32, f"{logits.dtype=}"
    scores = _add_noise(adjust_logits(logits, rows), rows)
    token_ids = scores.argmax(-1)
    logprobs, top_ids, top_logprobs = _logprobs(logits, token_ids, rows)
    return Sampled(token_ids, logprobs, top_ids, top_logprobs, scores if return_scores else None)


def adjust_logits(logits: torch.Tensor, rows: Sequence[RowState]) -> torch.Tensor:
    """Logits [b, vocab] after penalties and min_tokens mask; `logits` itself where no row changes them."""
    touched = [i for i, row in enumerate(rows) if row.params.has_penalties or row.num_output_tokens < row.params.min_tokens]
    if not touched:
        return logits
    adjusted = logits.clone()
    for i in touched:
        row, params = rows[i], rows[i].params
        if params.has_penalties:
            assert row.penalties is not None, "a row with penalties needs its PenaltyState"
            row.penalties.apply(adjusted[i], params)
        if row.num_output_tokens < params.min_tokens:
            ending = {*params.stop_token_ids, *(() if params.ignore_eos else row.eos_token_ids)}
            adjusted[i, list(ending)] = -torch.inf
    return adjusted


def _add_noise(x: torch.Tensor, rows: Sequence[RowState]) -> torch.Tensor:
    """Temperature, filters and noise for the rows that sample; greedy rows stay as they are."""
    noisy = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if not noisy:
        return x
    picked = rows if len(noisy) == len(rows) else [rows[i] for i in noisy]
    temperatures = torch.tensor([row.params.temperature for row in picked], dtype=torch.float32)
    scaled = (x if picked is rows else x[noisy]) / temperatures[:, None]
    scores = filter_logits(scaled, [row.params for row in picked])
    seeds, choices, positions = zip(*((row.params.seed, row.choice, row.position) for row in picked), strict=True)
    scores = scores + gumbel_noise(seeds, choices, positions, x.shape[1])
    return scores if picked is rows else x.index_copy(0, torch.tensor(noisy), scores)


def _logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, rows: Sequence[RowState]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Sampled's logprobs, top_ids and top_logprobs; only rows that ask cost anything."""
    asking = [i for i, row in enumerate(rows) if row.params.logprobs >= 0]
    if not asking:
        return None, None, None
    b, index = len(rows), torch.tensor(asking)
    table = logits[asking].log_softmax(-1)  # [asking, vocab]
    chosen = torch.full((b,), torch.nan).index_copy(0, index, table.gather(1, token_ids[asking][:, None])[:, 0])
    k = min(max(row.params.logprobs for row in rows), logits.shape[1])
    if k == 0:
        return chosen, None, None
    values, ids = top_values(table, k)
    top_ids = torch.full((b, k), -1, dtype=torch.int64).index_copy(0, index, ids)
    return chosen, top_ids, torch.full((b, k), torch.nan).index_copy(0, index, values)
