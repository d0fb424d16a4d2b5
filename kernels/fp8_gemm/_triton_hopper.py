"""Stream-K GEMM in Gluon: a loader warp keeps the memory busy, and no program waits for another.

All (tile, 128-wide k-block) pairs stand in one line, cut into as many equal pieces as there are programs. The loader runs through its
piece without a pause, whatever tiles it crosses; weights, which no kernel writes, are on their way before the kernel ahead has ended. A
tile that several programs share leaves its fp32 partial sums in the workspace; the program that arrives last adds them in the order of k
and sets the tile's counter back to 0.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.fp8_gemm._table import Streamed
from kernels.launch import launch_options
from kernels.numerics import GROUP, Fp8

VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
MOST_BLOCKS = gl.constexpr(256)


@gluon.jit
def _load(
    x_desc, w_desc, xs_desc, x_smem, w_smem, xs_smem, full, empty, m_tiles, k_blocks, begin, end,
    BM: gl.constexpr, BN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = x_smem.shape[0]
    BYTES: gl.constexpr = (BM + BN) * 128 + xs_smem.shape[2] * 4
    ahead = gl.minimum(end - begin, STAGES)
    for i in range(0, ahead):
        tile, block = (begin + i) // k_blocks, (begin + i) % k_blocks
        mbarrier.expect(full.index(i), BYTES)
        tma.async_copy_global_to_shared(w_desc, [tile // m_tiles * BN, block * 128], full.index(i), w_smem.index(i))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for i in range(0, ahead):
        tile, block = (begin + i) // k_blocks, (begin + i) % k_blocks
        tma.async_copy_global_to_shared(x_desc, [tile % m_tiles * BM, block * 128], full.index(i), x_smem.index(i))
        tma.async_copy_global_to_shared(xs_desc, [block, tile % m_tiles * BM], full.index(i), xs_smem.index(i))
    tile, block = (begin + ahead) // k_blocks, (begin + ahead) % k_blocks
    stage, phase = 0, 0
    for _ in range(begin + ahead, end):
        mbarrier.wait(empty.index(stage), phase)
        bar = full.index(stage)
        mbarrier.expect(bar, BYTES)
        tma.async_copy_global_to_shared(w_desc, [tile // m_tiles * BN, block * 128], bar, w_smem.index(stage))
        tma.async_copy_global_to_shared(x_desc, [tile % m_tiles * BM, block * 128], bar, x_smem.index(stage))
        tma.async_copy_global_to_shared(xs_desc, [block, tile % m_tiles * BM], bar, xs_smem.index(stage))
        block += 1
        tile = gl.where(block == k_blocks, tile + 1, tile)
        block = gl.where(block == k_blocks, 0, block)
        stage += 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit
def _multiply(
    w_scale_ptr, out_ptr, partial_ptr, counter_ptr, x_smem, w_smem, xs_smem, ws_smem, full, empty,
    m, n, k_blocks, out_row, slots, m_tiles, tiles, begin, end,
    BM: gl.constexpr, BN: gl.constexpr, SWAP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    STAGES: gl.constexpr = x_smem.shape[0]
    ROWS: gl.constexpr = BN if SWAP else BM
    COLUMNS: gl.constexpr = BM if SWAP else BN
    DOWN: gl.constexpr = WARPS if ROWS >= WARPS * 16 else ROWS // 16
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [DOWN, WARPS // DOWN], [16, COLUMNS // (WARPS // DOWN), 32])
    scale_layout: gl.constexpr = gl.SliceLayout(0 if SWAP else 1, acc_layout)
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    unit, stage, phase = begin, 0, 0
    if PDL:
        gdc_wait()
    while unit < end:
        tile = unit // k_blocks
        first_block = unit - tile * k_blocks
        number = gl.minimum(end - unit, k_blocks - first_block)
        first_row, first_column = tile % m_tiles * BM, tile // m_tiles * BN
        at = gl.arange(0, MOST_BLOCKS, flat)
        gl.thread_barrier()  # the tile before may still be read
        ws_smem._reinterpret(gl.float32, [MOST_BLOCKS], VECTOR).store(
            gl.load(w_scale_ptr + first_column // 128 * k_blocks + first_block + at, mask=at < number, other=0.0)
        )
        gl.thread_barrier()
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, acc_layout)
        none = gl.zeros([ROWS, COLUMNS], gl.float32, acc_layout)
        for i in range(0, number):
            w_scale = ws_smem.index(i).load(scale_layout)
            mbarrier.wait(full.index(stage), phase)
            x, w = x_smem.index(stage), w_smem.index(stage)
            if SWAP:
                product = warpgroup_mma(w, x.permute((1, 0)), none, use_acc=False, is_async=True)
            else:
                product = warpgroup_mma(x, w.permute((1, 0)), none, use_acc=False, is_async=True)
            xs: gl.constexpr = xs_smem.shape[2]
            x_scale = xs_smem.index(stage)._reinterpret(gl.float32, [xs], VECTOR).slice(0, BM).load(scale_layout)
            product = warpgroup_mma_wait(0, [product])
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            scale = x_scale * w_scale
            if SWAP:
                acc += product * scale[None, :]
            else:
                acc += product * scale[:, None]
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)
        down = gl.arange(0, ROWS, gl.SliceLayout(1, acc_layout))[:, None]
        across = gl.arange(0, COLUMNS, gl.SliceLayout(0, acc_layout))[None, :]
        if SWAP:
            rows, columns = across, down
        else:
            rows, columns = down, across
        if number == k_blocks:
            _store(acc, out_ptr, first_row + rows, first_column + columns, m, n, out_row)
        else:
            units, programs = tiles * k_blocks, gl.num_programs(0)
            first = ((tile * k_blocks + 1) * programs - 1) // units
            parts = ((tile + 1) * k_blocks * programs - 1) // units - first + 1
            partials = partial_ptr + tile * slots * (BM * BN)
            gl.store(partials + (gl.program_id(0) - first) * (BM * BN) + rows * BN + columns, acc)
            gl.thread_barrier()  # all threads' sums are written before one of them announces it
            arrived = gl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
            if arrived == parts - 1:
                gl.store(counter_ptr + tile, 0)
                _reduce(partials, out_ptr, parts, first_row, first_column, m, n, out_row, BM, BN)
        unit += number


@gluon.jit
def _reduce(partials, out_ptr, parts, first_row, first_column, m, n, out_row, BM: gl.constexpr, BN: gl.constexpr):
    """Add up the partial sums of a tile, some rows at a time, four in flight."""
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = BN // 4 if BN < 128 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    MOST: gl.constexpr = WARPS * 32 * 16 // BN
    SLICE: gl.constexpr = MOST if MOST < BM else BM
    TILE: gl.constexpr = BM * BN
    columns = gl.arange(0, BN, gl.SliceLayout(0, layout))[None, :]
    for part in range(0, BM // SLICE):
        rows = part * SLICE + gl.arange(0, SLICE, gl.SliceLayout(1, layout))[:, None]
        inside = partials + rows * BN + columns
        total = gl.zeros([SLICE, BN], gl.float32, layout)
        for i in range(0, parts, 4):
            a = gl.load(inside + i * TILE, cache_modifier=".cg")
            b = gl.load(inside + gl.minimum(i + 1, parts - 1) * TILE, cache_modifier=".cg")
            c = gl.load(inside + gl.minimum(i + 2, parts - 1) * TILE, cache_modifier=".cg")
            d = gl.load(inside + gl.minimum(i + 3, parts - 1) * TILE, cache_modifier=".cg")
            total += a
            total = gl.where(i + 1 < parts, total + b, total)
            total = gl.where(i + 2 < parts, total + c, total)
            total = gl.where(i + 3 < parts, total + d, total)
        _store(total, out_ptr, first_row + rows, first_column + columns, m, n, out_row)


@gluon.jit
def _store(tile, out_ptr, rows, columns, m, n, out_row):
    pointers = out_ptr + rows.to(gl.int64) * out_row + columns
    gl.store(pointers, tile.to(out_ptr.dtype.element_ty), mask=(rows < m) & (columns < n))


@gluon.jit(do_not_specialize=["m", "k_blocks", "slots"])
def kernel(
    x_desc, w_desc, xs_desc, w_scale_ptr, out_ptr, partial_ptr, counter_ptr, m, n, k_blocks, out_row, slots,
    BM: gl.constexpr, BN: gl.constexpr, SWAP: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, 128], x_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, 128], w_desc.layout)
    xs_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, xs_desc.block_shape[1]], xs_desc.layout)
    ws_smem = gl.allocate_shared_memory(gl.float32, [MOST_BLOCKS, 1], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    m_tiles = gl.cdiv(m, BM)
    tiles = m_tiles * gl.cdiv(n, BN)
    units, programs = tiles * k_blocks, gl.num_programs(0)
    begin, end = gl.program_id(0) * units // programs, (gl.program_id(0) + 1) * units // programs
    gl.warp_specialize(
        [
            (_multiply, (w_scale_ptr, out_ptr, partial_ptr, counter_ptr, x_smem, w_smem, xs_smem, ws_smem, full, empty,
                         m, n, k_blocks, out_row, slots, m_tiles, tiles, begin, end, BM, BN, SWAP, PDL)),
            (_load, (x_desc, w_desc, xs_desc, x_smem, w_smem, xs_smem, full, empty, m_tiles, k_blocks, begin, end, BM, BN, PDL)),
        ],
        [1],
        [40],
    )  # fmt: skip


TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
SCALES = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def launch(x: Fp8, w: Fp8, out: torch.Tensor, config: Streamed, partials: torch.Tensor, counters: torch.Tensor) -> tuple:
    """(grid, arguments, options) of the kernel for such a call."""
    (m, k), n = x.data.shape, w.data.shape[0]
    tiles, k_blocks = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n), k // GROUP
    programs = min(config.programs, tiles * k_blocks)
    slots = triton.cdiv(programs, tiles) + 1
    assert k_blocks <= MOST_BLOCKS.value and tiles * k_blocks * programs < 2**31, f"{m=} {n=} {k=} {config=}"
    assert tiles <= counters.numel() and tiles * slots * config.block_m * config.block_n <= partials.numel(), f"{m=} {n=} {k=} {config=}"
    x_desc = TensorDescriptor(x.data, [m, k], [x.data.stride(0), 1], [config.block_m, GROUP], TILE)
    w_desc = TensorDescriptor(w.data, [n, k], [k, 1], [config.block_n, GROUP], TILE)
    xs_desc = TensorDescriptor(x.scale, [k_blocks, m], [x.scale.stride(1), 1], [1, max(32, config.block_m)], SCALES)
    arguments = [x_desc, w_desc, xs_desc, w.scale, out, partials, counters, m, n, k_blocks, out.stride(0), slots]
    tile = {"BM": config.block_m, "BN": config.block_n, "SWAP": config.swap, "STAGES": config.stages}
    return (programs,), arguments, {**tile, "num_warps": config.warps, "maxnreg": config.registers, **launch_options()}
