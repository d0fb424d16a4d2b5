"""Rotary embedding on Hopper: memory bound, pairs stay within a thread."""

import torch
import triton
import triton.language as tl

from kernels.launch import launch_options


@triton.jit
def rotated(x, rotation_ptr, rope, ROPE: tl.constexpr):
    """Rotate the pairs of x [rows, ROPE], fp32, by one token's `rope` / 2 angles; all rows alike."""
    column = tl.arange(0, ROPE)
    angle = tl.load(rotation_ptr + column, mask=column < rope, other=0.0)
    cos, sin = tl.split(tl.reshape(angle, (1, ROPE // 2, 2)))
    even, odd = tl.split(tl.reshape(x, (x.shape[0], ROPE // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), x.shape)


@triton.jit
def rope_kernel(
    x_ptr, rotation_ptr, out_ptr, num_heads, rope, x_row, x_head, out_row, out_head,
    HEADS: tl.constexpr, ROPE: tl.constexpr, PDL: tl.constexpr,
):
    """A program rotates HEADS heads of one token; ROPE >= rope, both powers of two."""
    row = tl.program_id(1).to(tl.int64)
    head, column = tl.program_id(0) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, ROPE)[None, :]
    valid = (head < num_heads) & (column < rope)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_row + head * x_head + column, mask=valid, other=0.0).to(tl.float32)
    x = rotated(x, rotation_ptr + row * rope, rope, ROPE)
    tl.store(out_ptr + row * out_row + head * out_head + column, x.to(out_ptr.dtype.element_ty), mask=valid)


def rope(x: torch.Tensor, rotation: torch.Tensor, out: torch.Tensor) -> None:
    """See kernels.rope.rope_."""
    rows, num_heads, rope_dim = x.shape
    if x.numel():
        padded = triton.next_power_of_2(rope_dim)
        heads = min(triton.next_power_of_2(num_heads), 64)
        rope_kernel[(triton.cdiv(num_heads, heads), rows)](
            x, torch.view_as_real(rotation), out, num_heads, rope_dim, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
            HEADS=heads, ROPE=padded, num_warps=max(1, heads * padded // 1024), **launch_options(),
        )
