"""Norms, rotation and the store into pages on Hopper, between the first projection and q_b: bound by latency, one launch."""

import torch
import triton
import triton.language as tl

from kernels.launch import in_pairs, launch_options
from kernels.numerics import GROUP, Fp8
from kernels.quant_fp8 import _triton_pairs as pairs
from kernels.rms_norm._triton import normed_pairs, quantise_pairs
from kernels.rope._triton import load_rotation, rotated

_NUM_WARPS = 4


@triton.jit
def _store_entry(
    token, x_ptr, weight_ptr, rotation_ptr, pages_ptr, rows_ptr, eps,
    KV_RANK: tl.constexpr, WIDTH: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, PDL: tl.constexpr,
):
    pair, rope_pair = tl.arange(0, LATENT // 2), tl.arange(0, ROPE // 2)[None, :]
    valid = pair < KV_RANK // 2
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    weight = pairs.load(weight_ptr, pair, valid)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(rows_ptr + token)
    entry_ptr = pages_ptr + row * (KV_RANK + WIDTH)
    latent = pairs.load(x_ptr, pair, valid)
    key = pairs.load(x_ptr + KV_RANK, rope_pair, rope_pair < WIDTH // 2)
    cos, sin = load_rotation(rotation_ptr + token * WIDTH, WIDTH, ROPE)
    key = rotated(key, cos, sin, dtype)
    latent = normed_pairs(latent, weight, KV_RANK, eps, dtype)
    if row >= 0:
        pairs.store(entry_ptr, pair, latent, valid)
        pairs.store(entry_ptr + KV_RANK, rope_pair, key, rope_pair < WIDTH // 2)


@triton.jit
def _quantise_q(
    token, x_ptr, weight_ptr, rows_ptr, q_ptr, scale_ptr, pitch, eps, Q_RANK: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr
):
    group = tl.arange(0, GROUPS)
    pair = group[:, None] * 64 + tl.arange(0, 64)[None, :]
    valid = pair < Q_RANK // 2
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    weight = pairs.load(weight_ptr, pair, valid)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(rows_ptr + token)
    normed = normed_pairs(pairs.load(x_ptr, pair, valid), weight, Q_RANK, eps, dtype)
    if row >= 0:
        quantise_pairs(q_ptr, scale_ptr, token, group, pair, normed, valid, pitch, Q_RANK, dtype)


@triton.jit
def store_kernel(
    x_ptr, q_weight_ptr, kv_weight_ptr, rotation_ptr, pages_ptr, rows_ptr, q_ptr, scale_ptr, x_row, pitch, eps,
    Q_RANK: tl.constexpr, KV_RANK: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, 0) norms the latent, rotates the key and stores both, (token, 1) norms and quantises q."""
    token = tl.program_id(0).to(tl.int64)
    x_ptr += token * x_row
    if tl.program_id(1) == 0:
        _store_entry(token, x_ptr + Q_RANK, kv_weight_ptr, rotation_ptr, pages_ptr, rows_ptr, eps, KV_RANK, WIDTH, LATENT, ROPE, PDL)
    else:
        if Q_RANK > 0:
            _quantise_q(token, x_ptr, q_weight_ptr, rows_ptr, q_ptr, scale_ptr, pitch, eps, Q_RANK, GROUPS, PDL)


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
    assert kv_rank % 2 == 0 and in_pairs(x, q_weight, kv_weight, pages), f"{kv_rank=} {x.stride()=}, or an odd offset"
    if num_tokens:
        data, scale = (None, None) if q_out is None else q_out
        store_kernel[(num_tokens, 1 if q_weight is None else 2)](
            x, q_weight, kv_weight, torch.view_as_real(rotation), pages, rows, data, scale, x.stride(0),
            0 if scale is None else scale.stride(1), eps,
            Q_RANK=q_rank, KV_RANK=kv_rank, WIDTH=rope,
            GROUPS=triton.next_power_of_2(max(1, q_rank // GROUP)), LATENT=triton.next_power_of_2(kv_rank),
            ROPE=triton.next_power_of_2(rope), num_warps=_NUM_WARPS, **launch_options(),
        )
