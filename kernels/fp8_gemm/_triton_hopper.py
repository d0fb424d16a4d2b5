"""Split-K GEMM in Gluon: a loader warp keeps the memory busy, and the sums of a tile's programs meet without a fence.

A program has one tile of the output and a range of its 128-wide k-blocks. Weights, which no kernel writes, are on their way before the
kernel ahead has ended. The program of a tile's last range adds the others' sums to its own, in the order of k. They come through a mailbox
that is all EMPTY between kernels: a word that is not has arrived, so nothing else is to be signalled or waited for, and the reader makes it
EMPTY again. A program waits only for programs of lower number, which the GPU starts first.
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
EMPTY = gl.constexpr(-1)  # as a float a NaN that no arithmetic makes
NAN = gl.constexpr(0x7FFFFFFF)
MOST_TRIES = gl.constexpr(1 << 22)  # some seconds: then the tile holds NaN, and the GPU does not hang


@gluon.jit
def _load(
    x_desc, w_desc, xs_desc, x_smem, w_smem, xs_smem, full, empty, first_row, first_column, begin, end,
    BM: gl.constexpr, BN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = x_smem.shape[0]
    BYTES: gl.constexpr = (BM + BN) * 128 + xs_smem.shape[2] * 4
    ahead = gl.minimum(end - begin, STAGES)
    for i in range(0, ahead):
        mbarrier.expect(full.index(i), BYTES)
        tma.async_copy_global_to_shared(w_desc, [first_column, (begin + i) * 128], full.index(i), w_smem.index(i))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for i in range(0, ahead):
        tma.async_copy_global_to_shared(x_desc, [first_row, (begin + i) * 128], full.index(i), x_smem.index(i))
        tma.async_copy_global_to_shared(xs_desc, [begin + i, first_row], full.index(i), xs_smem.index(i))
    stage, phase = 0, 0
    for block in range(begin + ahead, end):
        mbarrier.wait(empty.index(stage), phase)
        bar = full.index(stage)
        mbarrier.expect(bar, BYTES)
        tma.async_copy_global_to_shared(w_desc, [first_column, block * 128], bar, w_smem.index(stage))
        tma.async_copy_global_to_shared(x_desc, [first_row, block * 128], bar, x_smem.index(stage))
        tma.async_copy_global_to_shared(xs_desc, [block, first_row], bar, xs_smem.index(stage))
        stage += 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit
def _multiply(
    w_scale_ptr, out_ptr, mail_ptr, x_smem, w_smem, xs_smem, ws_smem, full, empty,
    m, n, out_row, first_row, first_column, begin, end, split, splits, tile,
    BM: gl.constexpr, BN: gl.constexpr, SWAP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    STAGES: gl.constexpr = x_smem.shape[0]
    ROWS: gl.constexpr = BN if SWAP else BM
    COLUMNS: gl.constexpr = BM if SWAP else BN
    DOWN: gl.constexpr = WARPS if ROWS >= WARPS * 16 else ROWS // 16
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [DOWN, WARPS // DOWN], [16, COLUMNS // (WARPS // DOWN), 32])
    scale_layout: gl.constexpr = gl.SliceLayout(0 if SWAP else 1, layout)
    at = gl.arange(0, MOST_BLOCKS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    w_scales = gl.load(w_scale_ptr + at, mask=at < end - begin, other=0.0)
    ws_smem._reinterpret(gl.float32, [MOST_BLOCKS], VECTOR).store(w_scales)
    gl.thread_barrier()
    if PDL:
        gdc_wait()
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    none = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    stage, phase = 0, 0
    for i in range(0, end - begin):
        w_scale = ws_smem.index(i).load(scale_layout)
        mbarrier.wait(full.index(stage), phase)
        x, w = x_smem.index(stage), w_smem.index(stage)
        if SWAP:
            product = warpgroup_mma(w, x.permute((1, 0)), none, use_acc=False, is_async=True)
        else:
            product = warpgroup_mma(x, w.permute((1, 0)), none, use_acc=False, is_async=True)
        x_scale = xs_smem.index(stage)._reinterpret(gl.float32, [xs_smem.shape[2]], VECTOR).slice(0, BM).load(scale_layout)
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
    down = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    across = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    if SWAP:
        rows, columns = across, down
    else:
        rows, columns = down, across
    mail = mail_ptr + tile * (splits - 1) * (BM * BN) + down * COLUMNS + across
    if split < splits - 1:
        bits = acc.to(gl.int32, bitcast=True)
        gl.store(mail + split * (BM * BN), gl.where(bits == EMPTY, NAN, bits))
    else:
        if splits > 1:
            acc = _receive(acc, mail, splits - 1, ROWS, COLUMNS, layout)
        pointers = out_ptr + (first_row + rows).to(gl.int64) * out_row + (first_column + columns)
        valid = (first_row + rows < m) & (first_column + columns < n)
        gl.store(pointers, acc.to(out_ptr.dtype.element_ty), mask=valid)


@gluon.jit
def _receive(acc, mail, number, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Add `number` tiles from the mailbox to `acc`, two of them awaited at once where registers suffice."""
    TILE: gl.constexpr = ROWS * COLUMNS
    AT_ONCE: gl.constexpr = 2 if 1024 * gl.num_warps() >= TILE else 1
    nothing = gl.full([ROWS, COLUMNS], EMPTY, gl.int32, layout)
    for i in range(0, number, AT_ONCE):
        first, second = mail + i * TILE, mail + gl.minimum(i + 1, number - 1) * TILE
        tries = 0
        a = gl.load(first, volatile=True)
        if AT_ONCE == 2:
            b = gl.load(second, volatile=True)
            while (_missing(a) | _missing(b)) & (tries < MOST_TRIES):
                a, b = gl.load(first, volatile=True), gl.load(second, volatile=True)
                tries += 1
        else:
            while _missing(a) & (tries < MOST_TRIES):
                a = gl.load(first, volatile=True)
                tries += 1
        gl.store(first, nothing)
        acc += a.to(gl.float32, bitcast=True)
        if AT_ONCE == 2:
            gl.store(second, nothing)
            acc += gl.where(i + 1 < number, b.to(gl.float32, bitcast=True), 0.0)
    return acc


