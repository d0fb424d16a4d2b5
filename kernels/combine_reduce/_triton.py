"""The combine's sum on Hopper: memory bound, all rows of a token are in flight at once, every one read once."""

import torch
import triton
import triton.language as tl

from kernels.launch import launch_options

_BLOCK = 1024


@triton.jit
def combine_kernel(
    rows_ptr, row_idx_ptr, weights_ptr, shared_ptr, out_ptr, hidden, rows_row, shared_row,
    SHARED: tl.constexpr, TOP_K: tl.constexpr, PADDED_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """A program sums BLOCK columns of one token; PADDED_K >= TOP_K is a power of two."""
    token = tl.program_id(1).to(tl.int64)
    k, column = tl.arange(0, PADDED_K), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = column < hidden
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(row_idx_ptr + token * TOP_K + k, mask=k < TOP_K, other=-1)
    weight = tl.load(weights_ptr + token * TOP_K + k, mask=k < TOP_K, other=0.0)
    weight = tl.where(row >= 0, weight, 0.0)  # a weight without a row may be NaN
    total = tl.zeros((BLOCK,), tl.float32)
    if SHARED:
        total = tl.load(shared_ptr + token * shared_row + column, mask=valid, other=0.0).to(tl.float32)
    source = rows_ptr + row.to(tl.int64)[:, None] * rows_row + column[None, :]
    x = tl.load(source, mask=(row >= 0)[:, None] & valid[None, :], other=0.0).to(tl.float32)
    total += tl.sum(x * weight[:, None], axis=0)
    tl.store(out_ptr + token * hidden + column, total.to(out_ptr.dtype.element_ty), mask=valid)


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
            SHARED=shared is not None, TOP_K=top_k, PADDED_K=triton.next_power_of_2(max(1, top_k)), BLOCK=block,
            num_warps=max(1, block // 256), **launch_options(),
        )
    return out
