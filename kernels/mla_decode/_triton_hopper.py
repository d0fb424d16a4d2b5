"""Paged MLA for DeepSeek's dims in Gluon: two consumer warpgroups that each hold half of the output, and a loader.

A step takes two blocks of 64 positions. Warpgroup 0 makes the scores and weights of the first, warpgroup 1 those of the second, and
both multiply both: their own weights from registers, the other's through shared memory. So the tensor cores do, in this order,
scores 0, scores 1, output += weights 0, output += weights 1, and the softmax of block 0 hides under the scores of block 1, that of
block 1 under the output of block 0, the loads of the next block 0 under the output of block 1. Halves of a block are loaded and
freed apart. A block's rope part is read first and then holds that block's weights.

Schedule, partial results and combine are those of `_triton.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.mla_decode._triton_hopper_load import (
    EMPTY_Q,
    FULL_Q,
    HALF,
    L0,
    L1,
    NORM0,
    NORM1,
    NUM_BARRIERS,
    P0,
    P1,
    R0,
    R1,
    ROPE,
    ROWS,
    WEIGHTS0,
    WEIGHTS1,
    item_of,
    loader,
    share_of,
)  # fmt: skip

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
LOWEST = gl.constexpr(-1e30)  # finite, so that a row that has seen nothing makes no NaN


@gluon.jit
def _signal(bars, index: gl.constexpr):
    gl.thread_barrier()
    mbarrier.arrive(bars.index(index), count=1)


@gluon.jit
def _zero(phase):
    """0, which the compiler does not know: it would compute all operands' descriptors before the loop, and spill them."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [phase], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _issue_scores(q_l, q_r, q_p, k_l, k_r, k_p, bars, L: gl.constexpr, phase):
    """Score products of one block, begun piece by piece as they arrive."""
    acc = gl.zeros([ROWS, 64], gl.float32, SCORES)
    mbarrier.wait(bars.index(L), phase)
    acc = warpgroup_mma(q_l, k_l.permute((1, 0)), acc, use_acc=False, is_async=True)
    mbarrier.wait(bars.index(L + 1), phase)
    acc = warpgroup_mma(q_r, k_r.permute((1, 0)), acc, is_async=True)
    mbarrier.wait(bars.index(L + 2), phase)
    return warpgroup_mma(q_p, k_p.permute((1, 0)), acc, is_async=True)


@gluon.jit
def _masked(scores, block, limit):
    position = block * 64 + gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    return gl.where(position[None, :] < limit[:, None], scores, float("-inf"))


