"""Routed experts: every token goes through its top-k experts' gated MLPs, and their weighted outputs are summed."""

from collections.abc import Sequence

import torch

from kernels.backend import Backend, select
from kernels.linear import Linear
from kernels.silu_mul import silu_mul


def grouped_experts(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: Sequence[Linear],
    down: Sequence[Linear],
    *,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Sum over a token's experts e of weight * down[e](silu_mul(gate_up[e](x))).

    x             [num_tokens, hidden]
    topk_idx      [num_tokens, top_k] int64, a token's all different
    topk_weights  [num_tokens, top_k]  x's dtype
    gate_up       one a expert, hidden -> 2 * intermediate (gate columns first)
    down          one a expert, intermediate -> hidden
    returns       [num_tokens, hidden]  x's dtype; experts without tokens do not run
    """
    assert topk_idx.shape == topk_weights.shape and topk_idx.shape[0] == x.shape[0], f"{x.shape=} {topk_idx.shape=} {topk_weights.shape=}"
    assert len(gate_up) == len(down), f"{len(gate_up)=} {len(down)=}"
    return select(IMPLEMENTATIONS, backend)(x, topk_idx, topk_weights, gate_up, down)


def grouped_experts_reference(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, gate_up: Sequence[Linear], down: Sequence[Linear]
) -> torch.Tensor:
    """Token by token, choice by choice."""
    out = torch.zeros_like(x)
    for token, experts in enumerate(topk_idx.tolist()):
        for choice, expert in enumerate(experts):
            row = down[expert](silu_mul(gate_up[expert](x[token : token + 1]), backend="reference"))
            out[token] += topk_weights[token, choice] * row[0]
    return out


def grouped_experts_torch(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, gate_up: Sequence[Linear], down: Sequence[Linear]
) -> torch.Tensor:
    """Rows sorted by expert, a GEMM an expert that has rows.

    Faster at every batch size than all experts on all tokens in two wide GEMMs: 8 experts of 256 x 128, top 2, a core of
    Zen 5: 70 | 140 us at 1 token, 151 | 279 at 4, 255 | 352 at 8, 477 | 732 at 32 (sorted | all).
    """
    if x.shape[0] == 1:
        return _one_token(x, topk_idx, topk_weights, gate_up, down)
    if x.shape[0] == 0:
        return torch.empty_like(x)
    expert_of_row = topk_idx.flatten()
    order = expert_of_row.argsort(stable=True)  # [num_tokens * top_k]
    counts = torch.bincount(expert_of_row, minlength=len(gate_up)).tolist()
    experts, sizes = [expert for expert, count in enumerate(counts) if count], [count for count in counts if count]
    token_of_row = order // topk_idx.shape[1]
    rows = x.index_select(0, token_of_row).split_with_sizes(sizes)
    activated = silu_mul(torch.cat([gate_up[expert](part) for expert, part in zip(experts, rows, strict=True)]), backend="torch")
    activated *= topk_weights.flatten().index_select(0, order).unsqueeze(1)  # before down: fewer columns than after
    parts = activated.split_with_sizes(sizes)
    routed = torch.cat([down[expert](part) for expert, part in zip(experts, parts, strict=True)])  # [num_tokens * top_k, hidden]
    return torch.zeros_like(x).index_add_(0, token_of_row, routed)


def _one_token(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, gate_up: Sequence[Linear], down: Sequence[Linear]
) -> torch.Tensor:
    """Nothing to sort: saves 25 us a layer, a twentieth of a whole step of one request."""
    experts = topk_idx.flatten().tolist()
    activated = silu_mul(torch.cat([gate_up[expert](x) for expert in experts]), backend="torch")
    parts = activated.mul_(topk_weights.t()).split_with_sizes([1] * len(experts))
    return torch.cat([down[expert](part) for expert, part in zip(experts, parts, strict=True)]).sum(dim=0, keepdim=True)


IMPLEMENTATIONS = {"torch": grouped_experts_torch, "reference": grouped_experts_reference}
