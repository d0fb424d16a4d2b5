"""Rotary embedding, in place, of neighbour pairs (2i, 2i + 1): the pairing of the published DeepSeek weights."""

import torch

from kernels.backend import Backend, select


def rotations(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Join cos and sin [n, rope / 2] to the complex rotations [n, rope / 2] that `rope_` multiplies with."""
    return torch.complex(cos, sin)


def rope_(x: torch.Tensor, rotation: torch.Tensor, *, backend: Backend = "auto") -> torch.Tensor:
    """Rotate each token's pairs by its angles, in place.

    x         [num_tokens, num_heads, rope]  float32 or float64, unit stride in the last dimension, other strides even
    rotation  [num_tokens, rope / 2]         complex of the same precision: row t holds the angles of token t's position
    returns   x itself
    """
    assert x.ndim == 3 and rotation.shape == (x.shape[0], x.shape[2] // 2), f"{x.shape=} {rotation.shape=}"
    return select(IMPLEMENTATIONS, backend)(x, rotation)


def rope_reference(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """(a, b) -> (a cos - b sin, a sin + b cos)."""
    even, odd = x[..., 0::2].clone(), x[..., 1::2].clone()  # [num_tokens, num_heads, rope / 2]
    cos, sin = rotation.real[:, None], rotation.imag[:, None]  # [num_tokens, 1, rope / 2]
    x[..., 0::2] = even * cos - odd * sin
    x[..., 1::2] = even * sin + odd * cos
    return x


def rope_torch(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """One complex product."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))  # [num_tokens, num_heads, rope / 2]
    pairs.mul_(rotation.unsqueeze(1))
    return x


IMPLEMENTATIONS = {"torch": rope_torch, "reference": rope_reference}
