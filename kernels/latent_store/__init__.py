"""Writes tokens' latent entries of one layer into page-major memory, alone or fused with all that follows the first projection."""

from collections.abc import Sequence

import torch

from kernels.backend import Backend, select
from kernels.numerics import GROUP, Fp8, empty_fp8
from kernels.rms_norm import rms_norm, rms_norm_quant
from kernels.rope import rope_


def pool_rows(page_tables: Sequence[Sequence[int]], positions: Sequence[range], num_layers: int, page_size: int) -> torch.Tensor:
    """Rows of `pages.view(-1, width)` that hold given tokens, for every layer: [num_layers, num_tokens] int64.

    page_tables  one request each: page numbers, entry i holds the positions i * page_size .. (i + 1) * page_size - 1
    positions    one request each: the consecutive positions meant; requests follow each other in the result
    """
    first_layer = [
        table[position // page_size] * num_layers * page_size + position % page_size
        for table, wanted in zip(page_tables, positions, strict=True)
        for position in wanted
    ]
    return torch.tensor(first_layer, dtype=torch.int64) + (torch.arange(num_layers) * page_size).unsqueeze(1)


def latent_store(
    latent: torch.Tensor, key_rope: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, *, backend: Backend = "auto"
) -> None:
    """Store each token's normalised latent and rotated key; nothing else of `pages` is touched or read.

    latent    [num_tokens, kv_lora_rank]  any float dtype, unit stride in the last dimension
    key_rope  [num_tokens, rope]          same dtype, unit stride in the last dimension
    pages     [num_pages, num_layers, page_size, kv_lora_rank + rope]  contiguous, written in place; entries are rounded to its dtype
    rows      [num_tokens] int64, contiguous: rows of `pages.view(-1, width)`, one layer of `pool_rows`, all different
    """
    assert pages.is_contiguous() and pages.shape[-1] == latent.shape[1] + key_rope.shape[1], f"{pages.shape=} {latent.shape=}"
    assert latent.stride(1) == 1 and key_rope.stride(1) == 1, f"{latent.stride()=} {key_rope.stride()=}"
    _check_rows(rows, latent.shape[0])
    select(IMPLEMENTATIONS, backend, latent.device.type, latent.dtype)(latent, key_rope, pages, rows)


def qkv_norm_rope_store(
    qkv: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, rotation: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor,
    *, eps: float, backend: Backend = "auto",
) -> Fp8:
    """What stands between the fused first projection and q_b: q normed and quantised, latent normed, key rotated, both stored.

    qkv        [num_tokens, q_lora_rank + kv_lora_rank + rope]  bf16 or fp32, unit stride in the last dimension; q_lora_rank % 128 == 0;
                                                                for Triton rows at even strides from an even element on
    q_weight   [q_lora_rank], kv_weight [kv_lora_rank]          dtype of qkv, contiguous
    rotation   [num_tokens, rope / 2]                           complex64, contiguous
    pages      [num_pages, num_layers, page_size, kv_lora_rank + rope]  contiguous, dtype of qkv
    rows       [num_tokens] int64                               as in `latent_store`; -1: a padded token, for which nothing is written
    returns    q as `rms_norm_quant` gives it: data [num_tokens, q_lora_rank], scale per_token_128
    """
    assert q_weight.ndim == 1 and q_weight.is_contiguous() and q_weight.shape[0] % GROUP == 0, f"{q_weight.shape=} {q_weight.stride()=}"
    _check(qkv, q_weight.shape[0], kv_weight, rotation, pages, rows)
    q = empty_fp8(qkv.shape[0], q_weight.shape[0], device=qkv.device)
    select(FUSED_IMPLEMENTATIONS, backend, qkv.device.type, qkv.dtype)(qkv, q_weight, kv_weight, rotation, pages, rows, eps, q)
    return q


def kv_norm_rope_store(
    kv: torch.Tensor, kv_weight: torch.Tensor, rotation: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor,
    *, eps: float, backend: Backend = "auto",
) -> None:
    """The same of models without q_lora_rank: kv [num_tokens, kv_lora_rank + rope], the tail of the first projection's output."""
    _check(kv, 0, kv_weight, rotation, pages, rows)
    select(FUSED_IMPLEMENTATIONS, backend, kv.device.type, kv.dtype)(kv, None, kv_weight, rotation, pages, rows, eps, None)


def _check(
    x: torch.Tensor, q_lora_rank: int, kv_weight: torch.Tensor, rotation: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor
) -> None:
    assert x.ndim == 2 and x.stride(1) == 1, f"{x.shape=} {x.stride()=}"
    rope = x.shape[1] - q_lora_rank - kv_weight.shape[0]
    assert rope % 2 == 0 and rotation.shape == (x.shape[0], rope // 2) and rotation.is_contiguous(), f"{x.shape=} {rotation.shape=}"
    assert pages.is_contiguous() and pages.shape[-1] == kv_weight.shape[0] + rope, f"{pages.shape=} {x.shape=}"
    assert pages.dtype == x.dtype and kv_weight.is_contiguous(), f"{pages.dtype=} {x.dtype=} {kv_weight.stride()=}"
    _check_rows(rows, x.shape[0])


def _check_rows(rows: torch.Tensor, num_tokens: int) -> None:
    assert rows.shape == (num_tokens,) and rows.dtype == torch.int64 and rows.is_contiguous(), f"{rows=} {rows.stride()=} {num_tokens=}"


def latent_store_reference(latent: torch.Tensor, key_rope: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor) -> None:
    """Token by token."""
    num_layers, page_size = pages.shape[1], pages.shape[2]
    for token, row in enumerate(rows.tolist()):
        entry = pages[row // page_size // num_layers, row // page_size % num_layers, row % page_size]
        entry[: latent.shape[1]] = latent[token]
        entry[latent.shape[1] :] = key_rope[token]


def latent_store_torch(latent: torch.Tensor, key_rope: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor) -> None:
    """One scatter of whole rows."""
    pages.view(-1, pages.shape[-1]).index_copy_(0, rows, torch.cat((latent, key_rope), dim=1).to(pages.dtype))


def latent_store_triton(latent: torch.Tensor, key_rope: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor) -> None:
    """One launch, a program a token."""
    from kernels.latent_store._triton import store

    store(latent, key_rope, pages, rows)


def fused_reference(
    x: torch.Tensor, q_weight: torch.Tensor | None, kv_weight: torch.Tensor, rotation: torch.Tensor, pages: torch.Tensor,
    rows: torch.Tensor, eps: float, q_out: Fp8 | None,
) -> None:
    """One after the other, of the tokens that are not padded."""
    kept = (rows >= 0).nonzero().squeeze(1)
    x, rotation, rows = x[kept], rotation[kept], rows[kept]
    if q_weight is not None and q_out is not None:
        q = rms_norm_quant(x[:, : q_weight.shape[0]], q_weight, eps=eps, backend="reference")
        q_out.data[kept], q_out.scale[kept] = q
        x = x[:, q_weight.shape[0] :]
    latent, key_rope = x.split([kv_weight.shape[0], x.shape[1] - kv_weight.shape[0]], dim=1)
    latent = rms_norm(latent, kv_weight, eps=eps, backend="reference")
    key_rope = rope_(key_rope.unsqueeze(1).contiguous(), rotation, backend="reference").squeeze(1)
    latent_store(latent, key_rope, pages, rows, backend="reference")


def fused_triton(
    x: torch.Tensor, q_weight: torch.Tensor | None, kv_weight: torch.Tensor, rotation: torch.Tensor, pages: torch.Tensor,
    rows: torch.Tensor, eps: float, q_out: Fp8 | None,
) -> None:
    """One launch; q and the rest of a token are programs of their own."""
    from kernels.latent_store._triton import norm_rope_store

    norm_rope_store(x, q_weight, kv_weight, rotation, pages, rows, eps, q_out)


FUSED_IMPLEMENTATIONS = {"triton": fused_triton, "reference": fused_reference}
IMPLEMENTATIONS = {"triton": latent_store_triton, "torch": latent_store_torch, "reference": latent_store_reference}
