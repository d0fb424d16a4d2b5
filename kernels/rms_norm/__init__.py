"""RMSNorm over the last dimension, alone and fused with the residual's addition before it and the quantisation after it.

Half types accumulate in fp32. A fused op gives what its parts give one after the other: the sum is rounded to the dtype before it is
normed, and the normed row is rounded to the dtype before it is quantised. Triton takes rows of an even length at even strides
from an even element on.
"""

import torch

from kernels.backend import Backend, select
from kernels.numerics import GROUP, Fp8
from kernels.quant_fp8 import quant_fp8


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, backend: Backend = "auto") -> torch.Tensor:
    """Normalise each row of `x` and scale it by `weight`.

    x       [num_tokens, hidden]  any float dtype, unit stride in the last dimension
    weight  [hidden]              same dtype, contiguous
    returns [num_tokens, hidden]  same dtype, new memory; a row depends on that row of x alone
    """
    _check(x, weight)
    return select(IMPLEMENTATIONS, backend, x.device.type, x.dtype)(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, backend: Backend = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual); shapes and dtypes as in `rms_norm`, both arguments are kept."""
    _check(x, weight, residual)
    return select(ADD_IMPLEMENTATIONS, backend, x.device.type, x.dtype)(x, residual, weight, eps)


def rms_norm_quant(x: torch.Tensor, weight: torch.Tensor, *, eps: float, backend: Backend = "auto") -> Fp8:
    """quant_fp8(rms_norm(x)): data [num_tokens, hidden], scale per_token_128; hidden % 128 == 0, else as in `rms_norm`."""
    _check(x, weight)
    assert x.shape[1] % GROUP == 0, f"{x.shape=}"
    return select(QUANT_IMPLEMENTATIONS, backend, x.device.type, x.dtype)(x, weight, eps)


def add_rms_norm_quant(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, keep_normed: bool, backend: Backend = "auto"
) -> tuple[Fp8, torch.Tensor | None, torch.Tensor]:
    """Return (quant_fp8(normed), normed, x + residual) with normed = rms_norm(x + residual), or None if it is not to be kept.

    Shapes and dtypes as in `rms_norm_quant`; both arguments are kept.
    """
    _check(x, weight, residual)
    assert x.shape[1] % GROUP == 0, f"{x.shape=}"
    return select(ADD_QUANT_IMPLEMENTATIONS, backend, x.device.type, x.dtype)(x, residual, weight, eps, keep_normed)


def _check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> None:
    assert x.ndim == 2 and x.stride(1) == 1, f"{x.shape=} {x.stride()=}"
    assert weight.shape == x.shape[1:] and weight.is_contiguous(), f"{x.shape=} {weight.shape=} {weight.stride()=}"
    assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1), f"{x.shape=} {residual=}"


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The formula, in fp32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One after the other."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def rms_norm_quant_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Fp8:
    """One after the other."""
    return quant_fp8(rms_norm_reference(x, weight, eps), backend="reference")


def add_rms_norm_quant_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, keep_normed: bool
) -> tuple[Fp8, torch.Tensor | None, torch.Tensor]:
    """One after the other."""
    normed, total = add_rms_norm_reference(x, residual, weight, eps)
    return quant_fp8(normed, backend="reference"), normed if keep_normed else None, total


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """torch's own op."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm_torch(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's own op after the sum."""
    total = x + residual
    return rms_norm_torch(total, weight, eps), total


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """One launch, a program a row."""
    from kernels.rms_norm._triton import norm

    return norm(x, None, weight, eps, keep_normed=True, quantise=False).normed


def add_rms_norm_triton(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch, a program a row."""
    from kernels.rms_norm._triton import norm

    out = norm(x, residual, weight, eps, keep_normed=True, quantise=False)
    return out.normed, out.total


def rms_norm_quant_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Fp8:
    """One launch, a program a row."""
    from kernels.rms_norm._triton import norm

    return norm(x, None, weight, eps, keep_normed=False, quantise=True).quantised


def add_rms_norm_quant_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, keep_normed: bool
) -> tuple[Fp8, torch.Tensor | None, torch.Tensor]:
    """One launch, a program a row."""
    from kernels.rms_norm._triton import norm

    out = norm(x, residual, weight, eps, keep_normed=keep_normed, quantise=True)
    return out.quantised, out.normed, out.total


ADD_IMPLEMENTATIONS = {"triton": add_rms_norm_triton, "torch": add_rms_norm_torch, "reference": add_rms_norm_reference}
QUANT_IMPLEMENTATIONS = {"triton": rms_norm_quant_triton, "reference": rms_norm_quant_reference}
ADD_QUANT_IMPLEMENTATIONS = {"triton": add_rms_norm_quant_triton, "reference": add_rms_norm_quant_reference}
IMPLEMENTATIONS = {"triton": rms_norm_triton, "torch": rms_norm_torch, "reference": rms_norm_reference}
