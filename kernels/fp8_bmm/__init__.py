"""A product a head with FP8 weights: the two absorbed halves of MLA's kv_b in decode.

key half     q_nope [m, heads, 128]   x k_b [heads, 512, 128]  -> q_latent [m, heads, 512]
value half   attended [m, heads, 512] x v_b [heads, 128, 512]  -> [m, heads, 128], quantised for o_proj
"""

import torch

from kernels.backend import Backend, select
from kernels.numerics import FP8, FP8_MAX, GROUP, MIN_AMAX, Fp8, dequantise_blocks, empty_fp8
from kernels.quant_fp8 import quant_fp8

MIN_SCALE = MIN_AMAX / FP8_MAX
"""Of weights: what a block of zeros gets from `quant_fp8_block`."""


def fp8_bmm(x: torch.Tensor, w: Fp8, *, out: torch.Tensor | None = None, backend: Backend = "auto") -> torch.Tensor:
    """out[:, b] = x[:, b] @ w[b].T for every b; x is not quantised, products are of w's exact values.

    x        [m, batch, k]  float, unit stride in k, any others; k % 128 == 0
    w        [batch, n, k]  per_block_128x128, contiguous; n % 16 == 0; no scale below MIN_SCALE, as `quant_fp8_block` and
                            `split_fp8_kv_b` give them: the kernel divides by scales
    out      [m, batch, n]  x's dtype, unit stride in n, any others; new and contiguous if None
    returns  out; row i depends on row i of x alone
    """
    _check(x, w)
    if out is None:
        out = torch.empty((*x.shape[:2], w.data.shape[1]), dtype=x.dtype, device=x.device)
    assert out.shape == (*x.shape[:2], w.data.shape[1]) and out.dtype == x.dtype and out.stride(2) == 1, f"{out.shape=} {out.stride()=}"
    multiply = select(IMPLEMENTATIONS, backend, x.device.type, x.dtype)
    return multiply(x, w, out) if x.shape[0] else out


def fp8_bmm_quant(x: torch.Tensor, w: Fp8, *, backend: Backend = "auto") -> Fp8:
    """As `fp8_bmm` with n % 128 == 0, its result flattened and quantised before it is rounded to x's dtype.

    returns  data [m, batch * n] e4m3, scale per_token_128 in the layout of `empty_token_scales`: what `fp8_gemm` takes
    """
    _check(x, w)
    assert w.data.shape[1] % GROUP == 0, f"{w.data.shape=}"
    rows, width = x.shape[0], w.data.shape[0] * w.data.shape[1]
    out = empty_fp8(rows, width, device=x.device)
    multiply = select(QUANT_IMPLEMENTATIONS, backend, x.device.type, x.dtype)
    return multiply(x, w, out) if rows else out


def split_fp8_kv_b(kv_b: Fp8, num_heads: int, nope_dim: int) -> tuple[Fp8, Fp8]:
    """kv_b as the checkpoint has it -> the weights of both halves, contiguous.

    kv_b     [heads * (nope + v), kv_lora]  per_block_128x128; nope, v and kv_lora multiples of 128
    returns  k_b [heads, kv_lora, nope], v_b [heads, v, kv_lora]; transposing a block transposes the grid of scales. Values are kept,
             but for those of a block whose scale is below MIN_SCALE, which gets it: zeros stay zeros, none exceeds MIN_AMAX
    """
    per_head, kv_lora = kv_b.data.shape[0] // num_heads, kv_b.data.shape[1]
    assert kv_b.data.shape[0] == num_heads * per_head, f"{kv_b.data.shape=} {num_heads=}"
    assert nope_dim % GROUP == per_head % GROUP == kv_lora % GROUP == 0, f"{nope_dim=} {per_head=} {kv_lora=}"
    data = kv_b.data.view(torch.uint8).unflatten(0, (num_heads, per_head))  # as bytes: torch copies no e4m3 on some devices
    scale = kv_b.scale.clamp(min=MIN_SCALE).unflatten(0, (num_heads, per_head // GROUP))
    blocks = nope_dim // GROUP
    key = Fp8(data[:, :nope_dim].transpose(1, 2).contiguous().view(FP8), scale[:, :blocks].transpose(1, 2).contiguous())
    value = Fp8(data[:, nope_dim:].contiguous().view(FP8), scale[:, blocks:].contiguous())
    return key, value


def _check(x: torch.Tensor, w: Fp8) -> None:
    batch, n, k = w.data.shape
    assert x.ndim == 3 and x.shape[1:] == (batch, k) and x.stride(2) == 1, f"{x.shape=} {x.stride()=} {w.data.shape=}"
    assert k % GROUP == 0 and n % 16 == 0 and w.data.dtype == FP8 and w.data.is_contiguous(), f"{w.data.shape=} {w.data.dtype=}"
    assert w.scale.shape == (batch, -(-n // GROUP), k // GROUP) and w.scale.is_contiguous(), f"{w.scale.shape=} {w.scale.stride()=}"


def fp8_bmm_reference(x: torch.Tensor, w: Fp8, out: torch.Tensor) -> torch.Tensor:
    """Head by head in fp32."""
    weight = dequantise_blocks(w)
    for head in range(weight.shape[0]):
        out[:, head] = x[:, head].float() @ weight[head].T
    return out


def fp8_bmm_quant_reference(x: torch.Tensor, w: Fp8, out: Fp8) -> Fp8:
    """The fp32 product, and a scale for each 128 columns of it."""
    product = torch.empty((*x.shape[:2], w.data.shape[1]), dtype=torch.float32, device=x.device)
    return quant_fp8(fp8_bmm_reference(x, w, product).flatten(1), backend="reference")


def fp8_bmm_triton(x: torch.Tensor, w: Fp8, out: torch.Tensor) -> torch.Tensor:
    """Weights become bf16 on their way to the tensor cores."""
    from kernels.fp8_bmm._triton import launch

    launch(x, w, out, None)
    return out


def fp8_bmm_quant_triton(x: torch.Tensor, w: Fp8, out: Fp8) -> Fp8:
    """The same kernel, which quantises what it holds."""
    from kernels.fp8_bmm._triton import launch

    launch(x, w, out.data.unflatten(1, w.data.shape[:2]), out.scale)
    return out


IMPLEMENTATIONS = {"triton": fp8_bmm_triton, "reference": fp8_bmm_reference}
QUANT_IMPLEMENTATIONS = {"triton": fp8_bmm_quant_triton, "reference": fp8_bmm_quant_reference}
