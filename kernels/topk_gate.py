"""Chooses experts: the group-limited gates of DeepSeek V2 and V3 and the plain top-k of other MoE models.

Ties are part of the contract: of equal scores the lowest index wins, among groups as among experts.
"""

import math

import torch

from kernels.backend import Backend, select

_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
_SCORINGS = ("sigmoid", "softmax")


def topk_gate(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    top_k: int,
    num_groups: int = 1,
    topk_groups: int = 1,
    method: str = "noaux_tc",
    scoring: str = "sigmoid",
    normalize: bool = True,
    scale: float = 1.0,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `top_k` experts a token, inside its `topk_groups` best groups, and weigh them by their unbiased scores.

    logits   [num_tokens, num_experts]  float32 (float64 in tests); a group is num_experts / num_groups neighbours
    bias     [num_experts] or None: added to the scores for choosing only
    method   Hugging Face's topk_method: "noaux_tc" scores a group by the sum of its two best biased scores (V3),
             "group_limited_greedy" by its best (V2), "greedy" has no groups
    scoring, normalize, scale   "sigmoid" or "softmax" of the logits; weights are divided by their sum, then multiplied by
             the scale, here and only here
    returns  topk_idx [num_tokens, top_k] int64 by falling biased score (all different, experts of groups not chosen come
             last), topk_weights [num_tokens, top_k] of the logits' dtype
    """
    assert logits.ndim == 2 and logits.shape[1] % num_groups == 0, f"{logits.shape=} {num_groups=}"
    assert 0 < topk_groups <= num_groups and 0 < top_k <= logits.shape[1], f"{topk_groups=} {num_groups=} {top_k=} {logits.shape=}"
    assert method in _METHODS and scoring in _SCORINGS, f"{method=} {scoring=}"
    if method == "greedy":
        num_groups = topk_groups = 1
    scores = torch.sigmoid(logits) if scoring == "sigmoid" else torch.softmax(logits, dim=-1)
    biased = scores if bias is None else scores + bias
    num_best = 2 if method == "noaux_tc" else 1
    topk_idx = select(IMPLEMENTATIONS, backend)(biased, top_k, num_groups, topk_groups, num_best)
    weights = scores.gather(1, topk_idx)
    if normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return topk_idx, weights * scale


def choose_reference(biased: torch.Tensor, top_k: int, num_groups: int, topk_groups: int, num_best: int) -> torch.Tensor:
    """Token by token: groups by the sum of their `num_best` best scores, then the experts inside them."""
    size = biased.shape[1] // num_groups
    chosen: list[list[int]] = []
    for row in biased:
        group_scores = [float(group.sort(descending=True).values[:num_best].sum()) for group in row.split(size)]
        groups = sorted(range(num_groups), key=lambda g: (-group_scores[g], g))[:topk_groups]
        masked = [score if expert // size in groups else -math.inf for expert, score in enumerate(row.tolist())]
        chosen.append(sorted(range(len(masked)), key=lambda expert: (-masked[expert], expert))[:top_k])
    return torch.tensor(chosen, dtype=torch.int64).view(-1, top_k)


def choose_torch(biased: torch.Tensor, top_k: int, num_groups: int, topk_groups: int, num_best: int) -> torch.Tensor:
    """Stable sorts, which keep equal scores in index order; `torch.topk` promises no order."""
    if topk_groups < num_groups:
        groups = biased.unflatten(1, (num_groups, -1))  # [num_tokens, num_groups, experts a group]
        best = groups.topk(min(num_best, groups.shape[2]), dim=-1, sorted=False).values  # values only: ties do not matter
        ranked = best.sum(dim=-1).sort(dim=-1, descending=True, stable=True).indices  # [num_tokens, num_groups]
        # -inf, not 0: a biased score may be negative
        masked = biased.new_zeros(ranked.shape).scatter_(1, ranked[:, topk_groups:], -torch.inf)
        biased = (groups + masked.unsqueeze(2)).flatten(1)
    return biased.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


IMPLEMENTATIONS = {"torch": choose_torch, "reference": choose_reference}