@gluon.jit
def _limit(tile, kv_len, q_len, stop_block, HEADS: gl.constexpr):
    row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    return gl.minimum(kv_len - q_len + 1 + row // HEADS, stop_block * 64)


@gluon.jit
def _store(
    acc, norm, best, out_ptr, partial_ptr, lse_ptr, q0, q_len, tile, whole, second, column, LSE: gl.constexpr, HEADS: gl.constexpr
):  # fmt: skip
    row = gl.arange(0, ROWS, gl.SliceLayout(1, OUTPUT))
    packed = tile * ROWS + row
    ok = packed < q_len * HEADS
    offs = column + gl.arange(0, HALF, gl.SliceLayout(0, OUTPUT))
    norm_o = gl.convert_layout(norm, gl.SliceLayout(1, OUTPUT))
    acc = acc / gl.where(norm_o == 0.0, 1.0, norm_o)[:, None]
    values = acc.to(gl.bfloat16)
    slot = (gl.program_id(0) * 2 + second) * ROWS
    if whole:
        rows = (q0.to(gl.int64) * HEADS + packed) * (2 * HALF)
        gl.store(out_ptr + rows[:, None] + offs[None, :], values, mask=ok[:, None])
    else:
        gl.store(partial_ptr + ((slot + row) * (2 * HALF))[:, None] + offs[None, :], values, mask=ok[:, None])
        if LSE:
            at = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
            gl.store(lse_ptr + slot + at, best + gl.log2(norm), mask=tile * ROWS + at < q_len * HEADS)


@gluon.jit
def _left(
    q_l, q_r, q_p, k0_l, k0_r, k0_p, k1_l, k1_p, vectors, bars, out_ptr, partial_ptr, lse_ptr,
    psum_q_ptr, kv_lens_ptr, psum_blocks_ptr, first_ptr, groups_ptr, qk_scale, HEADS: gl.constexpr,
):  # fmt: skip
    """Warpgroup 0: even blocks' scores, columns 0 .. 255 of the output."""
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    tile, begin, end, first = share_of(groups_ptr, first_ptr)
    request, phase, item_phase = first, 0, 0
    while begin < end:
        q0, q_len, block0, block1, stop, active = item_of(request, psum_q_ptr, psum_blocks_ptr, begin, end, tile, HEADS)
        if active:
            kv_len = gl.load(kv_lens_ptr + request)
            limit = _limit(tile, kv_len, q_len, stop - block0, HEADS)
            shortest = gl.minimum(kv_len - q_len + 1, (stop - block0) * 64)
            best = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
            norm = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
            acc = gl.zeros([ROWS, HALF], gl.float32, OUTPUT)
            mbarrier.wait(bars.index(FULL_Q), item_phase)
            for block in range(begin - block0, stop - block0, 2):
                z = _zero(phase)
                mine_l, mine_r, mine_p = k0_l.index(z), k0_r.index(z), k0_p.index(z)
                scores = _issue_scores(q_l.index(z), q_r.index(z), q_p.index(z), mine_l, mine_r, mine_p, bars, L0, phase)
                scores = warpgroup_mma_wait(0, [scores])
                if (block + 1) * 64 > shortest:
                    scores = _masked(scores, block, limit)
                best0 = gl.maximum(best, gl.max(scores, 1) * qk_scale)
                weights = gl.exp2(scores * qk_scale - best0[:, None])
                rounded = weights.to(gl.bfloat16)
                vectors.index(0).store(best0)
                mine_p.store(rounded)
                fence_async_shared()
                _signal(bars, WEIGHTS0)
                fade = gl.exp2(best - best0)
                norm = norm * fade + gl.sum(weights, 1)
                acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, OUTPUT))[:, None]
                acc = warpgroup_mma(gl.convert_layout(rounded, weights_layout), mine_l, acc, is_async=True)
                mbarrier.wait(bars.index(WEIGHTS1), phase)
                best = vectors.index(1).load(gl.SliceLayout(1, SCORES))
                fade = gl.exp2(best0 - best)
                norm = norm * fade
                acc = warpgroup_mma_wait(0, [acc])
                _signal(bars, 6 + L0)
                acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, OUTPUT))[:, None]
                acc = warpgroup_mma(k1_p.index(z), k1_l.index(z), acc, is_async=True)
                acc = warpgroup_mma_wait(0, [acc])
                _signal(bars, 6 + L1)
                mbarrier.arrive(bars.index(6 + P1), count=1)
                phase ^= 1
            mbarrier.arrive(bars.index(EMPTY_Q), count=1)
            vectors.index(2).store(norm)
            _signal(bars, NORM0)
            mbarrier.wait(bars.index(NORM1), item_phase)
            norm += vectors.index(3).load(gl.SliceLayout(1, SCORES))
            whole = (begin == block0) & (stop == block1)
            second = (request != first).to(gl.int32)
            _store(acc, norm, best, out_ptr, partial_ptr, lse_ptr, q0, q_len, tile, whole, second, 0, True, HEADS)
            item_phase ^= 1
        begin = stop
        request += 1


@gluon.jit
def _right(
    q_l, q_r, q_p, k1_l, k1_r, k1_p, k0_r, k0_p, vectors, bars, out_ptr, partial_ptr, lse_ptr,
    psum_q_ptr, kv_lens_ptr, psum_blocks_ptr, first_ptr, groups_ptr, qk_scale, HEADS: gl.constexpr,
):  # fmt: skip
    """Warpgroup 1: odd blocks' scores, columns 256 .. 511 of the output."""
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    tile, begin, end, first = share_of(groups_ptr, first_ptr)
    request, phase, item_phase = first, 0, 0
    while begin < end:
        q0, q_len, block0, block1, stop, active = item_of(request, psum_q_ptr, psum_blocks_ptr, begin, end, tile, HEADS)
        if active:
            kv_len = gl.load(kv_lens_ptr + request)
            limit = _limit(tile, kv_len, q_len, stop - block0, HEADS)
            shortest = gl.minimum(kv_len - q_len + 1, (stop - block0) * 64)
            best = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
            norm = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
            acc = gl.zeros([ROWS, HALF], gl.float32, OUTPUT)
            mbarrier.wait(bars.index(FULL_Q), item_phase)
            for block in range(begin - block0, stop - block0, 2):
                z = _zero(phase)
                mine_l, mine_r, mine_p = k1_l.index(z), k1_r.index(z), k1_p.index(z)
                scores = _issue_scores(q_l.index(z), q_r.index(z), q_p.index(z), mine_l, mine_r, mine_p, bars, L1, phase)
                mbarrier.wait(bars.index(WEIGHTS0), phase)
                best0 = vectors.index(0).load(gl.SliceLayout(1, SCORES))
                fade = gl.exp2(best - best0)
                norm = norm * fade
                acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, OUTPUT))[:, None]
                acc = warpgroup_mma(k0_p.index(z), k0_r.index(z), acc, is_async=True)
                scores = warpgroup_mma_wait(1, [scores])
                if (block + 2) * 64 > shortest:
                    scores = _masked(scores, block + 1, limit)
                best = gl.maximum(best0, gl.max(scores, 1) * qk_scale)
                weights = gl.exp2(scores * qk_scale - best[:, None])
                rounded = weights.to(gl.bfloat16)
                vectors.index(1).store(best)
                mine_p.store(rounded)
                fence_async_shared()
                _signal(bars, WEIGHTS1)
                fade = gl.exp2(best0 - best)
                norm = norm * fade + gl.sum(weights, 1)
                acc = warpgroup_mma_wait(0, [acc])
                _signal(bars, 6 + R0)
                mbarrier.arrive(bars.index(6 + P0), count=1)
                acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, OUTPUT))[:, None]
                acc = warpgroup_mma(gl.convert_layout(rounded, weights_layout), mine_r, acc, is_async=True)
                acc = warpgroup_mma_wait(0, [acc])
                _signal(bars, 6 + R1)
                phase ^= 1
            mbarrier.arrive(bars.index(EMPTY_Q), count=1)
            vectors.index(3).store(norm)
            _signal(bars, NORM1)
            mbarrier.wait(bars.index(NORM0), item_phase)
            norm += vectors.index(2).load(gl.SliceLayout(1, SCORES))
            whole = (begin == block0) & (stop == block1)
            second = (request != first).to(gl.int32)
            _store(acc, norm, best, out_ptr, partial_ptr, lse_ptr, q0, q_len, tile, whole, second, HALF, False, HEADS)
            item_phase ^= 1
        begin = stop
        request += 1


