"""The gate of a gated MLP, quantised on the way: silu(gate) * up as FP8, for the second GEMM of experts and shared expert.

The product is quantised from fp32: it is not rounded to bf16 in between.
"""

import torch

from kernels.backend import Backend, select
from kernels.numerics import GROUP, Fp8, empty_fp8
from kernels.quant_fp8 import quant_fp8


def silu_mul_quant(gate_up: torch.Tensor, num_rows: torch.Tensor | None = None, *, backend: Backend = "auto") -> Fp8:
    """Multiply the activated gate half with the up half and quantise the product per row and 128 columns.

    gate_up   [m, 2 * intermediate]  bf16 or fp32, gate columns first, unit stride in the last dimension; intermediate % 128 == 0
    num_rows  [1] int32              rows in use, read on the device; None: all of them. Rows beyond are neither read nor written
    returns   data [m, intermediate] contiguous, scale as `numerics.empty_token_scales` lays it out
    """
    assert gate_up.ndim == 2 and (num_rows is None or num_rows.shape == (1,)), f"{gate_up.shape=} {num_rows=}"
    data, scale = _run(gate_up.unsqueeze(0), num_rows, backend)
    return Fp8(data.squeeze(0), scale.squeeze(0))


def silu_mul_quant_masked(gate_up: torch.Tensor, num_rows: torch.Tensor, *, backend: Backend = "auto") -> Fp8:
    """The same for groups whose first rows are in use: the layout between the two masked grouped GEMMs.

    gate_up   [groups, max_m, 2 * intermediate]  as above; rows and groups may have any even strides, from an even element on
    num_rows  [groups] int32, contiguous         rows in use of each group, 0 .. max_m, read on the device; up to 256 groups
    returns   data [groups, max_m, intermediate] contiguous, scale [groups, max_m, intermediate / 128] as
              `numerics.empty_token_scales` lays it out; rows beyond a group's count are neither read nor written
    """
    assert gate_up.ndim == 3 and num_rows.shape == gate_up.shape[:1], f"{gate_up.shape=} {num_rows.shape=}"
    return _run(gate_up, num_rows, backend)


def _run(gate_up: torch.Tensor, num_rows: torch.Tensor | None, backend: Backend) -> Fp8:
    assert gate_up.shape[2] % (2 * GROUP) == 0 and gate_up.stride(2) == 1, f"{gate_up.shape=} {gate_up.stride()=}"
    assert num_rows is None or (num_rows.dtype == torch.int32 and num_rows.is_contiguous()), f"{num_rows=}"
    return select(IMPLEMENTATIONS, backend, gate_up.device.type, gate_up.dtype)(gate_up, num_rows)


def silu_mul_quant_reference(gate_up: torch.Tensor, num_rows: torch.Tensor | None) -> Fp8:
    """Group by group; gate_up [groups, max_m, 2 * intermediate]."""
    groups, max_m, width = gate_up.shape
    out = empty_fp8(groups, max_m, width // 2, device=gate_up.device)
    for group, used in enumerate([max_m] * groups if num_rows is None else num_rows.tolist()):
        gate, up = gate_up[group, :used].float().chunk(2, dim=1)
        data, scale = quant_fp8(gate * torch.sigmoid(gate) * up, backend="reference")
        out.data[group, :used], out.scale[group, :used] = data, scale
    return out


def silu_mul_quant_triton(gate_up: torch.Tensor, num_rows: torch.Tensor | None) -> Fp8:
    """One launch of a fixed number of programs, which read the counts and divide the rows in use among themselves."""
    from kernels.silu_mul_quant._triton import silu_mul_quant

    return silu_mul_quant(gate_up, num_rows)


IMPLEMENTATIONS = {"triton": silu_mul_quant_triton, "reference": silu_mul_quant_reference}
