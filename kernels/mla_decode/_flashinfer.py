"""FlashInfer's paged MLA for Hopper (fa3), on strided views of the page-major pool: no layer is ever copied."""

import flashinfer
import numpy as np
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper

from kernels.launch import num_sms
from kernels.mla_decode import Lengths, MlaDecodeShape, PageTables, PlanLimits
from kernels.mla_decode._schedule import EVEN, MAX_ITEMS, Work, equal_shares, flashinfer_imbalance, most_items, replaces_work_of
from kernels.mla_decode._tables import DeviceArrays, check_spans, flat_pages, psum, to_ints

_ROWS = 64  # of the queries' heads that one thread block takes
_STAGING_INTS = 14 * MAX_ITEMS  # FlashInfer's work list: 14 arrays
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends; partial results need 34 MB of it


class FlashInferMlaDecode:
    """Plans by FlashInfer's scheduler on the host.

    Its work list, which we replace by equal shares where they pay, and ours of pages lie in buffers that never move (FlashInfer takes
    an index tensor on the device as it is), so `run` may be captured once per (requests, queries) and replayed after later plans.
    The list is private to FlashInfer: versions other than KNOWN_FLASHINFER keep their own schedule.
    """

    def __init__(self, shape: MlaDecodeShape, limits: PlanLimits | None) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self._shape, self._device = shape, device
        self._wrapper = BatchMLAPagedAttentionWrapper(torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device), backend="fa3")
        self._limits = limits
        self._indices = DeviceArrays(device, [limits.max_pages if limits else 1 << 14], fixed=limits is not None)
        self._planned = torch.cuda.Event()
        self._planned_for: tuple[int, bool, int, int] | None = None
        self._replaces_work = replaces_work_of(flashinfer.__version__)
        self._num_sms = num_sms(device)
        self._staging = torch.zeros(_STAGING_INTS, dtype=torch.int32, pin_memory=True)

    def plan(self, pages: torch.Tensor, page_tables: PageTables, kv_lens: Lengths, q_lens: Lengths | None = None) -> None:
        assert pages.dtype == torch.bfloat16 and pages.shape[3] == self._shape.width and pages.stride(3) == 1, f"{pages.shape=}"
        rank, size, heads = self._shape.kv_lora_rank, pages.shape[2], self._shape.num_heads
        kv, q = to_ints(kv_lens), np.ones(len(kv_lens), np.int32) if q_lens is None else to_ints(q_lens)
        check_spans(kv, q)
        assert self._limits is None or len(kv) <= self._limits.max_requests, f"{len(kv)} requests, {self._limits=}"
        counts = -(-kv // size)
        self._latents, self._ropes = pages[..., :rank], pages[..., rank:]
        self._num_queries = int(q.sum())
        if not self._num_queries:
            return
        self._indices.upload([flat_pages(page_tables, counts)])
        self._planned.synchronize()  # pinned buffers, FlashInfer's and ours, may still be read by the last plan's copies
        clusters_of = 2 if self._num_queries * heads // len(q) > _ROWS else 1  # FlashInfer's rule
        clusters, rows, work = self._num_sms // clusters_of, _ROWS * clusters_of, None
        items = most_items(q, num_heads=heads, num_clusters=clusters, rows=rows)
        assert items <= MAX_ITEMS, f"{len(q)} requests may need {items} work items, FlashInfer has {MAX_ITEMS}"
        if self._replaces_work and flashinfer_imbalance(q, kv, num_heads=heads, num_clusters=clusters, rows=rows) > EVEN:
            work = equal_shares(q, kv, counts, num_heads=heads, num_clusters=clusters, rows=rows, num_sms=self._num_sms)
        # causal only among several new tokens; the buffer moves when it grows
        key = (clusters_of, self._num_queries > len(kv), size, self._indices.views[0].data_ptr())
        if work is None or key != self._planned_for:
            self._plan_theirs(q, kv, counts, size)
            self._planned_for = key
        if work is not None:
            self._write(work)
        self._planned.record()

    def _plan_theirs(self, q: np.ndarray, kv: np.ndarray, counts: np.ndarray, page_size: int) -> None:
        self._wrapper.plan(
            torch.from_numpy(psum(q)),
            torch.from_numpy(psum(counts)),
            self._indices.views[0],
            torch.from_numpy(kv),
            self._shape.num_heads,
            self._shape.kv_lora_rank,
            self._shape.rope_dim,
            page_size,
            int(q.sum()) > len(kv),
            self._shape.softmax_scale,
            torch.bfloat16,
            torch.bfloat16,
        )

    def _write(self, work: Work) -> None:
        """Put our work list in place of FlashInfer's; both lie at the offsets that its plan tells (MLAPlanInfo in its scheduler.cuh)."""
        tiles, clusters, *offsets = map(int, self._wrapper._plan_info)
        assert tiles * clusters == self._num_sms and clusters + 1 == len(work.work_indptr), f"{tiles=} {clusters=}"
        host, used = self._staging.numpy(), offsets[13] // 4 + len(work.work_indptr)
        for offset, column in zip(offsets[:14], work, strict=True):
            host[offset // 4 : offset // 4 + len(column)] = column
        self._wrapper._int_workspace_buffer.view(torch.int32)[:used].copy_(self._staging[:used], non_blocking=True)

    def run(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        rank = self._shape.kv_lora_rank
        assert q.shape == (self._num_queries, self._shape.num_heads, self._shape.width) and q.stride(2) == 1, f"{q.shape=} {q.stride()=}"
        assert q.stride(0) % 8 == q.stride(1) % 8 == 0, f"{q.stride()=}"
        out = q.new_empty(*q.shape[:2], rank)
        if not self._num_queries:
            return out
        return self._wrapper.run(q[..., :rank], q[..., rank:], self._latents[:, layer], self._ropes[:, layer], out=out)
