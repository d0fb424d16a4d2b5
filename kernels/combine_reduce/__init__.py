"""Adds up what a token's experts gave: the weighted sum of their rows, plus the shared expert's.

Alone, or with what the next layer begins with: the residual's addition, the norm, the quantisation. Triton takes rows of an even length
at even strides from an even element on.
"""

import torch

from kernels.backend import Backend, select
from kernels.numerics import GROUP, Fp8
from kernels.rms_norm import add_rms_norm_quant


def combine_reduce(
    rows: torch.Tensor, row_idx: torch.Tensor, topk_weights: torch.Tensor, shared: torch.Tensor | None, *, backend: Backend = "auto"
) -> torch.Tensor:
    """Sum each token's rows in fp32, weighted.

    rows          [num_rows, hidden]   bf16 or fp32, unit stride in the last dimension: outputs of experts
    row_idx       [num_tokens, top_k]  int32, contiguous: where in `rows` the token's outputs are; -1: none, its weight means nothing
    topk_weights  [num_tokens, top_k]  fp32, contiguous
    shared        [num_tokens, hidden]  dtype of rows, unit stride in the last dimension: added with weight 1; or None
    returns       [num_tokens, hidden]  dtype of rows, new memory; a token without rows gets its shared row or zeros. Rows of `rows`
                  that no token names are not read
    """
    _check(rows, row_idx, topk_weights, shared)
    return select(IMPLEMENTATIONS, backend, rows.device.type, rows.dtype)(rows, row_idx, topk_weights, shared)


def combine_add_rms_norm_quant(
    rows: torch.Tensor, row_idx: torch.Tensor, topk_weights: torch.Tensor, shared: torch.Tensor | None, residual: torch.Tensor,
    weight: torch.Tensor, *, eps: float, backend: Backend = "auto",
) -> tuple[Fp8, torch.Tensor]:
    """Return (quant_fp8(rms_norm(total)), total) with total = combine_reduce(...) + residual, as the two ops give it in turn.

    residual  [num_tokens, hidden]  dtype of rows, unit stride in the last dimension, kept; hidden % 128 == 0
    weight    [hidden]              same dtype, contiguous
    """
    _check(rows, row_idx, topk_weights, shared)
    assert residual.shape == (row_idx.shape[0], rows.shape[1]) and residual.stride(1) == 1, f"{residual.shape=} {residual.stride()=}"
    assert weight.shape == rows.shape[1:] and weight.is_contiguous() and rows.shape[1] % GROUP == 0, f"{weight.shape=} {rows.shape=}"
    combine = select(NORM_IMPLEMENTATIONS, backend, rows.device.type, rows.dtype)
    return combine(rows, row_idx, topk_weights, shared, residual, weight, eps)


def _check(rows: torch.Tensor, row_idx: torch.Tensor, topk_weights: torch.Tensor, shared: torch.Tensor | None) -> None:
    assert rows.ndim == 2 and rows.stride(1) == 1 and row_idx.shape == topk_weights.shape, f"{rows.shape=} {row_idx.shape=}"
    assert row_idx.dtype == torch.int32 and row_idx.is_contiguous() and topk_weights.is_contiguous(), f"{row_idx=}"
    assert shared is None or (shared.shape == (row_idx.shape[0], rows.shape[1]) and shared.stride(1) == 1), f"{shared=}"


def combine_reduce_reference(
    rows: torch.Tensor, row_idx: torch.Tensor, topk_weights: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    """Token by token."""
    total = torch.zeros((row_idx.shape[0], rows.shape[1]), dtype=torch.float32, device=rows.device)
    for token, indices in enumerate(row_idx.tolist()):
        for k, row in enumerate(indices):
            if row >= 0:
                total[token] += topk_weights[token, k] * rows[row].float()
    return (total if shared is None else total + shared.float()).to(rows.dtype)


def combine_reduce_torch(
    rows: torch.Tensor, row_idx: torch.Tensor, topk_weights: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    """One gather of all rows."""
    named = (row_idx >= 0).unsqueeze(-1)  # [num_tokens, top_k, 1]
    gathered = rows[row_idx.clamp(min=0)] if rows.shape[0] else rows.new_zeros((*row_idx.shape, rows.shape[1]))
    total = torch.where(named, gathered.float() * topk_weights.unsqueeze(-1), 0.0).sum(1)
    return (total if shared is None else total + shared.float()).to(rows.dtype)


def combine_reduce_triton(
    rows: torch.Tensor, row_idx: torch.Tensor, topk_weights: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    """One launch, a program some columns of a token."""
    from kernels.combine_reduce._triton import combine_reduce

    return combine_reduce(rows, row_idx, topk_weights, shared)


def combine_add_rms_norm_quant_reference(
    rows: torch.Tensor, row_idx: torch.Tensor, topk_weights: torch.Tensor, shared: torch.Tensor | None, residual: torch.Tensor,
    weight: torch.Tensor, eps: float,
) -> tuple[Fp8, torch.Tensor]:
    """One after the other."""
    combined = combine_reduce_reference(rows, row_idx, topk_weights, shared)
    normed, _, total = add_rms_norm_quant(combined, residual, weight, eps=eps, keep_normed=False, backend="reference")
    return normed, total


def combine_add_rms_norm_quant_triton(
    rows: torch.Tensor, row_idx: torch.Tensor, topk_weights: torch.Tensor, shared: torch.Tensor | None, residual: torch.Tensor,
    weight: torch.Tensor, eps: float,
) -> tuple[Fp8, torch.Tensor]:
    """One launch, a program a token."""
    from kernels.combine_reduce._triton import combine_norm_quant

    return combine_norm_quant(rows, row_idx, topk_weights, shared, residual, weight, eps)


NORM_IMPLEMENTATIONS = {"triton": combine_add_rms_norm_quant_triton, "reference": combine_add_rms_norm_quant_reference}
IMPLEMENTATIONS = {"triton": combine_reduce_triton, "torch": combine_reduce_torch, "reference": combine_reduce_reference}
