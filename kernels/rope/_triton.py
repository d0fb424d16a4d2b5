"""Rotary embedding on Hopper: memory bound, pairs stay within a thread."""

import torch
import triton
import triton.language as tl

from kernels.launch import in_pairs, launch_options
from kernels.quant_fp8 import _triton_pairs as pairs


@triton.jit
def load_rotation(rotation_ptr, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """cos and sin [1, ROPE / 2] of one token's WIDTH / 2 angles."""
    index = tl.arange(0, ROPE)
    return tl.split(tl.reshape(tl.load(rotation_ptr + index, mask=index < WIDTH, other=0.0), (1, ROPE // 2, 2)))


@triton.jit
def rotated(held, cos, sin, dtype: tl.constexpr):
    """Rotate held rows [rows, ROPE / 2 pairs], all alike."""
    even, odd = pairs.widen(held, dtype)
    return pairs.hold(even * cos - odd * sin, even * sin + odd * cos, dtype)


@triton.jit
def rope_kernel(
    x_ptr, rotation_ptr, out_ptr, x_row, x_head, out_row, out_head,
    NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, ROPE: tl.constexpr, PDL: tl.constexpr,
):
    """A program rotates HEADS heads of one token; ROPE >= WIDTH, both powers of two."""
    BLOCKS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = (tl.program_id(0) % BLOCKS) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, ROPE // 2)[None, :]
    valid = (head < NUM_HEADS) & (pair < WIDTH // 2)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = pairs.load(x_ptr + row * x_row, head * (x_head // 2) + pair, valid)
    cos, sin = load_rotation(rotation_ptr + row * WIDTH, WIDTH, ROPE)
    tl.debug_barrier()  # or the compiler, to save registers, asks for the last rows when the first have come
    pairs.store(out_ptr + row * out_row, head * (out_head // 2) + pair, rotated(x, cos, sin, dtype), valid)


def rope(x: torch.Tensor, rotation: torch.Tensor, out: torch.Tensor) -> None:
    """See kernels.rope.rope_."""
    rows, num_heads, rope_dim = x.shape
    assert in_pairs(x, out), f"{x.stride()=} {out.stride()=}, or an odd offset"
    if x.numel():
        padded = triton.next_power_of_2(rope_dim)
        heads = min(triton.next_power_of_2(num_heads), 64)
        rope_kernel[(rows * triton.cdiv(num_heads, heads),)](
            x, torch.view_as_real(rotation), out, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
            NUM_HEADS=num_heads, WIDTH=rope_dim, HEADS=heads, ROPE=padded, num_warps=max(1, heads * padded // 1024), **launch_options(),
        )
