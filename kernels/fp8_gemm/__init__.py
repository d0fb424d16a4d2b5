"""Dense FP8 GEMM: activations scaled 1x128, weights 128x128, fp32 accumulation."""

from collections.abc import Sequence

import torch

from kernels.backend import Backend, select, why_not_automatic
from kernels.fp8_gemm._table import choose
from kernels.numerics import FP8, GROUP, Fp8, dequantise_blocks, dequantise_tokens, has_token_scales


def fp8_gemm(x: Fp8, w: Fp8, *, out: torch.Tensor | None = None, backend: Backend = "auto") -> torch.Tensor:
    """Multiply x @ w^T.

    x        data [m, k], unit stride in k, row stride a multiple of 16; scale per_token_128 as `numerics.empty_token_scales` lays it out;
             m >= 0, k % 128 == 0
    w        data [n, k] and scale per_block_128x128, contiguous; n % 64 == 0
    out      [m, n] bf16 or fp32 (bf16 alone for deep_gemm), unit stride in n; made (bf16) if not given
    returns  out; a row depends on that row of x alone

    "auto" takes the Triton kernel where the table says that it is faster than DeepGEMM. Triton calls on a device share one workspace:
    they must follow one another, and the first one must not be captured in a graph.
    """
    (m, k), n = x.data.shape, w.data.shape[0]
    assert x.data.dtype == w.data.dtype == FP8, f"{x.data.dtype=} {w.data.dtype=}"
    assert w.data.shape == (n, k), f"{x.data.shape=} {w.data.shape=}"
    assert k > 0 and k % GROUP == 0 and n % 64 == 0, f"{n=} {k=}"
    assert x.data.stride(1) == 1 and x.data.stride(0) % 16 == 0, f"{x.data.stride()=}"
    assert has_token_scales(x), f"{x.scale.shape=} {x.scale.stride()=}"
    assert w.data.is_contiguous() and w.scale.is_contiguous() and w.scale.shape == (-(-n // GROUP), k // GROUP), f"{w.scale.shape=}"
    if out is None:
        out = torch.empty((m, n), dtype=torch.bfloat16, device=x.data.device)
    assert out.shape == (m, n) and out.stride(1) == 1 and out.dtype in (torch.bfloat16, torch.float32), f"{out.shape=} {out.dtype=}"
    device = x.data.device.type
    if m == 0 or n == 0:
        select(IMPLEMENTATIONS, backend, device, FP8)  # refuses for no rows what it refuses for some
        return out
    if backend == "auto" and choose(m, n, k).beats_deep_gemm and not why_not_automatic("triton", device, FP8):
        backend = "triton"
    select(IMPLEMENTATIONS, backend, device, FP8)(x, w, out)
    return out


def concat_blocks(weights: Sequence[Fp8]) -> Fp8:
    """Stack quantised weights [n_i, k] along n, so that one GEMM serves all; all but the last n_i must be whole blocks of 128 rows."""
    assert all(w.data.shape[0] % GROUP == 0 for w in weights[:-1]), f"{[w.data.shape[0] for w in weights]}"
    return Fp8(torch.cat([w.data for w in weights]), torch.cat([w.scale for w in weights]))


def fp8_gemm_reference(x: Fp8, w: Fp8, out: torch.Tensor) -> None:
    """Block by block of k, as the definition of the scales says."""
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for block in range(w.scale.shape[1]):
        part = slice(block * GROUP, (block + 1) * GROUP)
        product = x.data[:, part].float() @ w.data[:, part].float().T
        total += product * x.scale[:, block, None] * w.scale[:, block].repeat_interleave(GROUP)[: out.shape[1]]
    out.copy_(total)


def fp8_gemm_torch(x: Fp8, w: Fp8, out: torch.Tensor) -> None:
    """Both operands dequantised to fp32."""
    out.copy_(dequantise_tokens(x) @ dequantise_blocks(w).T)


def fp8_gemm_triton(x: Fp8, w: Fp8, out: torch.Tensor) -> None:
    """Split-K in Triton or stream-K in Gluon, with the table's configuration."""
    from kernels.fp8_gemm._triton import fp8_gemm

    fp8_gemm(x, w, out, choose(out.shape[0], out.shape[1], x.data.shape[1]).config)


def fp8_gemm_deep_gemm(x: Fp8, w: Fp8, out: torch.Tensor) -> None:
    """DeepGEMM's 1D2D kernel; it takes all scales as they are."""
    from kernels.fp8_gemm._deep_gemm import fp8_gemm

    fp8_gemm(x, w, out)


IMPLEMENTATIONS = {
    "deep_gemm": fp8_gemm_deep_gemm,
    "triton": fp8_gemm_triton,
    "torch": fp8_gemm_torch,
    "reference": fp8_gemm_reference,
}
