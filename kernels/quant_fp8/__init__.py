"""Quantisation to FP8: activations per token and 128 columns, weights per block of 128x128.

Both: scale = max(largest magnitude, MIN_AMAX) / 448, data = e4m3(x / scale), in fp32 with true divisions, so that every backend gives
the same bits. A group that holds a NaN or an infinity is NaN as a whole once dequantised, by whichever bits, and touches no other.
"""

import torch

from kernels.backend import Backend, select
from kernels.numerics import FP8, FP8_MAX, GROUP, MIN_AMAX, Fp8, empty_fp8


def quant_fp8(x: torch.Tensor, *, backend: Backend = "auto") -> Fp8:
    """Quantise activations, one scale per row and 128 columns.

    x        [rows, k] or [batch, rows, k]  bf16 or fp32, unit stride in the last dimension, any other strides; k % 128 == 0
    returns  data of x's shape, contiguous; scale [.., rows, k / 128] as `numerics.empty_token_scales` lays it out
    """
    assert x.ndim in (2, 3) and x.shape[-1] % GROUP == 0 and (x.shape[-1] == 0 or x.stride(-1) == 1), f"{x.shape=} {x.stride()=}"
    return select(IMPLEMENTATIONS, backend, x.device.type, x.dtype)(x)


def quant_fp8_block(w: torch.Tensor, *, backend: Backend = "auto") -> Fp8:
    """Quantise weights, one scale per 128 rows and 128 columns.

    w        [n, k] or [experts, n, k]  bf16 or fp32, unit stride in the last dimension, any other strides; k % 128 == 0; the last
             block of rows may be partial
    returns  data of w's shape and scale [.., ceil(n / 128), k / 128], both contiguous
    """
    assert w.ndim in (2, 3) and w.shape[-1] % GROUP == 0 and (w.shape[-1] == 0 or w.stride(-1) == 1), f"{w.shape=} {w.stride()=}"
    return select(BLOCK_IMPLEMENTATIONS, backend, w.device.type, w.dtype)(w)


def quant_fp8_reference(x: torch.Tensor) -> Fp8:
    """The rule, group by group."""
    out = empty_fp8(*x.shape, device=x.device)
    groups = x.float().unflatten(-1, (-1, GROUP))  # [.., rows, k / 128, 128]
    scale = _scale_of(groups.abs().amax(-1))
    out.scale.copy_(scale)
    out.data.copy_((groups / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).flatten(-2).to(FP8))
    return out


def _scale_of(amax: torch.Tensor) -> torch.Tensor:
    """A tensor divides: by a number, torch multiplies with the reciprocal on GPUs."""
    return amax.clamp(min=MIN_AMAX) / torch.full((), FP8_MAX, device=amax.device)


def quant_fp8_block_reference(w: torch.Tensor) -> Fp8:
    """The rule, block by block of rows."""
    *lead, n, k = w.shape
    data = torch.empty(w.shape, dtype=FP8, device=w.device)
    scale = torch.empty((*lead, -(-n // GROUP), k // GROUP), dtype=torch.float32, device=w.device)
    for block in range(scale.shape[-2]):
        rows = slice(block * GROUP, (block + 1) * GROUP)
        blocks = w[..., rows, :].float().unflatten(-1, (-1, GROUP))  # [.., <= 128, k / 128, 128]
        scale[..., block, :] = _scale_of(blocks.abs().amax((-3, -1)))
        quotients = blocks / scale[..., block, :].unsqueeze(-2).unsqueeze(-1)
        data[..., rows, :] = quotients.clamp(-FP8_MAX, FP8_MAX).flatten(-2).to(FP8)
    return Fp8(data, scale)


def quant_fp8_triton(x: torch.Tensor) -> Fp8:
    """One launch; a program takes a few groups."""
    from kernels.quant_fp8._triton import quant_fp8

    return quant_fp8(x)


def quant_fp8_block_triton(w: torch.Tensor) -> Fp8:
    """One launch; a program takes a block."""
    from kernels.quant_fp8._triton import quant_fp8_block

    return quant_fp8_block(w)


BLOCK_IMPLEMENTATIONS = {"triton": quant_fp8_block_triton, "reference": quant_fp8_block_reference}
IMPLEMENTATIONS = {"triton": quant_fp8_triton, "reference": quant_fp8_reference}
