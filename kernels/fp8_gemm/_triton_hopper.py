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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.fp8_gemm._table import Streamed
from kernels.fp8_gemm._triton_hopper_consumer import MOST_BLOCKS, VECTOR, multiply, multiply_half
from kernels.launch import launch_options
from kernels.numerics import GROUP, Fp8


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
    WIDE: gl.constexpr = BM == 256 and BN == 128
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2 if WIDE else 1)
    m_tiles = gl.cdiv(m, BM)
    tiles = m_tiles * gl.cdiv(n, BN)
    units, programs = tiles * k_blocks, gl.num_programs(0)
    begin, end = gl.program_id(0) * units // programs, (gl.program_id(0) + 1) * units // programs
    if WIDE:
        other_ws_smem = gl.allocate_shared_memory(gl.float32, [MOST_BLOCKS, 1], VECTOR)
        gl.warp_specialize(
            [
                (multiply_half, (w_scale_ptr, out_ptr, partial_ptr, counter_ptr, x_smem, w_smem, xs_smem, ws_smem, full, empty,
                                  m, n, k_blocks, out_row, slots, m_tiles, tiles, begin, end, 0, PDL)),
                (multiply_half, (w_scale_ptr, out_ptr, partial_ptr, counter_ptr, x_smem, w_smem, xs_smem, other_ws_smem, full, empty,
                                  m, n, k_blocks, out_row, slots, m_tiles, tiles, begin, end, 1, PDL)),
                (_load, (x_desc, w_desc, xs_desc, x_smem, w_smem, xs_smem, full, empty, m_tiles, k_blocks, begin, end, BM, BN, PDL)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (w_scale_ptr, out_ptr, partial_ptr, counter_ptr, x_smem, w_smem, xs_smem, ws_smem, full, empty,
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
    slots = programs // tiles if programs % tiles == 0 else triton.cdiv(programs, tiles) + 1  # the most programs that share a tile
    room = tiles * slots * config.block_m * config.block_n if slots > 1 else 0
    assert k_blocks <= MOST_BLOCKS.value and tiles * k_blocks * programs < 2**31, f"{m=} {n=} {k=} {config=}"
    assert room <= partials.numel() and (slots == 1 or 2 * tiles <= counters.numel()), f"{m=} {n=} {k=} {config=}"
    x_desc = TensorDescriptor(x.data, [m, k], [x.data.stride(0), 1], [config.block_m, GROUP], TILE)
    w_desc = TensorDescriptor(w.data, [n, k], [k, 1], [config.block_n, GROUP], TILE)
    xs_desc = TensorDescriptor(x.scale, [k_blocks, m], [x.scale.stride(1), 1], [1, max(32, config.block_m)], SCALES)
    arguments = [x_desc, w_desc, xs_desc, w.scale, out, partials, counters, m, n, k_blocks, out.stride(0), slots]
    tile = {"BM": config.block_m, "BN": config.block_n, "SWAP": config.swap, "STAGES": config.stages}
    return (programs,), arguments, {**tile, "num_warps": config.warps, "maxnreg": config.registers, **launch_options()}