@gluon.jit
def _missing(tile):
    return gl.max(gl.max((tile == EMPTY).to(gl.int32), 1), 0) > 0


@gluon.jit(do_not_specialize=["m", "k_blocks", "splits"])
def kernel(
    x_desc, w_desc, xs_desc, w_scale_ptr, out_ptr, mail_ptr, m, n, k_blocks, out_row, splits,
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
    tile, split = gl.program_id(0) // splits, gl.program_id(0) % splits
    m_tiles = gl.cdiv(m, BM)
    first_row, first_column = tile % m_tiles * BM, tile // m_tiles * BN
    begin, end = split * k_blocks // splits, (split + 1) * k_blocks // splits
    w_scale_ptr += first_column // 128 * k_blocks + begin
    gl.warp_specialize(
        [
            (_multiply, (w_scale_ptr, out_ptr, mail_ptr, x_smem, w_smem, xs_smem, ws_smem, full, empty,
                         m, n, out_row, first_row, first_column, begin, end, split, splits, tile, BM, BN, SWAP, PDL)),
            (_load, (x_desc, w_desc, xs_desc, x_smem, w_smem, xs_smem, full, empty, first_row, first_column, begin, end, BM, BN, PDL)),
        ],
        [1],
        [40],
    )  # fmt: skip


TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
SCALES = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def launch(x: Fp8, w: Fp8, out: torch.Tensor, config: Streamed, mail: torch.Tensor) -> tuple:
    """(grid, arguments, options) of the kernel for such a call."""
    (m, k), n = x.data.shape, w.data.shape[0]
    tiles, k_blocks = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n), k // GROUP
    assert 1 <= config.splits <= k_blocks <= MOST_BLOCKS.value * config.splits, f"{m=} {n=} {k=} {config=}"
    assert tiles * (config.splits - 1) * config.block_m * config.block_n <= mail.numel(), f"{m=} {n=} {k=} {config=}"
    x_desc = TensorDescriptor(x.data, [m, k], [x.data.stride(0), 1], [config.block_m, GROUP], TILE)
    w_desc = TensorDescriptor(w.data, [n, k], [k, 1], [config.block_n, GROUP], TILE)
    xs_desc = TensorDescriptor(x.scale, [k_blocks, m], [x.scale.stride(1), 1], [1, max(32, config.block_m)], SCALES)
    arguments = [x_desc, w_desc, xs_desc, w.scale, out, mail, m, n, k_blocks, out.stride(0), config.splits]
    tile = {"BM": config.block_m, "BN": config.block_n, "SWAP": config.swap, "STAGES": config.stages}
    return (tiles * config.splits,), arguments, {**tile, "num_warps": config.warps, "maxnreg": config.registers, **launch_options()}
