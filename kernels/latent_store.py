"""Writes tokens' latent entries of one layer into page-major memory."""

from collections.abc import Sequence

import torch

from kernels.backend import Backend, select


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

    latent    [num_tokens, kv_lora_rank]
    key_rope  [num_tokens, rope]
    pages     [num_pages, num_layers, page_size, kv_lora_rank + rope]  contiguous, written in place; entries are rounded to its dtype
    rows      [num_tokens] int64: rows of `pages.view(-1, width)`, one layer of `pool_rows`, all different
    """
    assert pages.is_contiguous() and pages.shape[-1] == latent.shape[1] + key_rope.shape[1], f"{pages.shape=} {latent.shape=}"
    select(IMPLEMENTATIONS, backend)(latent, key_rope, pages, rows)


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


IMPLEMENTATIONS = {"torch": latent_store_torch, "reference": latent_store_reference}
