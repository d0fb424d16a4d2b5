"""DeepGEMM takes our layouts as they are."""

import deep_gemm
import torch

from kernels.numerics import Fp8


def masked(x: Fp8, w: Fp8, num_rows: torch.Tensor, expected_m: int, out: torch.Tensor) -> torch.Tensor:
    deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(tuple(x), tuple(w), out, num_rows, min(expected_m, x.data.shape[1]))
    return out


def contiguous(x: Fp8, w: Fp8, group_of_row: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(tuple(x), tuple(w), out, group_of_row)
    return out
