"""Chooses experts: the group-limited gates of DeepSeek V2 and V3 and the plain top-k of other MoE models.

Ties are part of the contract: of equal scores the lowest index wins, among groups as among experts. Scores are fp32, and an exponential
may differ by an ulp between devices: experts whose scores lie that near to each other may swap places, nothing else may.
"""

import math
from typing import NamedTuple, Protocol

import torch

from kernels.backend import Backend, select

_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
_SCORINGS = ("sigmoid", "softmax")


class GateRule(NamedTuple):
    """How scores become experts and weights: the keyword arguments of `topk_gate`, checked."""

    top_k: int
    num_groups: int
    topk_groups: int
    num_best: int  # of a group's experts, whose biased scores make the group's score
    scoring: str
    normalize: bool
    scale: float


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

    logits   [num_tokens, num_experts]  float32 (float64 in tests); a group is num_experts / num_groups neighbours; rows may be strided,
             with unit stride in them
    bias     [num_experts] or None: added to the scores for choosing only; of the logits' dtype, contiguous
    method   Hugging Face's topk_method: "noaux_tc" scores a group by the sum of its two best biased scores (V3),
             "group_limited_greedy" by its best (V2), "greedy" has no groups
    scoring, normalize, scale   "sigmoid" or "softmax" of the logits; weights are divided by their sum, then multiplied by
             the scale, here and only here
    returns  topk_idx [num_tokens, top_k] int64 by falling biased score (all different; in groups not chosen it is -inf, which
             a bias may be too), topk_weights [num_tokens, top_k] of the logits' dtype
    """
    assert logits.ndim == 2, f"{logits.shape=}"
    rule = _rule(logits.shape[1], top_k, num_groups, topk_groups, method, scoring, normalize, scale)
    return select(IMPLEMENTATIONS, backend, logits.device.type, logits.dtype).topk_gate(logits, bias, rule)


def gate(
    x: torch.Tensor,
    w: torch.Tensor,
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
    """The router's GEMM and `topk_gate` on its logits; on a GPU two dependent launches, the first of which splits `hidden`.

    x        [num_tokens, hidden]   bf16 (float32 in tests), unit stride in the last dimension
    w        [num_experts, hidden]  same dtype, unit stride in the last dimension
    bias     [num_experts] float32, contiguous, or None
    returns  topk_idx [num_tokens, top_k] int64, topk_weights [num_tokens, top_k] float32; the rest as in `topk_gate`. Logits are
             accumulated in float32, in an order that depends on the shapes alone: the same call gives the same bits
    """
    _check_router(x, w)
    rule = _rule(w.shape[0], top_k, num_groups, topk_groups, method, scoring, normalize, scale)
    return select(IMPLEMENTATIONS, backend, x.device.type, x.dtype).gate(x, w, bias, rule)


def gate_logits(x: torch.Tensor, w: torch.Tensor, *, backend: Backend = "auto") -> torch.Tensor:
    """x [num_tokens, hidden] @ w [num_experts, hidden].T -> [num_tokens, num_experts] float32; arguments as in `gate`."""
    _check_router(x, w)
    return select(IMPLEMENTATIONS, backend, x.device.type, x.dtype).gate_logits(x, w)


def _check_router(x: torch.Tensor, w: torch.Tensor) -> None:
    assert x.ndim == 2 and w.ndim == 2 and x.shape[1] == w.shape[1] and x.dtype == w.dtype, f"{x.shape=} {w.shape=} {x.dtype=} {w.dtype=}"
    assert x.stride(1) == 1 and w.stride(1) == 1, f"{x.stride()=} {w.stride()=}"


def _rule(
    num_experts: int, top_k: int, num_groups: int, topk_groups: int, method: str, scoring: str, normalize: bool, scale: float
) -> GateRule:
    assert num_experts % num_groups == 0, f"{num_experts=} {num_groups=}"
    assert 0 < topk_groups <= num_groups and 0 < top_k <= num_experts, f"{topk_groups=} {num_groups=} {top_k=} {num_experts=}"
    assert method in _METHODS and scoring in _SCORINGS, f"{method=} {scoring=}"
    if method == "greedy":
        num_groups = topk_groups = 1
    return GateRule(top_k, num_groups, topk_groups, 2 if method == "noaux_tc" else 1, scoring, normalize, scale)


def router_torch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`gate_logits` by torch, on a GPU by cuBLAS."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch.mm(x, w.T, out_dtype=torch.float32)
    return x.float() @ w.float().T


class _Gate(Protocol):
    """A backend's three functions; the public ones above are their contracts."""

    def topk_gate(self, logits: torch.Tensor, bias: torch.Tensor | None, rule: GateRule) -> tuple[torch.Tensor, torch.Tensor]: ...

    def gate(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, rule: GateRule) -> tuple[torch.Tensor, torch.Tensor]: ...

    def gate_logits(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor: ...


class _Torch:
    """Stable sorts, which keep equal scores in index order; `torch.topk` promises no order."""

    def topk_gate(self, logits: torch.Tensor, bias: torch.Tensor | None, rule: GateRule) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.sigmoid(logits) if rule.scoring == "sigmoid" else torch.softmax(logits, dim=-1)
        topk_idx = self.choose(scores if bias is None else scores + bias, rule)
        weights = scores.gather(1, topk_idx)
        if rule.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return topk_idx, weights * rule.scale

    def gate(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, rule: GateRule) -> tuple[torch.Tensor, torch.Tensor]:
        return self.topk_gate(self.gate_logits(x, w), bias, rule)

    def gate_logits(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return router_torch(x, w)

    def choose(self, biased: torch.Tensor, rule: GateRule) -> torch.Tensor:
        if rule.topk_groups < rule.num_groups:
            groups = biased.unflatten(1, (rule.num_groups, -1))  # [num_tokens, num_groups, experts a group]
            best = groups.topk(min(rule.num_best, groups.shape[2]), dim=-1, sorted=False).values  # values only: ties do not matter
            ranked = best.sum(dim=-1).sort(dim=-1, descending=True, stable=True).indices  # [num_tokens, num_groups]
            # -inf, not 0: a biased score may be negative
            masked = biased.new_zeros(ranked.shape).scatter_(1, ranked[:, rule.topk_groups :], -torch.inf)
            biased = (groups + masked.unsqueeze(2)).flatten(1)
        return biased.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]


class _Reference(_Torch):
    """Token by token: groups by the sum of their best scores, then the experts inside them."""

    def choose(self, biased: torch.Tensor, rule: GateRule) -> torch.Tensor:
        size = biased.shape[1] // rule.num_groups
        chosen: list[list[int]] = []
        for row in biased:
            group_scores = [float(group.sort(descending=True).values[: rule.num_best].sum()) for group in row.split(size)]
            groups = sorted(range(rule.num_groups), key=lambda g: (-group_scores[g], g))[: rule.topk_groups]
            masked = [score if expert // size in groups else -math.inf for expert, score in enumerate(row.tolist())]
            chosen.append(sorted(range(len(masked)), key=lambda expert: (-masked[expert], expert))[: rule.top_k])
        return torch.tensor(chosen, dtype=torch.int64, device=biased.device).view(-1, rule.top_k)


class _Triton:
    """Scores, groups, a partial sort that tracks indices, and weights in one launch; the router's GEMM in one before it."""

    def topk_gate(self, logits: torch.Tensor, bias: torch.Tensor | None, rule: GateRule) -> tuple[torch.Tensor, torch.Tensor]:
        from kernels.topk_gate._triton import topk_gate_triton

        return topk_gate_triton(logits, bias, rule)

    def gate(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, rule: GateRule) -> tuple[torch.Tensor, torch.Tensor]:
        from kernels.topk_gate._triton import gate_triton

        return gate_triton(x, w, bias, rule)

    def gate_logits(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        from kernels.topk_gate._triton import gate_logits_triton

        return gate_logits_triton(x, w)


IMPLEMENTATIONS: dict[str, _Gate] = {"triton": _Triton(), "torch": _Torch(), "reference": _Reference()}
