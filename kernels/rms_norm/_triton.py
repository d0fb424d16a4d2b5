"""RMSNorm on Hopper with what stands before and after it in one pass: memory bound, a row stays in one program's registers."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.launch import launch_options
from kernels.numerics import GROUP, empty_fp8
from kernels.quant_fp8._triton import scale_of, to_fp8


class Normed(NamedTuple):
    """What `norm` was asked for; the rest is None."""

    quantised: Any
    normed: Any
    total: Any


@triton.jit
def norm_kernel(
    x_ptr, residual_ptr, weight_ptr, total_ptr, normed_ptr, data_ptr, scale_ptr, x_row, residual_row, hidden, pitch, eps,
    ADD: tl.constexpr, KEEP: tl.constexpr, QUANTISE: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):
    """A program norms a row, held as GROUPS (a power of two) runs of 128 columns."""
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    valid = column < hidden
    weight = tl.load(weight_ptr + column, mask=valid, other=0.0)
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_row + column, mask=valid, other=0.0).to(tl.float32)
    target = row * hidden + column
    if ADD:
        x += tl.load(residual_ptr + row * residual_row + column, mask=valid, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + target, total, mask=valid)
        x = total.to(tl.float32)
    mean = tl.sum(x * x) / hidden
    normed = (x * tl.rsqrt(mean + eps) * weight.to(tl.float32)).to(x_ptr.dtype.element_ty)
    if KEEP:
        tl.store(normed_ptr + target, normed, mask=valid)
    if QUANTISE:
        normed = normed.to(tl.float32)
        scale = scale_of(normed, 1)
        # eight columns a thread, as the bf16 accesses have: sixteen would move every row through shared memory
        tl.store(data_ptr + tl.max_contiguous(target, [1, 8]), to_fp8(normed, scale[:, None]), mask=valid)
        tl.store(scale_ptr + group * pitch + row, scale, mask=group < hidden // 128)


def num_warps(rows: int, hidden: int) -> int:
    """Warps of a program."""
    return max(1, min(8, triton.next_power_of_2(hidden) // 1024))


def norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, *, keep_normed: bool, quantise: bool
) -> Normed:
    """Of total = x + residual (x without a residual): the norm quantised, the norm, and total itself."""
    rows, hidden = x.shape
    total = None if residual is None else torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    normed = torch.empty((rows, hidden), dtype=x.dtype, device=x.device) if keep_normed else None
    quantised = empty_fp8(rows, hidden, device=x.device) if quantise else None
    if rows:
        data, scale = (None, None) if quantised is None else quantised
        norm_kernel[(rows,)](
            x, residual, weight, total, normed, data, scale, x.stride(0), 0 if residual is None else residual.stride(0), hidden,
            0 if scale is None else scale.stride(1), eps, ADD=residual is not None, KEEP=keep_normed, QUANTISE=quantise,
            GROUPS=triton.next_power_of_2(triton.cdiv(hidden, GROUP)), num_warps=num_warps(rows, hidden), **launch_options(),
        )
    return Normed(quantised, normed, total)
