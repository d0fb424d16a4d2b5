"""top-k, top-p and min-p of many rows at once, each row by its own parameters.

A filter keeps the head of the row's tokens in the order "higher logit first, of equal ones the lower id", so top_k 1 is the
best token and exactly top_k tokens stay. Order of work: top-k, then top-p over what is left (renormalised), then min-p.
"""

import math
from collections.abc import Sequence

import torch

from services.model.params import SamplingParams

_WINDOW = 256  # best tokens looked at first; only rows whose top-p set is larger cost a sort of the whole vocabulary
_INT64_MIN = -(2**63)


def filter_logits(x: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Logits with -inf where a filter drops the token; the best token always stays.

    x        [rows, vocab] fp32, after penalties and temperature; not written to
    returns  [rows, vocab] fp32; `x` itself when no row filters
    """
    sorting = [row for row, p in enumerate(params) if 0 < p.top_k < x.shape[1] or p.top_p < 1.0]
    if len(sorting) == len(params):
        x = _top_k_top_p(x, params)
    elif sorting:
        x = x.index_copy(0, torch.tensor(sorting), _top_k_top_p(x[sorting], [params[row] for row in sorting]))
    if any(p.min_p > 0.0 for p in params):
        # p >= min_p * p_max, in logits: no normaliser, so the bound is exact
        logs = torch.tensor([math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params])
        x = x.masked_fill(x < x.amax(-1, keepdim=True) + logs[:, None], -torch.inf)
    return x


def top_values(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best of each row [rows, n], best first, of equal ones the lower index: values and indices, both [rows, k]."""
    indices = _key_indices(_ordered_keys(x).topk(k, dim=-1).values, x.shape[1])
    return x.gather(1, indices), indices


def _top_k_top_p(x: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    vocab = x.shape[1]
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params])[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float32)[:, None]
    keys = _ordered_keys(x)
    best = keys.topk(min(vocab, max([_WINDOW, *(p.top_k for p in params if p.top_k < vocab)])), dim=-1).values
    x = x.masked_fill(keys < _cut(best, top_k, top_k < vocab), -torch.inf)
    if all(p.top_p >= 1.0 for p in params):
        return x
    probs = x.softmax(-1)
    num_kept = _top_p_count(probs, best, top_p)
    if bool(((num_kept == best.shape[1]) & (top_k > best.shape[1])).any()):
        best = keys.sort(dim=-1, descending=True).values
        num_kept = _top_p_count(probs, best, top_p)
    return x.masked_fill(keys < _cut(best, num_kept, top_p < 1.0), -torch.inf)


def _top_p_count(probs: torch.Tensor, best: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """How many of the best stay, [rows, 1]: a token does while the tokens before it hold less than top_p together."""
    falling = probs.gather(1, _key_indices(best, probs.shape[1]))
    before = falling.cumsum(-1)[:, :-1]
    return 1 + (before < top_p).sum(-1, keepdim=True)


def _cut(best: torch.Tensor, num_kept: torch.Tensor, enabled: torch.Tensor) -> torch.Tensor:
    """Key of the last token that stays, [rows, 1]; below every key where the filter is off."""
    return best.gather(1, num_kept.clamp(max=best.shape[1]) - 1).masked_fill(~enabled, _INT64_MIN)


def _ordered_keys(x: torch.Tensor) -> torch.Tensor:
    """Distinct int64 keys of each row [rows, n] fp32: larger for a higher value and, of equal ones, for the lower index."""
    bits = (x + 0.0).view(torch.int32)  # + 0.0 makes -0 equal to 0
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return (ascending << 32) + torch.arange(x.shape[1] - 1, -1, -1)


def _key_indices(keys: torch.Tensor, n: int) -> torch.Tensor:
    """Index of each key within its row of n."""
    return (n - 1) - (keys & 0xFFFFFFFF)
