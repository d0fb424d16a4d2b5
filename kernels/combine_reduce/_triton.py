"""The combine's sum on Hopper, alone or with the next layer's first norm: memory bound, every row is read once."""

import torch
import triton
import triton.language as tl

from kernels.launch import launch_options
from kernels.numerics import GROUP, Fp8, empty_fp8
from kernels.quant_fp8._triton import scale_of, to_fp8

_BLOCK = 1024


@triton.jit
def weighted_sum(rows_ptr, row_idx_ptr, weights_ptr, column, valid, rows_row, TOP_K: tl.constexpr):
    """Sum of one token's rows at `column`, in fp32; unrolled, so that all rows are in flight at once."""
    total = tl.zeros(column.shape, tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(row_idx_ptr + k)
        weight = tl.where(row >= 0, tl.load(weights_ptr + k), 0.0)  # a weight without a row may be NaN
        source = rows_ptr + tl.maximum(row, 0).to(tl.int64) * rows_row + column
        x = tl.load(source, mask=valid & ((row + column * 0) >= 0), other=0.0)
        total += x.to(tl.float32) * weight
    return total


@triton.jit
def combine_kernel(
    rows_ptr, row_idx_ptr, weights_ptr, shared_ptr, out_ptr, hidden, rows_row, shared_row,
    SHARED: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """A program sums BLOCK columns of one token."""
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = column < hidden
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = weighted_sum(rows_ptr, row_idx_ptr + token * TOP_K, weights_ptr + token * TOP_K, column, valid, rows_row, TOP_K)
    if SHARED:
        total += tl.load(shared_ptr + token * shared_row + column, mask=valid, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * hidden + column, total.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit
def combine_norm_kernel(
    rows_ptr, row_idx_ptr, weights_ptr, shared_ptr, residual_ptr, norm_ptr, total_ptr, data_ptr, scale_ptr,
    hidden, pitch, rows_row, shared_row, residual_row, eps,
    SHARED: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):
    """A program takes one token, held as GROUPS (a power of two) runs of 128 columns."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    valid = column < hidden
    norm_weight = tl.load(norm_ptr + column, mask=valid, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dtype = rows_ptr.dtype.element_ty
    residual = tl.load(residual_ptr + token * residual_row + column, mask=valid, other=0.0).to(tl.float32)
    x = weighted_sum(rows_ptr, row_idx_ptr + token * TOP_K, weights_ptr + token * TOP_K, column, valid, rows_row, TOP_K)
    if SHARED:
        x += tl.load(shared_ptr + token * shared_row + column, mask=valid, other=0.0).to(tl.float32)
    total = (x.to(dtype).to(tl.float32) + residual).to(dtype)
    target = token * hidden + column
    tl.store(total_ptr + target, total, mask=valid)
    x = total.to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x) / hidden + eps) * norm_weight.to(tl.float32)).to(dtype).to(tl.float32)
    scale = scale_of(normed, 1)
    # eight columns a thread, as the bf16 accesses have: sixteen would move every row through shared memory
    tl.store(data_ptr + tl.max_contiguous(target, [1, 8]), to_fp8(normed, scale[:, None]), mask=valid)
    tl.store(scale_ptr + group * pitch + token, scale, mask=group < hidden // 128)


def combine_reduce(
    rows: torch.Tensor, row_idx: torch.Tensor, topk_weights: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    """See kernels.combine_reduce.combine_reduce."""
    num_tokens, top_k = row_idx.shape
    hidden = rows.shape[1]
    out = torch.empty((num_tokens, hidden), dtype=rows.dtype, device=rows.device)
    if out.numel():
        block = min(_BLOCK, triton.next_power_of_2(hidden))
        combine_kernel[(triton.cdiv(hidden, block), num_tokens)](
            rows, row_idx, topk_weights, shared, out, hidden, rows.stride(0), 0 if shared is None else shared.stride(0),
            SHARED=shared is not None, TOP_K=top_k, BLOCK=block, num_warps=max(1, block // 256), **launch_options(),
        )
    return out


def combine_norm_quant(
    rows: torch.Tensor, row_idx: torch.Tensor, topk_weights: torch.Tensor, shared: torch.Tensor | None, residual: torch.Tensor,
    weight: torch.Tensor, eps: float,
) -> tuple[Fp8, torch.Tensor]:
    """See kernels.combine_reduce.combine_add_rms_norm_quant."""
    num_tokens, top_k = row_idx.shape
    hidden = rows.shape[1]
    total = torch.empty((num_tokens, hidden), dtype=rows.dtype, device=rows.device)
    out = empty_fp8(num_tokens, hidden, device=rows.device)
    if total.numel():
        combine_norm_kernel[(num_tokens,)](
            rows, row_idx, topk_weights, shared, residual, weight, total, *out, hidden, out.scale.stride(1), rows.stride(0),
            0 if shared is None else shared.stride(0), residual.stride(0), eps, SHARED=shared is not None, TOP_K=top_k,
            GROUPS=triton.next_power_of_2(hidden // GROUP), num_warps=max(1, min(8, hidden // 768)), **launch_options(),
        )
    return out, total
