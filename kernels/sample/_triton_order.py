"""Integers in the order of floats: what the sampler and the gate compare, sort and bisect."""

import triton
import triton.language as tl


@triton.jit
def ordered(x):
    """fp32 -> int32 in the same order; NaN above everything, -0 equal to 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def value_of(ordered_bits):
    """The inverse of `ordered`."""
    return tl.where(ordered_bits < 0, ordered_bits ^ 0x7FFFFFFF, ordered_bits).to(tl.float32, bitcast=True)


@triton.jit
def keys_of(values, ids):
    """Distinct int64 keys: larger for a higher value and, of equal ones, for the lower id."""
    return (ordered(values).to(tl.int64) << 32) | (ids ^ 0x7FFFFFFF)
