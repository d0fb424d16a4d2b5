"""Paged attention over latents for one new token a request: MLA in its absorbed form, where all heads share one key and value."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.backend import Backend, select


@dataclass(frozen=True, slots=True)
class MlaDecodeShape:
    """Sizes fixed by the model; a cached entry is kv_lora_rank latent values, then rope_dim of the rotated key."""

    num_heads: int
    kv_lora_rank: int
    rope_dim: int
    softmax_scale: float

    @property
    def width(self) -> int:
        """Values of a cached entry."""
        return self.kv_lora_rank + self.rope_dim


class MlaDecode(Protocol):
    """Planned once a step, run once a layer."""

    def plan(self, pages: torch.Tensor, page_tables: Sequence[Sequence[int]], kv_lens: Sequence[int]) -> None:
        """Fix what the next runs attend to.

        pages        [num_pages, num_layers, page_size, width]; read by `run`, so entries stored in between count; of q's dtype or
                     one that is converted to it
        page_tables  a request each; entry i holds the positions i * page_size .. (i + 1) * page_size - 1
        kv_lens      a request each, >= 1: positions 0 .. kv_len - 1 are attended to, later slots are never read
        """
        ...

    def run(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """Attend in one layer.

        q        [batch, num_heads, width]: the query times kv_b's key half, then its rotated part
        returns  [batch, num_heads, kv_lora_rank]: softmax(q . entry * scale) weighted latents, still to pass kv_b's value half
        """
        ...


def create_mla_decode(shape: MlaDecodeShape, *, backend: Backend = "auto") -> MlaDecode:
    """Return the planner of the chosen backend."""
    return select(IMPLEMENTATIONS, backend)(shape)


class ReferenceMlaDecode:
    """Request by request, head by head, entry by entry gathered through the page table."""

    def __init__(self, shape: MlaDecodeShape) -> None:
        self._shape = shape

    def plan(self, pages: torch.Tensor, page_tables: Sequence[Sequence[int]], kv_lens: Sequence[int]) -> None:
        self._pages, self._page_tables, self._kv_lens = pages, page_tables, kv_lens

    def run(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        size, rank = self._pages.shape[2], self._shape.kv_lora_rank
        out = q.new_zeros(q.shape[0], q.shape[1], rank)
        for request, (table, kv_len) in enumerate(zip(self._page_tables, self._kv_lens, strict=True)):
            entries = torch.stack([self._pages[table[i // size], layer, i % size] for i in range(kv_len)]).to(q.dtype)  # [kv_len, width]
            for head in range(q.shape[1]):
                weights = torch.softmax(entries @ q[request, head] * self._shape.softmax_scale, dim=0)  # [kv_len]
                out[request, head] = weights @ entries[:, :rank]
        return out


class TorchMlaDecode:
    """A loop over requests, inside it over pages, on views: no entry is ever copied, so memory stays at scores [heads, kv_len].

    On a Zen 5 core as fast as gathering first up to 512 entries (8 requests, 4 heads: 474 | 478 us at 250 entries, 944 | 988
    at 512, paged | gathered), a third slower at 2,000, and padding for one batched product would read what nobody wrote.
    """

    def __init__(self, shape: MlaDecodeShape) -> None:
        self._shape = shape
        self._pages: torch.Tensor | None = None
        self._full_pages: list[_LayerViews] = []
        self._requests: list[tuple[list[_LayerViews], list[int]]] = []

    def plan(self, pages: torch.Tensor, page_tables: Sequence[Sequence[int]], kv_lens: Sequence[int]) -> None:
        if self._pages is None or pages.data_ptr() != self._pages.data_ptr() or pages.shape != self._pages.shape:
            # a view costs a microsecond and half a kilobyte: made once a pool, not once a step
            self._pages, self._full_pages = pages, [self._views(page) for page in pages.unbind(0)]
        size = pages.shape[2]
        self._requests = []
        for table, kv_len in zip(page_tables, kv_lens, strict=True):
            num_full, rest = divmod(kv_len, size)
            views = [self._full_pages[page] for page in table[:num_full]]
            if rest:
                views.append(self._views(pages[table[num_full], :, :rest]))
            self._requests.append((views, [size] * num_full + [rest] * (rest > 0)))

    def run(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        queries = (q * self._shape.softmax_scale).unbind(0)
        outs = [
            self._attend(query, [page[layer] for page in views], sizes)
            for query, (views, sizes) in zip(queries, self._requests, strict=True)
        ]
        return torch.stack(outs)

    def _attend(self, q: torch.Tensor, views: "list[tuple[torch.Tensor, torch.Tensor]]", sizes: list[int]) -> torch.Tensor:
        if views[0][0].dtype != q.dtype:
            converted = [entries.to(q.dtype) for entries, _ in views]
            views = [(entries, entries[:, : self._shape.kv_lora_rank]) for entries in converted]
        # entries on the left: read row after row they come from memory a tenth faster than as the right factor
        q = q.t()
        scores = torch.cat([torch.mm(entries, q) for entries, _ in views])  # [kv_len, num_heads]
        weights = torch.softmax(scores.t(), dim=1).split_with_sizes(sizes, dim=1)
        out = torch.mm(weights[0], views[0][1])  # [num_heads, kv_lora_rank]
        for part, (_, latents) in zip(weights[1:], views[1:], strict=True):
            out.addmm_(part, latents)
        return out

    def _views(self, page: torch.Tensor) -> "_LayerViews":
        """page [num_layers, n, width] -> a layer each: (entries [n, width], latents [n, kv_lora_rank])."""
        return list(zip(page.unbind(0), page[..., : self._shape.kv_lora_rank].unbind(0), strict=True))


_LayerViews = list[tuple[torch.Tensor, torch.Tensor]]
IMPLEMENTATIONS = {"torch": TorchMlaDecode, "reference": ReferenceMlaDecode}
