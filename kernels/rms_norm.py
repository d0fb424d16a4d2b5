"""RMSNorm over the last dimension, with and without the residual's addition; half types accumulate in fp32."""

import torch

from kernels.backend import Backend, select


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, backend: Backend = "auto") -> torch.Tensor:
    """Normalise each row of `x` and scale it by `weight`.

    x       [num_tokens, hidden]  any float dtype, unit stride in the last dimension
    weight  [hidden]              same dtype
    returns [num_tokens, hidden]  same dtype, new memory; a row depends on that row of x alone
    """
    assert x.ndim == 2 and x.stride(1) == 1 and weight.shape == x.shape[1:], f"{x.shape=} {x.stride()=} {weight.shape=}"
    return select(IMPLEMENTATIONS, backend)(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, backend: Backend = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual); shapes and dtypes as in `rms_norm`, both arguments are kept."""
    assert x.shape == residual.shape, f"{x.shape=} {residual.shape=}"
    total = x + residual
    return rms_norm(total, weight, eps=eps, backend=backend), total


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The formula, in fp32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """torch's own op."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


IMPLEMENTATIONS = {"torch": rms_norm_torch, "reference": rms_norm_reference}
