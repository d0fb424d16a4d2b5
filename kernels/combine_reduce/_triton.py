"""The combine's sum on Hopper, alone or with the next layer's first norm: memory bound, every row is read once."""

import torch
import triton
import triton.language as tl

from kernels.launch import in_pairs, launch_options
from kernels.numerics import GROUP, Fp8, empty_fp8
from kernels.quant_fp8 import _triton_pairs as pairs
from kernels.rms_norm._triton import normed_pairs, quantise_pairs

_BLOCK = 512
_NUM_WARPS = 1


@triton.jit
def _sum(rows_ptr, row_idx_ptr, weights_ptr, shared_ptr, pair, valid, rows_row, SHARED: tl.constexpr, TOP_K: tl.constexpr):
    """One token's rows at `pair`, weighted, and its shared row: (even, odd) in fp32. Unrolled, so that all rows are in flight at once."""
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    total_even, total_odd = tl.zeros(pair.shape, tl.float32), tl.zeros(pair.shape, tl.float32)
    if SHARED:
        total_even, total_odd = pairs.widen(pairs.load(shared_ptr, pair, valid), dtype)
    for k in tl.static_range(TOP_K):
        row = tl.load(row_idx_ptr + k)
        weight = tl.where(row >= 0, tl.load(weights_ptr + k), 0.0)  # a weight without a row may be NaN
        named = valid & (row + pair * 0 >= 0)
        even, odd = pairs.widen(pairs.load(rows_ptr + tl.maximum(row, 0).to(tl.int64) * rows_row, pair, named), dtype)
        total_even += even * weight
        total_odd += odd * weight
    return total_even, total_odd


@triton.jit
def combine_kernel(
    rows_ptr, row_idx_ptr, weights_ptr, shared_ptr, out_ptr, rows_row, shared_row,
    HIDDEN: tl.constexpr, SHARED: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """A program sums BLOCK columns of one token."""
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    pair = (tl.program_id(0) % BLOCKS) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    valid = pair < HIDDEN // 2
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    even, odd = _sum(
        rows_ptr, row_idx_ptr + token * TOP_K, weights_ptr + token * TOP_K, shared_ptr + token * shared_row if SHARED else None,
        pair, valid, rows_row, SHARED, TOP_K,
    )
    pairs.store(out_ptr + token * HIDDEN, pair, pairs.hold(even, odd, out_ptr.dtype.element_ty), valid)


@triton.jit
def combine_norm_kernel(
    rows_ptr, row_idx_ptr, weights_ptr, shared_ptr, residual_ptr, norm_ptr, total_ptr, data_ptr, scale_ptr,
    pitch, rows_row, shared_row, residual_row, eps,
    HIDDEN: tl.constexpr, SHARED: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):
    """A program takes one token, held as GROUPS (a power of two) runs of 128 columns."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    pair = group[:, None] * 64 + tl.arange(0, 64)[None, :]
    valid = pair < HIDDEN // 2
    weight = pairs.load(norm_ptr, pair, valid)
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    residual = pairs.load(residual_ptr + token * residual_row, pair, valid)
    even, odd = _sum(
        rows_ptr, row_idx_ptr + token * TOP_K, weights_ptr + token * TOP_K, shared_ptr + token * shared_row if SHARED else None,
        pair, valid, rows_row, SHARED, TOP_K,
    )
    total = pairs.add(pairs.hold(even, odd, dtype), residual, dtype)
    pairs.store(total_ptr + token * HIDDEN, pair, total, valid)
    normed = normed_pairs(total, weight, HIDDEN, eps, dtype)
    quantise_pairs(data_ptr, scale_ptr, token, group, pair, normed, valid, pitch, HIDDEN, dtype)


def combine_reduce(
    rows: torch.Tensor, row_idx: torch.Tensor, topk_weights: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    """See kernels.combine_reduce.combine_reduce."""
    num_tokens, top_k = row_idx.shape
    hidden = rows.shape[1]
    assert hidden % 2 == 0 and in_pairs(rows, shared), f"{rows.stride()=}, or an odd offset"
    out = torch.empty((num_tokens, hidden), dtype=rows.dtype, device=rows.device)
    if out.numel():
        block = min(_BLOCK, triton.next_power_of_2(hidden))
        combine_kernel[(num_tokens * triton.cdiv(hidden, block),)](
            rows, row_idx, topk_weights, shared, out, rows.stride(0), 0 if shared is None else shared.stride(0),
            HIDDEN=hidden, SHARED=shared is not None, TOP_K=top_k, BLOCK=block, num_warps=_NUM_WARPS, **launch_options(),
        )
    return out


def combine_norm_quant(
    rows: torch.Tensor, row_idx: torch.Tensor, topk_weights: torch.Tensor, shared: torch.Tensor | None, residual: torch.Tensor,
    weight: torch.Tensor, eps: float,
) -> tuple[Fp8, torch.Tensor]:
    """See kernels.combine_reduce.combine_add_rms_norm_quant."""
    num_tokens, top_k = row_idx.shape
    hidden = rows.shape[1]
    assert in_pairs(rows, shared, residual, weight), f"{rows.stride()=} {residual.stride()=}, or an odd offset"
    total = torch.empty((num_tokens, hidden), dtype=rows.dtype, device=rows.device)
    out = empty_fp8(num_tokens, hidden, device=rows.device)
    if total.numel():
        groups = triton.next_power_of_2(hidden // GROUP)
        combine_norm_kernel[(num_tokens,)](
            rows, row_idx, topk_weights, shared, residual, weight, total, *out, out.scale.stride(1), rows.stride(0),
            0 if shared is None else shared.stride(0), residual.stride(0), eps, HIDDEN=hidden, SHARED=shared is not None, TOP_K=top_k,
            GROUPS=groups, num_warps=max(1, min(8, groups // 8)), maxnreg=128, **launch_options(),
        )
    return out, total
