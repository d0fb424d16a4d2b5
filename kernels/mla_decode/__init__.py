"""Paged attention over latents for one to four new tokens a request: MLA in its absorbed form, where all heads share one key and value."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.backend import Backend, BackendError, choose, why_unavailable

MAX_Q_LEN = 4
PageTables = Sequence[Sequence[int]] | torch.Tensor
Lengths = Sequence[int] | torch.Tensor


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


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What no step exceeds. With limits the planned buffers are made once and keep their addresses, so a CUDA graph of `run`
    may be replayed after any other plan with as many requests and as many queries; a plan beyond them is refused."""

    max_requests: int
    max_pages: int  # entries of all page tables of a step together


class MlaDecode(Protocol):
    """Planned once a step on the host, run once a layer."""

    def plan(self, pages: torch.Tensor, page_tables: PageTables, kv_lens: Lengths, q_lens: Lengths | None = None) -> None:
        """Fix what the next runs attend to.

        pages        [num_pages, num_layers, page_size, width]; read by `run`, so entries stored in between count; of q's dtype or
                     (torch, reference) one that is converted to it; rows contiguous
        page_tables  a request each; entry i holds the positions i * page_size .. (i + 1) * page_size - 1. Lists, or faster one int32
                     tensor [num_requests, at least the longest] in host memory. Entries beyond a request's kv_len are never looked at
        kv_lens      a request each, its new tokens included: positions 0 .. kv_len - 1 are attended to, later slots are never read.
                     0 is a padded request: none of its entries, pages or query values is read, its rows of the result are 0
        q_lens       a request each, 1 .. 4 new tokens, at most kv_len (default 1; padded requests have rows too): token j sees the
                     positions 0 .. kv_len - q_len + j
        """
        ...

    def run(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """Attend in one layer.

        q        [sum(q_lens), num_heads, width]: the query times kv_b's key half, then its rotated part; a request's tokens one after
                 the other; any strides of the first two dimensions (FlashInfer: multiples of 8)
        returns  [sum(q_lens), num_heads, kv_lora_rank]: softmax(q . entry * scale) weighted latents, still to pass kv_b's value half
        """
        ...


def create_mla_decode(
    shape: MlaDecodeShape,
    *,
    backend: Backend = "auto",
    device_type: str = "cpu",
    dtype: torch.dtype = torch.float32,
    limits: PlanLimits | None = None,
) -> MlaDecode:
    """Return the planner of the chosen backend for pages of `dtype` on `device_type`.

    "auto" passes over FlashInfer for dims it lacks; where both it and Triton serve, each step's size decides (`prefers_triton`).
    """
    reason = why_not_flashinfer(shape, dtype)
    if backend == "flashinfer" and reason:
        raise BackendError(f"backend 'flashinfer' cannot serve {shape}: {reason}")
    table = {name: make for name, make in IMPLEMENTATIONS.items() if name != "flashinfer" or not reason}
    name = choose(table, backend, device_type, dtype)
    if backend == "auto" and name == "flashinfer" and not why_unavailable("triton", device_type, dtype):
        return MlaDecodeBySize(shape, _make_flashinfer(shape, limits), _make_triton(shape, limits))
    return table[name](shape, limits)


def why_not_flashinfer(shape: MlaDecodeShape, dtype: torch.dtype) -> str:
    """Empty if FlashInfer's MLA for Hopper is compiled for these dims, else the reason."""
    if (shape.kv_lora_rank, shape.rope_dim) != (512, 64):
        return f"it has kv_lora_rank 512 and rope_dim 64, not {shape.kv_lora_rank} and {shape.rope_dim}"
    if dtype != torch.bfloat16:
        return f"it is built for bfloat16, not {dtype}"
    return ""


def prefers_triton(shape: MlaDecodeShape, num_requests: int, num_queries: int) -> bool:
    """Whether our kernel was the faster on a step of this size, both of them measured in one run on H200 (128 heads, KV 5,000).

    FlashInfer | Triton, us: 128 requests of 2 queries 654 | 627, of 1,000 to 9,000 entries 631 | 606; 64 of 2: 310 | 308; 128 of 1:
    319 | 351; 64 of 1: 174 | 186; 16 of 2: 90 | 97; 1 of 1: 23 | 34. Three and four queries are not measured and go to FlashInfer.
    """
    return num_requests >= 64 and 2 * num_requests <= num_queries < 3 * num_requests and shape.num_heads == 128


def query_spans(kv_lens: Lengths, q_lens: Lengths | None) -> list[tuple[int, int]]:
    """(kv_len, q_len) a request, checked."""
    kv_list = _ints(kv_lens)
    q_list = [1] * len(kv_list) if q_lens is None else _ints(q_lens)
    spans = list(zip(kv_list, q_list, strict=True))
    assert all(1 <= q_len <= MAX_Q_LEN and (kv_len == 0 or kv_len >= q_len) for kv_len, q_len in spans), f"{spans=}"
    return spans


def _ints(values: Lengths) -> list[int]:
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


class ReferenceMlaDecode:
    """Token by token, head by head, entry by entry gathered through the page table."""

    def __init__(self, shape: MlaDecodeShape, limits: PlanLimits | None = None) -> None:
        self._shape = shape

    def plan(self, pages: torch.Tensor, page_tables: PageTables, kv_lens: Lengths, q_lens: Lengths | None = None) -> None:
        self._pages, self._page_tables, self._spans = pages, page_tables, query_spans(kv_lens, q_lens)

    def run(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        size, rank = self._pages.shape[2], self._shape.kv_lora_rank
        out, row = q.new_zeros(q.shape[0], q.shape[1], rank), 0
        for table, (kv_len, q_len) in zip(self._page_tables, self._spans, strict=True):
            for token in range(q_len if kv_len else 0):
                seen = kv_len - q_len + 1 + token
                entries = torch.stack([self._pages[int(table[i // size]), layer, i % size] for i in range(seen)]).to(q.dtype)
                for head in range(q.shape[1]):
                    weights = torch.softmax(entries @ q[row + token, head] * self._shape.softmax_scale, dim=0)  # [seen]
                    out[row + token, head] = weights @ entries[:, :rank]
            row += q_len
        return out


def _same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype)


class TorchMlaDecode:
    """A loop over requests, inside it over pages, on views: no entry is ever copied, so memory stays at scores [q_len * heads, kv_len].

    On a Zen 5 core as fast as gathering first up to 512 entries (8 requests, 4 heads: 474 | 478 us at 250 entries, 944 | 988
    at 512, paged | gathered), a third slower at 2,000, and padding for one batched product would read what nobody wrote.
    """

    def __init__(self, shape: MlaDecodeShape, limits: PlanLimits | None = None) -> None:
        self._shape = shape
        self._pages: torch.Tensor | None = None
        self._full_pages: list[_LayerViews] = []
        self._requests: list[tuple[list[_LayerViews], list[int]]] = []
        self._q_lens: list[int] | None = None

    def plan(self, pages: torch.Tensor, page_tables: PageTables, kv_lens: Lengths, q_lens: Lengths | None = None) -> None:
        if self._pages is None or not _same_view(pages, self._pages):
            # a view costs a microsecond and half a kilobyte: made once a pool, not once a step
            self._pages, self._full_pages = pages, [self._views(page) for page in pages.unbind(0)]
        size = pages.shape[2]
        spans = query_spans(kv_lens, q_lens)
        tables: Sequence[Sequence[int]] = page_tables.tolist() if isinstance(page_tables, torch.Tensor) else page_tables
        self._q_lens = None if all(span[1] == 1 for span in spans) else [q_len for _, q_len in spans]
        self._requests = []
        for table, (kv_len, _) in zip(tables, spans, strict=True):
            num_full, rest = divmod(kv_len, size)
            views = [self._full_pages[page] for page in table[:num_full]]
            if rest:
                views.append(self._views(pages[table[num_full], :, :rest]))
            self._requests.append((views, [size] * num_full + [rest] * (rest > 0)))

    def run(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        if not self._requests:
            return q.new_zeros(0, q.shape[1], self._shape.kv_lora_rank)
        queries = q * self._shape.softmax_scale
        parts = [(view, 1) for view in queries.unbind(0)] if self._q_lens is None else self._several(queries)
        outs = [
            self._attend(query, num, [page[layer] for page in views], sizes)
            for (query, num), (views, sizes) in zip(parts, self._requests, strict=True)
        ]
        return torch.stack(outs) if self._q_lens is None else torch.cat(outs).unflatten(0, (-1, q.shape[1]))

    def _several(self, q: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        """A request each: its tokens' heads as rows [q_len * num_heads, width], and q_len."""
        assert self._q_lens is not None
        return [(rows.flatten(0, 1), len(rows)) for rows in q.split_with_sizes(self._q_lens)]

    def _attend(self, q: torch.Tensor, num_tokens: int, views: "list[tuple[torch.Tensor, torch.Tensor]]", sizes: list[int]) -> torch.Tensor:
        if not views:
            return q.new_zeros(q.shape[0], self._shape.kv_lora_rank)
        if views[0][0].dtype != q.dtype:
            converted = [entries.to(q.dtype) for entries, _ in views]
            views = [(entries, entries[:, : self._shape.kv_lora_rank]) for entries in converted]
        # entries on the left: read row after row they come from memory a tenth faster than as the right factor
        q = q.t()
        scores = torch.cat([torch.mm(entries, q) for entries, _ in views])  # [kv_len, rows]
        if num_tokens > 1:  # of the last num_tokens entries, token j sees the first j + 1
            hidden = scores.new_full((num_tokens, num_tokens), -torch.inf).tril_(-1)  # [entry, token]
            scores[-num_tokens:] += hidden.repeat_interleave(scores.shape[1] // num_tokens, dim=1)
        weights = torch.softmax(scores.t(), dim=1).split_with_sizes(sizes, dim=1)
        out = torch.mm(weights[0], views[0][1])  # [rows, kv_lora_rank]
        for part, (_, latents) in zip(weights[1:], views[1:], strict=True):
            out.addmm_(part, latents)
        return out

    def _views(self, page: torch.Tensor) -> "_LayerViews":
        """page [num_layers, n, width] -> a layer each: (entries [n, width], latents [n, kv_lora_rank])."""
        return list(zip(page.unbind(0), page[..., : self._shape.kv_lora_rank].unbind(0), strict=True))


class MlaDecodeBySize:
    """Both GPU backends, of which each plan takes one; by numbers that a captured graph fixes, so replays stay right."""

    def __init__(self, shape: MlaDecodeShape, flashinfer: MlaDecode, triton: MlaDecode) -> None:
        self._shape, self._flashinfer, self._triton, self._planned = shape, flashinfer, triton, flashinfer

    def plan(self, pages: torch.Tensor, page_tables: PageTables, kv_lens: Lengths, q_lens: Lengths | None = None) -> None:
        num_requests = len(kv_lens)
        num_queries = num_requests if q_lens is None else int(sum(q_lens))
        # other pools go to our kernel for any dims, which is the slower one here
        large = prefers_triton(self._shape, num_requests, num_queries) and pages.is_contiguous() and pages.shape[2] % 64 == 0
        self._planned = self._triton if large else self._flashinfer
        self._planned.plan(pages, page_tables, kv_lens, q_lens)

    def run(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        return self._planned.run(q, layer)


def _make_flashinfer(shape: MlaDecodeShape, limits: PlanLimits | None) -> MlaDecode:
    from kernels.mla_decode._flashinfer import FlashInferMlaDecode

    return FlashInferMlaDecode(shape, limits)


def _make_triton(shape: MlaDecodeShape, limits: PlanLimits | None) -> MlaDecode:
    from kernels.mla_decode._triton import TritonMlaDecode

    return TritonMlaDecode(shape, limits)


_LayerViews = list[tuple[torch.Tensor, torch.Tensor]]
_Maker = Callable[[MlaDecodeShape, PlanLimits | None], MlaDecode]
IMPLEMENTATIONS: Mapping[str, _Maker] = {
    "flashinfer": _make_flashinfer,
    "triton": _make_triton,
    "torch": TorchMlaDecode,
    "reference": ReferenceMlaDecode,
}
