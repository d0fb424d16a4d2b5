"""RMSNorm on Hopper with what stands before and after it in one pass: memory bound, a row stays in one program's registers."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.launch import in_pairs, launch_options
from kernels.numerics import GROUP, empty_fp8
from kernels.quant_fp8 import _triton_pairs as pairs


class Normed(NamedTuple):
    """What `norm` was asked for; the rest is None."""

    quantised: Any
    normed: Any
    total: Any


@triton.jit
def normed_pairs(held, weight, WIDTH: tl.constexpr, eps, dtype: tl.constexpr):
    """rms_norm of a held row of WIDTH columns (zeros beyond) times a held weight, held."""
    even, odd = pairs.widen(held, dtype)
    root = tl.rsqrt(tl.sum(even * even + odd * odd) * (1.0 / WIDTH) + eps)
    weight_even, weight_odd = pairs.widen(weight, dtype)
    return pairs.hold(even * root * weight_even, odd * root * weight_odd, dtype)


@triton.jit
def quantise_pairs(data_ptr, scale_ptr, row, group, pair, held, mask, pitch, HIDDEN: tl.constexpr, dtype: tl.constexpr):
    """Store a held row [groups, 64] as FP8."""
    even, odd = pairs.widen(held, dtype)
    scale = pairs.scale_of(even, odd)
    even, odd = pairs.divide(even, odd, scale)
    pairs.store_fp8(data_ptr, row * (HIDDEN // 2), pair, even, odd, mask)
    tl.store(scale_ptr + group * pitch + row, scale, mask=group < HIDDEN // 128)


@triton.jit
def norm_kernel(
    x_ptr, residual_ptr, weight_ptr, total_ptr, normed_ptr, data_ptr, scale_ptr, x_row, residual_row, pitch, eps,
    HIDDEN: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr, QUANTISE: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):
    """A program norms a row, held as GROUPS (a power of two) runs of 128 columns."""
    group = tl.arange(0, GROUPS)
    pair = group[:, None] * 64 + tl.arange(0, 64)[None, :]
    valid = pair < HIDDEN // 2
    weight = pairs.load(weight_ptr, pair, valid)
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = pairs.load(x_ptr + row * x_row, pair, valid)
    if ADD:
        x = pairs.add(x, pairs.load(residual_ptr + row * residual_row, pair, valid), dtype)
        pairs.store(total_ptr + row * HIDDEN, pair, x, valid)
    normed = normed_pairs(x, weight, HIDDEN, eps, dtype)
    if KEEP:
        pairs.store(normed_ptr + row * HIDDEN, pair, normed, valid)
    if QUANTISE:
        quantise_pairs(data_ptr, scale_ptr, row, group, pair, normed, valid, pitch, HIDDEN, dtype)


def num_warps(groups: int) -> int:
    """Two accesses of 16 bytes a thread and tensor: fastest at every number of rows."""
    return max(1, min(16, groups // 4))


def norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, *, keep_normed: bool, quantise: bool
) -> Normed:
    """Of total = x + residual (x without a residual): the norm quantised, the norm, and total itself."""
    rows, hidden = x.shape
    assert hidden % 2 == 0 and in_pairs(x, residual, weight), f"{x.shape=} {x.stride()=}, or an odd offset"
    total = None if residual is None else torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    normed = torch.empty((rows, hidden), dtype=x.dtype, device=x.device) if keep_normed else None
    quantised = empty_fp8(rows, hidden, device=x.device) if quantise else None
    if rows:
        data, scale = (None, None) if quantised is None else quantised
        groups = triton.next_power_of_2(triton.cdiv(hidden, GROUP))
        norm_kernel[(rows,)](
            x, residual, weight, total, normed, data, scale, x.stride(0), 0 if residual is None else residual.stride(0),
            0 if scale is None else scale.stride(1), eps, HIDDEN=hidden, ADD=residual is not None, KEEP=keep_normed, QUANTISE=quantise,
            GROUPS=groups, num_warps=num_warps(groups), **launch_options(),
        )
    return Normed(quantised, normed, total)
