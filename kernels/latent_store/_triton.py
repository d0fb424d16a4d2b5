"""Norms, rotation and the store into pages on Hopper, between the first projection and q_b: bound by latency, one launch."""

import torch
import triton
import triton.language as tl

from kernels.launch import launch_options
from kernels.numerics import GROUP, Fp8
from kernels.quant_fp8._triton import scale_of, to_fp8
from kernels.rope._triton import rotated

_NUM_WARPS = 4


@triton.jit
def _rms_normed(x, weight, width, eps, dtype: tl.constexpr):
    return (x * tl.rsqrt(tl.sum(x * x) / width + eps) * weight.to(tl.float32)).to(dtype)


@triton.jit
def _store_entry(
    token, x_ptr, weight_ptr, rotation_ptr, pages_ptr, rows_ptr, kv_rank, rope, eps,
    LATENT: tl.constexpr, ROPE: tl.constexpr, PDL: tl.constexpr,
):
    column, rope_column = tl.arange(0, LATENT), tl.arange(0, ROPE)[None, :]
    valid = column < kv_rank
    weight = tl.load(weight_ptr + column, mask=valid, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(rows_ptr + token + tl.arange(0, 1))  # of one element: the interpreter's masks of scalars are no masks
    kept = row >= 0
    x = tl.load(x_ptr + column, mask=valid, other=0.0).to(tl.float32)
    key = tl.load(x_ptr + kv_rank + rope_column, mask=rope_column < rope, other=0.0).to(tl.float32)
    key = rotated(key, rotation_ptr + token * rope, rope, ROPE).to(x_ptr.dtype.element_ty)
    latent = _rms_normed(x, weight, kv_rank, eps, x_ptr.dtype.element_ty)
    entry_ptr = pages_ptr + row * (kv_rank + rope)
    tl.store(entry_ptr + column, latent.to(pages_ptr.dtype.element_ty), mask=valid & kept)
    tl.store(entry_ptr[None, :] + kv_rank + rope_column, key.to(pages_ptr.dtype.element_ty), mask=(rope_column < rope) & kept[None, :])


@triton.jit
def _quantise_q(
    token, x_ptr, weight_ptr, rows_ptr, q_ptr, scale_ptr, pitch, q_rank, eps, GROUPS: tl.constexpr, PDL: tl.constexpr
):
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    valid = column < q_rank
    weight = tl.load(weight_ptr + column, mask=valid, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kept = tl.load(rows_ptr + token + tl.arange(0, 1)) >= 0
    x = tl.load(x_ptr + column, mask=valid, other=0.0).to(tl.float32)
    normed = _rms_normed(x, weight, q_rank, eps, x_ptr.dtype.element_ty).to(tl.float32)
    scale = scale_of(normed, 1)
    # eight columns a thread, as the loads have: sixteen would move every row through shared memory
    target = tl.max_contiguous(token * q_rank + column, [1, 8])
    tl.store(q_ptr + target, to_fp8(normed, scale[:, None]), mask=valid & kept[None, :])
    tl.store(scale_ptr + group * pitch + token, scale, mask=(group < q_rank // 128) & kept)


@triton.jit
def store_kernel(
    x_ptr, q_weight_ptr, kv_weight_ptr, rotation_ptr, pages_ptr, rows_ptr, q_ptr, scale_ptr, x_row, pitch, q_rank, kv_rank, rope, eps,
    HAS_Q: tl.constexpr, GROUPS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, PDL: tl.constexpr,
):
    """Program (token, 0) norms the latent, rotates the key and stores both, (token, 1) norms and quantises q."""
    token = tl.program_id(0).to(tl.int64)
    x_ptr += token * x_row
    if tl.program_id(1) == 0:
        _store_entry(token, x_ptr + q_rank, kv_weight_ptr, rotation_ptr, pages_ptr, rows_ptr, kv_rank, rope, eps, LATENT, ROPE, PDL)
    else:
        if HAS_Q:
            _quantise_q(token, x_ptr, q_weight_ptr, rows_ptr, q_ptr, scale_ptr, pitch, q_rank, eps, GROUPS, PDL)


@triton.jit
def copy_kernel(
    latent_ptr, key_ptr, pages_ptr, rows_ptr, latent_row, key_row, kv_rank, rope,
    LATENT: tl.constexpr, ROPE: tl.constexpr, PDL: tl.constexpr,
):
    """A program stores one token's entry."""
    token = tl.program_id(0).to(tl.int64)
    column, rope_column = tl.arange(0, LATENT), tl.arange(0, ROPE)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    entry_ptr = pages_ptr + tl.load(rows_ptr + token) * (kv_rank + rope)
    latent = tl.load(latent_ptr + token * latent_row + column, mask=column < kv_rank)
    key = tl.load(key_ptr + token * key_row + rope_column, mask=rope_column < rope)
    tl.store(entry_ptr + column, latent.to(pages_ptr.dtype.element_ty), mask=column < kv_rank)
    tl.store(entry_ptr + kv_rank + rope_column, key.to(pages_ptr.dtype.element_ty), mask=rope_column < rope)


def store(latent: torch.Tensor, key_rope: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor) -> None:
    """See kernels.latent_store.latent_store."""
    (num_tokens, kv_rank), rope = latent.shape, key_rope.shape[1]
    if num_tokens:
        copy_kernel[(num_tokens,)](
            latent, key_rope, pages, rows, latent.stride(0), key_rope.stride(0), kv_rank, rope, LATENT=triton.next_power_of_2(kv_rank),
            ROPE=triton.next_power_of_2(rope), num_warps=2, **launch_options(),
        )


def norm_rope_store(
    x: torch.Tensor, q_weight: torch.Tensor | None, kv_weight: torch.Tensor, rotation: torch.Tensor, pages: torch.Tensor,
    rows: torch.Tensor, eps: float, q_out: Fp8 | None,
) -> None:
    """See kernels.latent_store.qkv_norm_rope_store and kv_norm_rope_store."""
    num_tokens, kv_rank = x.shape[0], kv_weight.shape[0]
    q_rank = 0 if q_weight is None else q_weight.shape[0]
    rope = x.shape[1] - q_rank - kv_rank
    if num_tokens:
        data, scale = (None, None) if q_out is None else q_out
        store_kernel[(num_tokens, 1 if q_weight is None else 2)](
            x, q_weight, kv_weight, torch.view_as_real(rotation), pages, rows, data, scale, x.stride(0),
            0 if scale is None else scale.stride(1), q_rank, kv_rank, rope, eps,
            HAS_Q=q_weight is not None, GROUPS=triton.next_power_of_2(max(1, q_rank // GROUP)), LATENT=triton.next_power_of_2(kv_rank),
            ROPE=triton.next_power_of_2(rope), num_warps=_NUM_WARPS, **launch_options(),
        )
