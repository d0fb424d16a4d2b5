"""FP8 GEMM a group (expert), rows of a group together: masked as decode's fixed buffers are, contiguous as prefill's."""

import torch

from kernels.backend import Backend, select
from kernels.numerics import FP8, GROUP, Fp8, dequantise_blocks, dequantise_tokens, has_token_scales

ROW_ALIGNMENT = 128
"""A group's rows start at a multiple of this, in both layouts."""


def grouped_gemm_masked(x: Fp8, w: Fp8, num_rows: torch.Tensor, *, expected_m: int, backend: Backend = "auto") -> torch.Tensor:
    """out[g, i] = x[g, i] @ w[g].T for i < num_rows[g].

    x         [groups, max_m, k]  per_token_128, data contiguous, scale as `empty_token_scales` lays it out; max_m % 128 == 0
    w         [groups, n, k]      per_block_128x128, contiguous; n % 64 == 0, k % 128 == 0
    num_rows  [groups] int32      contiguous, on x's device and read there alone; 0 is legal
    expected_m                    rows a group that are likely: chooses tiles, never results
    returns   [groups, max_m, n]  bfloat16; rows from num_rows[g] up to the next multiple of 128 hold anything, later ones
                                  are neither read nor written
    """
    (groups, max_m, _), n = x.data.shape, w.data.shape[1]
    assert max_m % ROW_ALIGNMENT == 0, f"{max_m=}"
    _check_ints(num_rows, groups)
    _check(x, w)
    out = torch.empty((groups, max_m, n), dtype=torch.bfloat16, device=x.data.device)
    table = SMALL_M_IMPLEMENTATIONS if prefers_triton(groups, expected_m) else IMPLEMENTATIONS
    multiply = select(table, backend, x.data.device.type, torch.bfloat16)
    return multiply(x, w, num_rows, expected_m, out) if out.numel() else out


def grouped_gemm_contiguous(x: Fp8, w: Fp8, group_of_row: torch.Tensor, *, backend: Backend = "auto") -> torch.Tensor:
    """out[i] = x[i] @ w[group_of_row[i]].T.

    x             [m, k]          per_token_128, data contiguous, scale as `empty_token_scales` lays it out; m % 128 == 0
    w             [groups, n, k]  per_block_128x128, contiguous; n % 64 == 0, k % 128 == 0
    group_of_row  [m] int32       contiguous, on x's device; each 128 rows belong to one group, of which the last may be padding: -1;
                                  128 rows that are all padding are skipped
    returns       [m, n]          bfloat16; rows of padding hold anything
    """
    m = x.data.shape[0]
    assert m % ROW_ALIGNMENT == 0, f"{m=}"
    _check_ints(group_of_row, m)
    _check(x, w)
    out = torch.empty((m, w.data.shape[1]), dtype=torch.bfloat16, device=x.data.device)
    multiply = select(CONTIGUOUS_IMPLEMENTATIONS, backend, x.data.device.type, torch.bfloat16)
    return multiply(x, w, group_of_row, out) if out.numel() else out


def prefers_triton(groups: int, expected_m: int) -> bool:
    """Where our masked kernel streams weights faster than DeepGEMM's: many groups of few rows.

    us on an H200, ours | DeepGEMM's, at 4096 x 7168 and 7168 x 2048: 32 groups of 8 rows 221 | 238 and 117 | 130, of 64 rows
    233 | 238 and 125 | 131, of 128 rows 295 | 272 and 155 | 147; 2 groups of 64 rows 26 | 21 and 13.4 | 13.3. Between 2 groups
    and 32 nothing was measured.
    """
    return expected_m <= 64 and groups >= 16


def _check_ints(values: torch.Tensor, size: int) -> None:
    assert values.shape == (size,) and values.dtype == torch.int32 and values.is_contiguous(), f"{values.shape=} {size=} {values.stride()=}"


def _check(x: Fp8, w: Fp8) -> None:
    groups, n, k = w.data.shape
    assert x.data.shape[-1] == k and (x.data.ndim == 2 or x.data.shape[0] == groups), f"{x.data.shape=} {w.data.shape=}"
    assert n % 64 == 0 and k % GROUP == 0 and x.data.dtype == w.data.dtype == FP8, f"{n=} {k=} {x.data.dtype=} {w.data.dtype=}"
    assert x.data.is_contiguous() and w.data.is_contiguous() and w.scale.is_contiguous(), f"{x.data.stride()=} {w.data.stride()=}"
    assert w.scale.shape == (groups, -(-n // GROUP), k // GROUP), f"{w.scale.shape=}"
    assert has_token_scales(x), f"{x.scale.shape=} {x.scale.stride()=}"


def grouped_gemm_masked_reference(x: Fp8, w: Fp8, num_rows: torch.Tensor, expected_m: int, out: torch.Tensor) -> torch.Tensor:
    """Group by group in fp32, on the rows that count."""
    for group, rows in enumerate(num_rows.tolist()):
        tokens = dequantise_tokens(Fp8(x.data[group, :rows], x.scale[group, :rows]))
        out[group, :rows] = tokens @ dequantise_blocks(Fp8(w.data[group], w.scale[group])).T
    return out


def grouped_gemm_contiguous_reference(x: Fp8, w: Fp8, group_of_row: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Group by group in fp32, on its own rows."""
    for group in range(w.data.shape[0]):
        rows = (group_of_row == group).nonzero().flatten()
        tokens = dequantise_tokens(Fp8(x.data.view(torch.uint8)[rows].view(FP8), x.scale[rows]))
        out[rows] = (tokens @ dequantise_blocks(Fp8(w.data[group], w.scale[group])).T).to(out.dtype)
    return out


def grouped_gemm_masked_triton(x: Fp8, w: Fp8, num_rows: torch.Tensor, expected_m: int, out: torch.Tensor) -> torch.Tensor:
    """A fixed number of programs through all tiles, loads running ahead over their borders."""
    from kernels.grouped_gemm._triton import launch_masked

    launch_masked(x, w, num_rows, expected_m, out)
    return out


def grouped_gemm_contiguous_triton(x: Fp8, w: Fp8, group_of_row: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The same, its groups looked up by row."""
    from kernels.grouped_gemm._triton import launch_contiguous

    launch_contiguous(x, w, group_of_row, out)
    return out


def grouped_gemm_masked_deep_gemm(x: Fp8, w: Fp8, num_rows: torch.Tensor, expected_m: int, out: torch.Tensor) -> torch.Tensor:
    """DeepGEMM's masked grouped GEMM."""
    from kernels.grouped_gemm._deep_gemm import masked

    return masked(x, w, num_rows, expected_m, out)


def grouped_gemm_contiguous_deep_gemm(x: Fp8, w: Fp8, group_of_row: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """DeepGEMM's contiguous grouped GEMM."""
    from kernels.grouped_gemm._deep_gemm import contiguous

    return contiguous(x, w, group_of_row, out)


IMPLEMENTATIONS = {
    "deep_gemm": grouped_gemm_masked_deep_gemm,
    "triton": grouped_gemm_masked_triton,
    "reference": grouped_gemm_masked_reference,
}
SMALL_M_IMPLEMENTATIONS = {name: IMPLEMENTATIONS[name] for name in ("triton", "deep_gemm", "reference")}
CONTIGUOUS_IMPLEMENTATIONS = {
    "deep_gemm": grouped_gemm_contiguous_deep_gemm,
    "triton": grouped_gemm_contiguous_triton,
    "reference": grouped_gemm_contiguous_reference,
}
