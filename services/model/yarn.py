"""Rotary frequencies and scales, YaRN included: the numbers that the reference and both pools must share.

Two factors that are easily mixed up stay apart here: `rope_multiplier` scales cos and sin (a ratio of two mscales),
`softmax_scale` carries mscale_all_dim's mscale squared. Pairs are neighbours (2i, 2i + 1), as the published weights have them.
"""

import math

import torch

from services.model.config import ModelConfig, YarnConfig


def mscale(factor: float, weight: float) -> float:
    """YaRN's attention temperature for a context extended `factor` times, 1.0 without extension."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def correction_range(yarn: YarnConfig, rope_dim: int, theta: float) -> tuple[int, int]:
    """Pair indices (low, high): below low the frequency is kept, above high it is divided by the factor, between it ramps."""

    def pair_index(rotations: float) -> float:
        return rope_dim * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    return max(math.floor(pair_index(yarn.beta_fast)), 0), min(math.ceil(pair_index(yarn.beta_slow)), rope_dim - 1)


def inv_freq(config: ModelConfig) -> torch.Tensor:
    """Radians a position for each pair: [qk_rope_head_dim / 2] fp32."""
    dim, yarn = config.qk_rope_head_dim, config.rope_scaling
    kept = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # [dim / 2]
    if yarn is None:
        return kept
    low, high = correction_range(yarn, dim, config.rope_theta)
    width = high - low if high != low else 0.001  # the published code's way around a ramp of no width
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return kept / yarn.factor * ramp + kept * (1 - ramp)


def rope_multiplier(config: ModelConfig) -> float:
    """Factor on cos and sin."""
    yarn = config.rope_scaling
    return 1.0 if yarn is None else mscale(yarn.factor, yarn.mscale) / mscale(yarn.factor, yarn.mscale_all_dim)


def softmax_scale(config: ModelConfig) -> float:
    """Factor on q.k before the softmax."""
    scale, yarn = config.qk_head_dim**-0.5, config.rope_scaling
    return scale if yarn is None or yarn.mscale_all_dim == 0.0 else scale * mscale(yarn.factor, yarn.mscale_all_dim) ** 2


def cos_sin(config: ModelConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, multiplier applied, of each position [n] and pair: two tensors [n, qk_rope_head_dim / 2] fp32."""
    angles = positions.to(torch.float32)[:, None] * inv_freq(config)[None, :]
    multiplier = rope_multiplier(config)
    return angles.cos() * multiplier, angles.sin() * multiplier


def cos_sin_table(config: ModelConfig, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`cos_sin` of the positions 0 .. num_positions - 1, to be made once and indexed by position."""
    return cos_sin(config, torch.arange(num_positions))
