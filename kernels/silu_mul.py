"""The gate of a gated MLP: silu(gate) * up, both halves of one GEMM's output."""

import torch

from kernels.backend import Backend, select


def silu_mul(gate_up: torch.Tensor, *, backend: Backend = "auto") -> torch.Tensor:
    """Multiply the activated gate half with the up half.

    gate_up  [num_rows, 2 * intermediate]  gate columns first
    returns  [num_rows, intermediate]      same dtype, new memory
    """
    assert gate_up.ndim == 2 and gate_up.shape[1] % 2 == 0, f"{gate_up.shape=}"
    return select(IMPLEMENTATIONS, backend)(gate_up)


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The formula."""
    gate, up = gate_up.chunk(2, dim=1)
    return gate * torch.sigmoid(gate) * up


def silu_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """Fused activation, product in place."""
    gate, up = gate_up.chunk(2, dim=1)
    return torch.nn.functional.silu(gate).mul_(up)


IMPLEMENTATIONS = {"torch": silu_mul_torch, "reference": silu_mul_reference}
