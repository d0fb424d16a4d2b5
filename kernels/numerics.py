"""FP8 as every op holds it: e4m3 data with fp32 scales, 1x128 for activations and 128x128 for weights.

    x[i, j] = data[i, j] * scale[i, j // 128]                     per_token_128
    w[i, j] = data[i, j] * scale[i // 128, j // 128]              per_block_128x128 (the last row block may be partial)
"""

from typing import NamedTuple

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
GROUP = 128
"""Elements that share a scale along the contracted dimension, which is always a multiple of it."""
MIN_AMAX = 1e-10
"""A group of zeros gets this as its largest magnitude, so that no scale is 0."""


class Fp8(NamedTuple):
    """A quantised tensor; which of the two granularities its scale has is said where it is passed."""

    data: torch.Tensor  # [..., rows, k] float8_e4m3fn
    scale: torch.Tensor  # fp32


def empty_token_scales(*shape: int, device: torch.device | str) -> torch.Tensor:
    """Unwritten per_token_128 scales [..., rows, k / 128] for data [..., rows, k], laid out as TMA reads them.

    shape    (..., rows, k); fp32, rows are the unit-stride dimension, each column starts at a multiple of 16 bytes: the
             "MN-major" layout that DeepGEMM on Hopper takes without a copy
    """
    *lead, rows, k = shape
    assert k % GROUP == 0, f"{k=}"
    flat = torch.empty((*lead, k // GROUP, _pitch(rows)), dtype=torch.float32, device=device)
    return flat[..., :rows].transpose(-1, -2)


def has_token_scales(x: Fp8) -> bool:
    """Whether x's scale [..., rows, k / 128] fits its data and lies as `empty_token_scales` lays it out; without rows any lies so."""
    *lead, rows, k = x.data.shape
    if x.scale.shape != (*lead, rows, k // GROUP):
        return False
    strides = (*[_pitch(rows) * (k // GROUP)] * len(lead), 1, _pitch(rows))
    return x.data.numel() == 0 or x.scale.stride() == strides


def _pitch(rows: int) -> int:
    """Values from one column of scales to the next."""
    return -(-rows // 4) * 4


def empty_fp8(*shape: int, device: torch.device | str) -> Fp8:
    """Unwritten activations (..., rows, k) with per_token_128 scales in the layout of `empty_token_scales`."""
    return Fp8(torch.empty(shape, dtype=FP8, device=device), empty_token_scales(*shape, device=device))


def dequantise_tokens(x: Fp8) -> torch.Tensor:
    """per_token_128 -> [..., rows, k] fp32."""
    return (x.data.float().unflatten(-1, (-1, GROUP)) * x.scale.unsqueeze(-1)).flatten(-2)


def dequantise_blocks(w: Fp8) -> torch.Tensor:
    """per_block_128x128 -> [..., n, k] fp32."""
    rows = w.scale.repeat_interleave(GROUP, dim=-2)[..., : w.data.shape[-2], :]  # [..., n, k / 128]
    return (w.data.float().unflatten(-1, (-1, GROUP)) * rows.unsqueeze(-1)).flatten(-2)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """|got - expected| / |expected| in float64 (Frobenius); NaN wherever either holds one, so that `< bound` fails."""
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm().clamp(min=1e-300))