@gluon.jit
def attend_hopper_kernel(
    q_wide, q_narrow, kv_wide, kv_narrow, pages_ptr, out_ptr, partial_ptr, lse_ptr,
    psum_q_ptr, psum_pages_ptr, kv_lens_ptr, psum_blocks_ptr, first_ptr, groups_ptr, indices_ptr,
    rows_per_page, first_row, qk_scale, HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PREFETCH: gl.constexpr,
):  # fmt: skip
    """q_* over [queries * heads, 576], kv_* over the whole pool as [rows, 576]: boxes of 64 rows, 256 and 64 columns."""
    q_l, q_r = gl.allocate_shared_memory(gl.bfloat16, [1, 64, HALF], TILE), gl.allocate_shared_memory(gl.bfloat16, [1, 64, HALF], TILE)
    q_p = gl.allocate_shared_memory(gl.bfloat16, [1, 64, ROPE], TILE)
    k0_l, k0_r = gl.allocate_shared_memory(gl.bfloat16, [1, 64, HALF], TILE), gl.allocate_shared_memory(gl.bfloat16, [1, 64, HALF], TILE)
    k0_p = gl.allocate_shared_memory(gl.bfloat16, [1, 64, ROPE], TILE)
    k1_l, k1_r = gl.allocate_shared_memory(gl.bfloat16, [1, 64, HALF], TILE), gl.allocate_shared_memory(gl.bfloat16, [1, 64, HALF], TILE)
    k1_p = gl.allocate_shared_memory(gl.bfloat16, [1, 64, ROPE], TILE)
    vectors = gl.allocate_shared_memory(gl.float32, [4, 64], VECTOR)
    bars = gl.allocate_shared_memory(gl.int64, [NUM_BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_BARRIERS):
        mbarrier.init(bars.index(i), count=2 if i == EMPTY_Q else 1)
    # the loader is the default partition: ptxas gives that one no more than the launch's 168 registers, and a consumer would spill
    gl.warp_specialize(
        [
            (loader, (q_wide, q_narrow, kv_wide, kv_narrow, pages_ptr, q_l, q_r, q_p, k0_l, k0_r, k0_p, k1_l, k1_r, k1_p, bars,
                       psum_q_ptr, psum_pages_ptr, kv_lens_ptr, psum_blocks_ptr, first_ptr, groups_ptr, indices_ptr,
                       rows_per_page, first_row, HEADS, PAGE_SIZE, PREFETCH)),
            (_left, (q_l, q_r, q_p, k0_l, k0_r, k0_p, k1_l, k1_p, vectors, bars, out_ptr, partial_ptr, lse_ptr,
                     psum_q_ptr, kv_lens_ptr, psum_blocks_ptr, first_ptr, groups_ptr, qk_scale, HEADS)),
            (_right, (q_l, q_r, q_p, k1_l, k1_r, k1_p, k0_r, k0_p, vectors, bars, out_ptr, partial_ptr, lse_ptr,
                      psum_q_ptr, kv_lens_ptr, psum_blocks_ptr, first_ptr, groups_ptr, qk_scale, HEADS)),
        ],
        [4, 4],
        [CONSUMER_REGS, CONSUMER_REGS],
    )  # fmt: skip
