"""Rotary embedding of neighbour pairs (2i, 2i + 1): the pairing of the published DeepSeek weights. In place, or into another tensor."""

import torch

from kernels.backend import Backend, select


def rotations(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Join cos and sin [n, rope / 2] to the complex rotations [n, rope / 2] that `rope_` multiplies with."""
    return torch.complex(cos, sin)


def rope_(x: torch.Tensor, rotation: torch.Tensor, *, out: torch.Tensor | None = None, backend: Backend = "auto") -> torch.Tensor:
    """Rotate each token's pairs by its angles, in fp32 or wider.

    x         [num_tokens, num_heads, rope]  bf16, fp32 or fp64, unit stride in the last dimension, other strides and the offset even
    rotation  [num_tokens, rope / 2]         complex64, contiguous (complex128 for fp64): row t holds the angles of token t's position
    out       shape and dtype of x, strides as x's; must not overlap x unless it is x. None: x is rotated in place
    returns   out, or x itself
    """
    assert x.ndim == 3 and rotation.shape == (x.shape[0], x.shape[2] // 2), f"{x.shape=} {rotation.shape=}"
    out = x if out is None else out
    assert out.shape == x.shape and out.dtype == x.dtype and rotation.is_contiguous(), f"{x.shape=} {out.shape=} {rotation.stride()=}"
    assert _in_pairs(x) and _in_pairs(out), f"{x.stride()=} {out.stride()=}"
    return select(IMPLEMENTATIONS, backend, x.device.type, x.dtype)(x, rotation, out)


def _in_pairs(x: torch.Tensor) -> bool:
    return x.stride(2) == 1 and x.stride(0) % 2 == x.stride(1) % 2 == 0


def rope_reference(x: torch.Tensor, rotation: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """(a, b) -> (a cos - b sin, a sin + b cos)."""
    even, odd = (part.to(rotation.real.dtype, copy=True) for part in (x[..., 0::2], x[..., 1::2]))  # [num_tokens, num_heads, rope / 2]
    cos, sin = rotation.real[:, None], rotation.imag[:, None]  # [num_tokens, 1, rope / 2]
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


def rope_torch(x: torch.Tensor, rotation: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """One complex product."""
    if x is out and x.dtype == rotation.real.dtype:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))  # [num_tokens, num_heads, rope / 2]
        pairs.mul_(rotation.unsqueeze(1))
        return x
    pairs = torch.view_as_complex(x.to(rotation.real.dtype).unflatten(-1, (-1, 2)))
    out.copy_(torch.view_as_real(pairs * rotation.unsqueeze(1)).flatten(-2))
    return out


def rope_triton(x: torch.Tensor, rotation: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """One launch, a program some heads of a token."""
    from kernels.rope._triton import rope

    rope(x, rotation, out)
    return out


IMPLEMENTATIONS = {"triton": rope_triton, "torch": rope_torch, "reference": rope_reference}
