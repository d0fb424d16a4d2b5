"""DeepGEMM's dense GEMM: plain tuples, not named ones, are what it takes for a tensor with scales."""

import deep_gemm
import torch

from kernels.numerics import Fp8


def fp8_gemm(x: Fp8, w: Fp8, out: torch.Tensor) -> None:
    """See kernels.fp8_gemm.fp8_gemm."""
    assert out.dtype == torch.bfloat16, f"{out.dtype=}"
    deep_gemm.fp8_gemm_nt((x.data, x.scale), (w.data, w.scale), out)
