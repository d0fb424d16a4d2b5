"""Our paged MLA for any dims: persistent programs over equal shares of the step's KV, then a combine of split requests.

A request's rows (token major, then heads) are cut into tiles of BLOCK_H. NUM_PROGRAMS programs form groups of as many members as
a request has tiles; member t of a group takes tile t, so the tiles of one request read the same pages at the same time, from L2. The
blocks of BLOCK_N positions of all requests stand in one line, of which each group takes an equal share: a share begins or ends inside
at most two requests, whose partial results the combine merges. All of it is data in device buffers: a CUDA graph bakes in nothing.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.backend import interpreting
from kernels.launch import num_sms
from kernels.mla_decode import Lengths, MlaDecodeShape, PageTables, PlanLimits
from kernels.mla_decode._tables import DeviceArrays, check_spans, flat_pages, psum, to_ints

MIN_BLOCKS = 2
"""Blocks that a group takes at least: shorter shares cost more in the combine than they save."""
GLUON = {"CONSUMER_REGS": 224, "PREFETCH": 2}
COMBINE_HEADS = 4
FEW_ROWS = 2048
"""Up to so many rows of the output a program of the combine takes one, beyond it COMBINE_HEADS."""


@triton.jit
def _attend_kernel(
    q_ptr, pages_ptr, out_ptr, partial_ptr, lse_ptr,
    psum_q_ptr, psum_pages_ptr, kv_lens_ptr, psum_blocks_ptr, first_ptr, groups_ptr, indices_ptr,
    q_stride_token, q_stride_head, page_stride, token_stride, qk_scale,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, RANK_PAD: tl.constexpr, ROPE_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles, num_groups = tl.load(groups_ptr), tl.load(groups_ptr + 1)
    group, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if group >= num_groups:
        return
    total = tl.load(groups_ptr + 2)
    begin, end = (total * group) // num_groups, (total * (group + 1)) // num_groups
    first = tl.load(first_ptr + group)
    request = first
    offs_h, offs_n = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_N)
    offs_r, offs_p = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    while begin < end:
        block0, block1 = tl.load(psum_blocks_ptr + request), tl.load(psum_blocks_ptr + request + 1)
        q0, q1 = tl.load(psum_q_ptr + request), tl.load(psum_q_ptr + request + 1)
        stop = tl.minimum(end, block1)
        row = tile * BLOCK_H + offs_h
        token, head = row // HEADS, row % HEADS
        row_ok = token < q1 - q0
        if (stop > begin) & (tile * BLOCK_H < (q1 - q0) * HEADS):
            kv_len = tl.load(kv_lens_ptr + request)
            seen = kv_len - (q1 - q0) + 1 + token  # [BLOCK_H]
            table_ptr = indices_ptr + tl.load(psum_pages_ptr + request)
            q_rows = q_ptr + (q0 + token).to(tl.int64) * q_stride_token + head * q_stride_head
            q_latent = tl.load(q_rows[:, None] + offs_r[None, :], mask=row_ok[:, None] & (offs_r < RANK)[None, :], other=0.0)
            q_rope = tl.load(q_rows[:, None] + RANK + offs_p[None, :], mask=row_ok[:, None] & (offs_p < ROPE)[None, :], other=0.0)
            best = tl.full([BLOCK_H], float("-inf"), tl.float32)
            norm = tl.zeros([BLOCK_H], tl.float32)
            acc = tl.zeros([BLOCK_H, RANK_PAD], tl.float32)
            position = (begin - block0) * BLOCK_N + offs_n
            page = tl.load(table_ptr + position // PAGE_SIZE, mask=position < kv_len, other=0)
            for block in tl.range(begin - block0, stop - block0, num_stages=STAGES):
                position = block * BLOCK_N + offs_n
                ok = position < kv_len
                entry = page.to(tl.int64) * page_stride + (position % PAGE_SIZE) * token_stride
                rope = tl.load(
                    pages_ptr + entry[None, :] + RANK + offs_p[:, None], mask=ok[None, :] & (offs_p < ROPE)[:, None], other=0.0
                )
                latent = tl.load(pages_ptr + entry[:, None] + offs_r[None, :], mask=ok[:, None] & (offs_r < RANK)[None, :], other=0.0)
                following = position + BLOCK_N
                page = tl.load(table_ptr + following // PAGE_SIZE, mask=following < kv_len, other=0)
                scores = tl.dot(q_rope, rope, input_precision="ieee")
                scores = tl.dot(q_latent, tl.trans(latent), scores, input_precision="ieee")
                scores = tl.where(position[None, :] < seen[:, None], scores * qk_scale, float("-inf"))
                new_best = tl.maximum(best, tl.max(scores, 1))
                shift = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row may see none of a share's positions
                weights = tl.exp2(scores - shift[:, None])
                fade = tl.exp2(best - shift)
                norm = norm * fade + tl.sum(weights, 1)
                acc = tl.dot(weights.to(latent.dtype), latent, acc * fade[:, None], input_precision="ieee")
                best = new_best
            acc = acc / tl.where(norm == 0.0, 1.0, norm)[:, None]
            column_ok = row_ok[:, None] & (offs_r < RANK)[None, :]
            if (begin == block0) & (stop == block1):
                rows = ((q0 + token).to(tl.int64) * HEADS + head) * RANK
                tl.store(out_ptr + rows[:, None] + offs_r[None, :], acc.to(out_ptr.dtype.element_ty), mask=column_ok)
            else:
                slot = (tl.program_id(0) * 2 + (request != first).to(tl.int32)) * BLOCK_H + offs_h
                tl.store(
                    partial_ptr + slot.to(tl.int64)[:, None] * RANK + offs_r[None, :],
                    acc.to(partial_ptr.dtype.element_ty),
                    mask=column_ok,
                )
                tl.store(lse_ptr + slot, best + tl.log2(norm), mask=row_ok)  # -inf where nothing was seen
        begin = stop
        request += 1


@triton.jit
def _combine_kernel(
    out_ptr, partial_ptr, lse_ptr, psum_q_ptr, psum_blocks_ptr, first_ptr, groups_ptr, request_ptr,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, BLOCK_H: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    request = tl.load(request_ptr + query)
    tiles, num_groups, total = tl.load(groups_ptr), tl.load(groups_ptr + 1), tl.load(groups_ptr + 2)
    block0, block1 = tl.load(psum_blocks_ptr + request), tl.load(psum_blocks_ptr + request + 1)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    offs_r = tl.arange(0, RANK_PAD)
    ok = (head < HEADS)[:, None] & (offs_r < RANK)[None, :]
    out_rows = out_ptr + (query.to(tl.int64) * HEADS + head)[:, None] * RANK + offs_r[None, :]
    if block0 == block1:
        tl.store(out_rows, tl.zeros([ROWS, RANK_PAD], out_ptr.dtype.element_ty), mask=ok)
        return
    group0, group1 = ((block0 + 1) * num_groups - 1) // total, (block1 * num_groups - 1) // total
    if group0 == group1:
        return
    row = (query - tl.load(psum_q_ptr + request)) * HEADS + head
    tile, local = row // BLOCK_H, row % BLOCK_H
    best = tl.full([ROWS], float("-inf"), tl.float32)
    for group in range(group0, group1 + 1):
        second = (tl.load(first_ptr + group) != request).to(tl.int32)
        slot = ((group * tiles + tile) * 2 + second) * BLOCK_H + local
        best = tl.maximum(best, tl.load(lse_ptr + slot, mask=head < HEADS, other=float("-inf")))
    shift = tl.where(best == float("-inf"), 0.0, best)
    norm = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, RANK_PAD], tl.float32)
    for group in tl.range(group0, group1 + 1, num_stages=STAGES):  # no step waits for the one before
        second = (tl.load(first_ptr + group) != request).to(tl.int32)
        slot = ((group * tiles + tile) * 2 + second) * BLOCK_H + local
        weight = tl.exp2(tl.load(lse_ptr + slot, mask=head < HEADS, other=float("-inf")) - shift)
        part = tl.load(partial_ptr + slot.to(tl.int64)[:, None] * RANK + offs_r[None, :], mask=ok, other=0.0).to(tl.float32)
        acc += part * weight[:, None]
        norm += weight
    tl.store(out_rows, (acc / tl.where(norm == 0.0, 1.0, norm)[:, None]).to(out_ptr.dtype.element_ty), mask=ok)


class TritonMlaDecode:
    """The schedule is made on the host from lengths alone, in a dozen numpy calls."""

    def __init__(self, shape: MlaDecodeShape, limits: PlanLimits | None, *, num_programs: int | None = None) -> None:
        self._shape = shape
        cpu = interpreting()
        self._device = torch.device("cpu") if cpu else torch.device("cuda", torch.cuda.current_device())
        if num_programs is None:
            num_programs = 6 if cpu else num_sms(self._device)
        self._num_programs = num_programs
        requests = limits.max_requests if limits else 256
        sizes = (requests + 1, requests + 1, requests, requests + 1, num_programs, 3, 4 * requests, limits.max_pages if limits else 1 << 14)
        self._arrays = DeviceArrays(self._device, sizes, fixed=limits is not None)
        self._partial: tuple[torch.Tensor, torch.Tensor] | None = None

    def plan(self, pages: torch.Tensor, page_tables: PageTables, kv_lens: Lengths, q_lens: Lengths | None = None) -> None:
        assert pages.shape[3] == self._shape.width and pages.stride(3) == 1, f"{pages.shape=} {pages.stride()=}"
        kv, q = to_ints(kv_lens), np.ones(len(kv_lens), np.int32) if q_lens is None else to_ints(q_lens)
        check_spans(kv, q)
        self._pages, self._num_queries = pages, int(q.sum())
        if not self._num_queries:
            return
        self._config = choose_config(self._shape, self._num_queries / len(q))
        self._hopper = self._config["BLOCK_H"] == 64 and not why_not_gluon(self._shape, pages)
        block_h, block_n = self._config["BLOCK_H"], self._config["BLOCK_N"]
        counts, blocks = -(-kv // pages.shape[2]), psum(-(-kv // block_n))
        tiles = -(-int(q.max()) * self._shape.num_heads // block_h)
        assert tiles <= self._num_programs, f"{tiles=} {self._num_programs=}"
        total = int(blocks[-1])
        groups = max(1, min(self._num_programs // tiles, total // MIN_BLOCKS))
        begins = np.arange(groups, dtype=np.int64) * total // groups
        first = np.searchsorted(blocks, begins, side="right") - 1
        self._arrays.upload([
            psum(q), psum(counts), kv, blocks, first.astype(np.int32), to_ints([tiles, groups, total]),
            np.repeat(np.arange(len(q), dtype=np.int32), q), flat_pages(page_tables, counts),
        ])  # fmt: skip

    def run(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        heads, rank, rope = self._shape.num_heads, self._shape.kv_lora_rank, self._shape.rope_dim
        assert q.shape == (self._num_queries, heads, rank + rope) and q.stride(2) == 1, f"{q.shape=} {q.stride()=}"
        assert q.dtype == self._pages.dtype, f"{q.dtype=} {self._pages.dtype=}"
        out = q.new_empty(q.shape[0], heads, rank)
        if not self._num_queries:
            return out
        partial, lse = self._workspace(q)
        layer_pages, config = self._pages[:, layer], self._config
        psum_q, psum_pages, kv_lens, psum_blocks, first, groups, request_of, indices = self._arrays.views
        block_h, rank_pad = config["BLOCK_H"], max(16, triton.next_power_of_2(rank))
        if self._hopper:  # it reads all queries as one matrix; their copy costs a fortieth of the step
            self._attend_hopper(q.contiguous(), layer, out, partial, lse)
        else:
            _attend_kernel[(self._num_programs,)](
                q, layer_pages, out, partial, lse, psum_q, psum_pages, kv_lens, psum_blocks, first, groups, indices,
                q.stride(0), q.stride(1), layer_pages.stride(0), layer_pages.stride(1), self._shape.softmax_scale * 1.4426950408889634,
                HEADS=heads, RANK=rank, ROPE=rope, RANK_PAD=rank_pad, ROPE_PAD=max(16, triton.next_power_of_2(rope)),
                PAGE_SIZE=layer_pages.shape[1], **config,
            )  # fmt: skip
        rows = 1 if self._num_queries * heads <= FEW_ROWS else COMBINE_HEADS
        _combine_kernel[(self._num_queries, triton.cdiv(heads, rows))](
            out, partial, lse, psum_q, psum_blocks, first, groups, request_of,
            HEADS=heads, RANK=rank, RANK_PAD=rank_pad, BLOCK_H=block_h, ROWS=rows, STAGES=4,
        )  # fmt: skip
        return out

    def _attend_hopper(self, q, layer: int, out, partial, lse) -> None:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from kernels.mla_decode._triton_hopper import TILE, attend_hopper_kernel

        pages, q = self._pages.flatten(0, 2), q.flatten(0, 1)
        size, layers = self._pages.shape[2], self._pages.shape[1]
        wide, narrow = [64, 256], [64, 64]
        attend_hopper_kernel[(self._num_programs,)](
            TensorDescriptor.from_tensor(q, wide, TILE.value), TensorDescriptor.from_tensor(q, narrow, TILE.value),
            TensorDescriptor.from_tensor(pages, wide, TILE.value), TensorDescriptor.from_tensor(pages, narrow, TILE.value),
            pages, out, partial, lse, *self._arrays.views[:6], self._arrays.views[7],
            layers * size, layer * size, self._shape.softmax_scale * 1.4426950408889634,
            HEADS=self._shape.num_heads, PAGE_SIZE=size, **GLUON, num_warps=4,
        )  # fmt: skip

    def _workspace(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two slots a program, made once for the largest tile."""
        if self._partial is None or self._partial[0].dtype != q.dtype:
            slots = self._num_programs * 2 * 64
            partial = torch.empty(slots, self._shape.kv_lora_rank, dtype=q.dtype, device=q.device)
            self._partial = partial, torch.empty(slots, dtype=torch.float32, device=q.device)
        return self._partial


