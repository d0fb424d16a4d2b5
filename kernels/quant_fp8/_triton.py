"""The two quantisations on Hopper: memory bound, so every thread loads 16 bytes and nothing is read twice."""

import torch
import triton
import triton.language as tl

from kernels.backend import interpreting
from kernels.launch import launch_options
from kernels.numerics import FP8, FP8_MAX, GROUP, MIN_AMAX, Fp8, empty_fp8

_MAX = tl.constexpr(FP8_MAX)
_MIN_AMAX = tl.constexpr(MIN_AMAX)
_INTERPRETING = tl.constexpr(interpreting())


@triton.jit
def scale_of(x, axis: tl.constexpr):
    """Scale of the groups that lie along `axis` (None: all of `x` is one); NaN if one is in it.

    The bits of floats >= 0 order as integers do, NaN above all: a maximum that keeps NaN, in one instruction.
    """
    amax = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis).to(tl.float32, bitcast=True)
    return tl.div_rn(tl.maximum(amax, _MIN_AMAX, propagate_nan=tl.PropagateNan.ALL), _MAX)


@triton.jit
def to_fp8(x, scale):
    """e4m3(x / scale) as the reference rounds it, NaN stays NaN; the shapes broadcast."""
    return round_to_fp8(divided(x, scale, tl.div_rn(1.0, scale)))


@triton.jit
def divided(x, scale, inverse):
    """x / scale, correctly rounded, from the reciprocal of the scale; the shapes broadcast.

    A product and its correction by the remainder, which is exact in an fma: a true division without its branch. -0 stays -0.
    """
    quotient = x * inverse
    quotient, scale = tl.broadcast(quotient, scale)
    quotient, inverse = tl.broadcast(quotient, inverse)
    return tl.fma(tl.fma(quotient, scale, negative(x)), negative(inverse), quotient)


@triton.jit
def negative(x):
    """-x, of zeros too (Triton's minus is 0 - x), and free where a product takes it."""
    return (x.to(tl.int32, bitcast=True) ^ -0x80000000).to(tl.float32, bitcast=True)


@triton.jit
def round_to_fp8(x):
    """The cast of |x| <= 448 or NaN; by hand in the interpreter, whose own loses a mantissa's carry, ties to even and NaN."""
    return _round_by_hand(x) if _INTERPRETING else x.to(tl.float8e4nv)


@triton.jit
def _round_by_hand(x):
    bits, magnitude = x.to(tl.int32, bitcast=True), tl.abs(x)
    normal = (((bits & 0x7FFFFFFF) + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (magnitude * 512 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000  # 2**23 leaves no bit below the unit 2**-9
    rounded = tl.where(x != x, 0x7F, tl.where(magnitude < 0.015625, subnormal, normal))
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _token_kernel(x_ptr, data_ptr, scale_ptr, num_groups, rows, k, x_batch, x_row, pitch, BLOCK: tl.constexpr, PDL: tl.constexpr):
    groups_per_row = k // 128
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = group < num_groups
    row, column = group // groups_per_row, group % groups_per_row
    batch, row = row // rows, row % rows
    inside = tl.arange(0, 128)
    source = batch.to(tl.int64) * x_batch + row.to(tl.int64) * x_row + column * 128
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + source[:, None] + inside[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
    scale = scale_of(x, 1)
    target = group.to(tl.int64) * 128
    tl.store(data_ptr + target[:, None] + inside[None, :], to_fp8(x, scale[:, None]), mask=valid[:, None])
    tl.store(scale_ptr + (batch.to(tl.int64) * groups_per_row + column) * pitch + row, scale, mask=valid)


@triton.jit
def _block_kernel(w_ptr, data_ptr, scale_ptr, n, k, w_batch, w_row):
    column, block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = (block * 128 + tl.arange(0, 128)).to(tl.int64)
    inside = column * 128 + tl.arange(0, 128)
    valid = (row < n)[:, None]
    w = tl.load(w_ptr + batch * w_batch + row[:, None] * w_row + inside[None, :], mask=valid, other=0.0).to(tl.float32)
    scale = scale_of(w, None)
    tl.store(data_ptr + (batch * n + row[:, None]) * k + inside[None, :], to_fp8(w, scale), mask=valid)
    tl.store(scale_ptr + (batch * tl.num_programs(1) + block) * tl.num_programs(0) + column, scale)


def quant_fp8(x: torch.Tensor) -> Fp8:
    """See kernels.quant_fp8.quant_fp8."""
    out = empty_fp8(*x.shape, device=x.device)
    *lead, rows, k = x.shape
    num_groups = x.numel() // GROUP
    if num_groups:
        block = 16 if num_groups >= 16 * 132 else 4
        grid = (triton.cdiv(num_groups, block),)
        strides = x.stride(0) if lead else 0, x.stride(-2), out.scale.stride(-1)
        _token_kernel[grid](x, *out, num_groups, rows, k, *strides, BLOCK=block, num_warps=max(1, block // 4), **launch_options())
    return out


def quant_fp8_block(w: torch.Tensor) -> Fp8:
    """See kernels.quant_fp8.quant_fp8_block."""
    *lead, n, k = w.shape
    data = torch.empty(w.shape, dtype=FP8, device=w.device)
    scale = torch.empty((*lead, -(-n // GROUP), k // GROUP), dtype=torch.float32, device=w.device)
    if w.numel():
        grid = (k // GROUP, scale.shape[-2], lead[0] if lead else 1)
        _block_kernel[grid](w, data, scale, n, k, w.stride(0) if lead else 0, w.stride(-2), num_warps=8)
    return Fp8(data, scale)
