"""FlashInfer's paged MLA for Hopper (fa3), on strided views of the page-major pool: no layer is ever copied."""

import numpy as np
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper

from kernels.mla_decode import Lengths, MlaDecodeShape, PageTables, PlanLimits
from kernels.mla_decode._schedule import equal_shares
from kernels.mla_decode._tables import DeviceArrays, flat_pages, psum, to_ints

_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends; partial results need 34 MB of it


class FlashInferMlaDecode:
    """Plans by FlashInfer's scheduler on the host.

    Its work list and ours of pages lie in buffers that never move (FlashInfer takes an index tensor on the device as it is), so
    `run` may be captured once per (requests, queries) and replayed after later plans.
    """

    def __init__(self, shape: MlaDecodeShape, limits: PlanLimits | None) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self._shape, self._device = shape, device
        self._wrapper = BatchMLAPagedAttentionWrapper(torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device), backend="fa3")
        self._limits = limits
        self._indices = DeviceArrays(device, [limits.max_pages if limits else 1 << 14], fixed=limits is not None)
        self._planned = torch.cuda.Event()
        self._staging: torch.Tensor | None = None

    def plan(self, pages: torch.Tensor, page_tables: PageTables, kv_lens: Lengths, q_lens: Lengths | None = None) -> None:
        assert pages.dtype == torch.bfloat16 and pages.shape[3] == self._shape.width and pages.stride(3) == 1, f"{pages.shape=}"
        rank, size = self._shape.kv_lora_rank, pages.shape[2]
        kv, q = to_ints(kv_lens), np.ones(len(kv_lens), np.int32) if q_lens is None else to_ints(q_lens)
        assert self._limits is None or len(kv) <= self._limits.max_requests, f"{len(kv)} requests, {self._limits=}"
        counts = -(-kv // size)
        self._latents, self._ropes = pages[..., :rank], pages[..., rank:]
        self._num_queries = int(q.sum())
        if not self._num_queries:
            return
        self._indices.upload([flat_pages(page_tables, counts)])
        self._planned.synchronize()  # FlashInfer's own pinned buffer may still be read by the last plan's copy
        self._wrapper.plan(
            torch.from_numpy(psum(q)),
            torch.from_numpy(psum(counts)),
            self._indices.views[0],
            torch.from_numpy(kv),
            self._shape.num_heads,
            rank,
            self._shape.rope_dim,
            size,
            self._num_queries > len(kv),  # causal only among several new tokens
            self._shape.softmax_scale,
            torch.bfloat16,
            torch.bfloat16,
        )
        self._balance(q, kv, counts)
        self._planned.record()

    def _balance(self, q: np.ndarray, kv: np.ndarray, pages: np.ndarray) -> None:
        """Replace FlashInfer's work list by ours where that pays; both lie at the offsets that its plan tells (MLAPlanInfo)."""
        tiles, clusters, *offsets = map(int, self._wrapper._plan_info)
        work = equal_shares(
            q, kv, pages, num_heads=self._shape.num_heads, num_clusters=clusters, rows=64 * tiles, num_sms=clusters * tiles
        )
        if work is None:
            return
        offsets = [offset // 4 for offset in offsets[:14]]
        used = offsets[13] + len(work.work_indptr)
        if self._staging is None:
            self._staging = torch.zeros(self._wrapper._int_workspace_buffer.numel() // 4, dtype=torch.int32, pin_memory=True)
        host = self._staging.numpy()
        for offset, column in zip(offsets, work, strict=True):
            host[offset : offset + len(column)] = column
        self._wrapper._int_workspace_buffer.view(torch.int32)[:used].copy_(self._staging[:used], non_blocking=True)

    def run(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        rank = self._shape.kv_lora_rank
        assert q.shape == (self._num_queries, self._shape.num_heads, self._shape.width) and q.stride(2) == 1, f"{q.shape=} {q.stride()=}"
        assert q.stride(0) % 8 == q.stride(1) % 8 == 0, f"{q.stride()=}"
        out = q.new_empty(*q.shape[:2], rank)
        if not self._num_queries:
            return out
        return self._wrapper.run(q[..., :rank], q[..., rank:], self._latents[:, layer], self._ropes[:, layer], out=out)