def why_not_gluon(shape: MlaDecodeShape, pages: torch.Tensor) -> str:
    """Empty if `_triton_hopper.py` serves these pages, else the reason for which the kernel for any dims does."""
    if not pages.is_cuda or pages.dtype != torch.bfloat16:
        return f"it serves bfloat16 on cuda, not {pages.dtype} on {pages.device.type}"
    if (shape.kv_lora_rank, shape.rope_dim) != (512, 64):
        return f"it has kv_lora_rank 512 and rope_dim 64, not {shape.kv_lora_rank} and {shape.rope_dim}"
    if pages.shape[2] % 64:
        return f"its blocks of 64 positions lie in one page, and pages have {pages.shape[2]}"
    return "" if pages.is_contiguous() else "it reads the pool as one matrix"


def choose_config(shape: MlaDecodeShape, queries_per_request: float) -> dict[str, int]:
    """Tile sizes, from what a CUDA graph is captured for: heads and the mean number of queries of a request."""
    rows = shape.num_heads * queries_per_request
    wide = triton.next_power_of_2(shape.kv_lora_rank) > 256
    if rows > 32:
        return {"BLOCK_H": 64, "BLOCK_N": 64, "STAGES": 2, "num_warps": 8 if wide else 4}
    if rows > 16:
        return {"BLOCK_H": 32, "BLOCK_N": 32, "STAGES": 2, "num_warps": 4}
    return {"BLOCK_H": 16, "BLOCK_N": 32, "STAGES": 3, "num_warps": 4}
