"""Rows on Hopper as pairs of neighbouring columns: of bf16, one access, one conversion and one sum serve both.

The small ops are bound by instructions as much as by memory, and Triton converts bf16 element by element. A *held* row is what memory
holds: int32 pairs of bf16. Of fp32, and in the interpreter, it is a tuple (even, odd), and all goes the plain way.
Pairs have unit stride; bf16 rows must begin at multiples of 4 bytes.
"""

import triton
import triton.language as tl

from kernels.backend import interpreting
from kernels.numerics import FP8_MAX, MIN_AMAX
from kernels.quant_fp8._triton import divided, negative, round_to_fp8

_PLAIN = tl.constexpr(interpreting())
_BF16_INT = tl.constexpr(tl.pointer_type(tl.int32))
_FP8_INT = tl.constexpr(tl.pointer_type(tl.int16))
_MAX = tl.constexpr(FP8_MAX)
_MAX_INVERSE = tl.constexpr(1 / FP8_MAX)
_MIN_AMAX = tl.constexpr(MIN_AMAX)


@triton.jit
def load(ptr, pair, mask):
    """Hold the columns 2 * pair and 2 * pair + 1 from `ptr` on, zeros where masked."""
    if ptr.dtype.element_ty == tl.bfloat16 and not _PLAIN:
        held = tl.load(ptr.to(_BF16_INT) + pair, mask=mask, other=0)
    else:
        even = tl.load(ptr + 2 * pair, mask=mask, other=0.0).to(tl.float32)
        held = even, tl.load(ptr + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32)
    return held


@triton.jit
def store(ptr, pair, held, mask):
    """The opposite of `load`."""
    if ptr.dtype.element_ty == tl.bfloat16 and not _PLAIN:
        tl.store(ptr.to(_BF16_INT) + pair, held, mask=mask)
    else:
        tl.store(ptr + 2 * pair, held[0].to(ptr.dtype.element_ty), mask=mask)
        tl.store(ptr + 2 * pair + 1, held[1].to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def widen(held, dtype: tl.constexpr):
    """(even, odd) in fp32."""
    if dtype == tl.bfloat16 and not _PLAIN:
        held = (held << 16).to(tl.float32, bitcast=True), (held & -65536).to(tl.float32, bitcast=True)
    return held


@triton.jit
def hold(even, odd, dtype: tl.constexpr):
    """Round fp32 columns to the dtype."""
    if dtype == tl.bfloat16 and not _PLAIN:
        held = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=tl.int32, is_pure=True, pack=1)
    else:
        held = even.to(dtype).to(tl.float32), odd.to(dtype).to(tl.float32)
    return held


@triton.jit
def add(a, b, dtype: tl.constexpr):
    """Sum of two held rows, rounded to the dtype."""
    if dtype == tl.bfloat16 and not _PLAIN:
        total = tl.inline_asm_elementwise("add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)
    else:
        total = hold(a[0] + b[0], a[1] + b[1], dtype)
    return total


@triton.jit
def reciprocal(x):
    """1 / x to an ulp, in one instruction; x is normal and so is the result."""
    if _PLAIN:
        inverse = 1.0 / x
    else:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return inverse


@triton.jit
def scale_of(even, odd):
    """Scale of each row of pairs [groups, 64], by the rule of `kernels.quant_fp8`; NaN if a NaN or an infinity is in it.

    The bits of floats >= 0 order as integers do, NaN above all. The quotient by 448 is a product corrected by its remainder: exact.
    """
    amax = tl.maximum(tl.abs(even), tl.abs(odd), propagate_nan=tl.PropagateNan.ALL).to(tl.int32, bitcast=True)
    amax = tl.maximum(tl.max(amax, axis=1).to(tl.float32, bitcast=True), _MIN_AMAX, propagate_nan=tl.PropagateNan.ALL)
    scale = amax * _MAX_INVERSE
    return tl.fma(tl.fma(scale, -_MAX, amax), _MAX_INVERSE, scale)


@triton.jit
def divide(even, odd, scale):
    """(even, odd) [groups, 64] / scale [groups], correctly rounded: the bits that the reference casts."""
    inverse = reciprocal(scale)
    inverse = tl.fma(tl.fma(negative(scale), inverse, 1.0), inverse, inverse)
    return divided(even, scale[:, None], inverse[:, None]), divided(odd, scale[:, None], inverse[:, None])


@triton.jit
def store_fp8(ptr, first, pair, even, odd, mask):
    """Cast and store columns of at most 448, or NaN, at the pairs `first` + `pair` from `ptr` on."""
    if _PLAIN:
        tl.store(ptr + 2 * (first + pair), round_to_fp8(even), mask=mask)
        tl.store(ptr + 2 * (first + pair) + 1, round_to_fp8(odd), mask=mask)
    else:
        both = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [even, odd], dtype=tl.int16, is_pure=True, pack=1
        )
        # four pairs a thread, as the bf16 accesses have: eight would move every row through shared memory
        tl.store(ptr.to(_FP8_INT) + tl.max_contiguous(first + pair, [1, 4]), both, mask=mask)
