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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ROWS = gl.constexpr(64)
HALF = gl.constexpr(256)
ROPE = gl.constexpr(64)
LOWEST = gl.constexpr(-1e30)  # finite, so that a row that has seen nothing makes no NaN

# full and empty barriers of a step's six pieces of smem, in this order
L0, R0, P0, L1, R1, P1 = (gl.constexpr(i) for i in range(6))
FULL_Q, EMPTY_Q, WEIGHTS0, WEIGHTS1, NORM0, NORM1 = (gl.constexpr(i) for i in range(12, 18))
NUM_BARRIERS = gl.constexpr(18)


@gluon.jit
def _share(groups_ptr, first_ptr):
    """(tile, begin, end, first request) of this program; begin == end if it has no work."""
    tiles, num_groups, total = gl.load(groups_ptr), gl.load(groups_ptr + 1), gl.load(groups_ptr + 2)
    group, tile = gl.program_id(0) // tiles, gl.program_id(0) % tiles
    group_ok = group < num_groups
    begin = gl.where(group_ok, (total * group) // num_groups, 0)
    end = gl.where(group_ok, (total * (group + 1)) // num_groups, 0)
    return tile, begin, end, gl.load(first_ptr + gl.minimum(group, num_groups - 1))


@gluon.jit
def _item(request, psum_q_ptr, psum_blocks_ptr, begin, end, tile, HEADS: gl.constexpr):
    """(first query, queries, first block of the request, end of this share in it, whether this tile has rows)."""
    block0, block1 = gl.load(psum_blocks_ptr + request), gl.load(psum_blocks_ptr + request + 1)
    q0, q1 = gl.load(psum_q_ptr + request), gl.load(psum_q_ptr + request + 1)
    stop = gl.minimum(end, block1)
    active = (stop > begin) & (tile * ROWS < (q1 - q0) * HEADS)
    return q0, q1 - q0, block0, block1, stop, active


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
    tile, begin, end, first = _share(groups_ptr, first_ptr)
    request, phase, item_phase = first, 0, 0
    while begin < end:
        q0, q_len, block0, block1, stop, active = _item(request, psum_q_ptr, psum_blocks_ptr, begin, end, tile, HEADS)
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
    tile, begin, end, first = _share(groups_ptr, first_ptr)
    request, phase, item_phase = first, 0, 0
    while begin < end:
        q0, q_len, block0, block1, stop, active = _item(request, psum_q_ptr, psum_blocks_ptr, begin, end, tile, HEADS)
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
def _load_piece(desc, pages_ptr, row, column, num_valid, smem, bars, index: gl.constexpr, phase, WIDTH: gl.constexpr):
    """One piece of a block by TMA, or, of a request's last page, only its written rows and zeros."""
    mbarrier.wait(bars.index(6 + index), phase ^ 1)
    bar = bars.index(index)
    if num_valid >= 64:
        mbarrier.expect(bar, 64 * WIDTH * 2)
        tma.async_copy_global_to_shared(desc, [row, column], bar, smem)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        offs_n = gl.arange(0, 64, gl.SliceLayout(1, layout))
        for c in gl.static_range(WIDTH // 64):
            offs = (row.to(gl.int64) + offs_n)[:, None] * 576 + (column + c * 64 + gl.arange(0, 64, gl.SliceLayout(0, layout)))[None, :]
            values = gl.load(pages_ptr + offs, mask=(offs_n < num_valid)[:, None], other=0.0)
            smem.slice(c * 64, 64, 1).store(values)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(bar, count=1)


@gluon.jit
def _prefetch(pages_ptr, row, tile, tiles):
    """Ask for a block's 73,728 bytes in L2; the programs that will read it share the work."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    part = gl.arange(0, 128, layout)
    address = (pages_ptr + row.to(gl.int64) * 576 + part * 288).to(gl.int64)
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.eq.s32 p, $2, $3;
        @p cp.async.bulk.prefetch.L2.global [$1], 576;
        mov.u32 $0, 0;
        }""",
        "=r,l,r,r", [address, part % tiles, tile], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def _loader(
    q_wide, q_narrow, kv_wide, kv_narrow, pages_ptr, q_l, q_r, q_p, k0_l, k0_r, k0_p, k1_l, k1_r, k1_p, bars,
    psum_q_ptr, psum_pages_ptr, kv_lens_ptr, psum_blocks_ptr, first_ptr, groups_ptr, indices_ptr,
    rows_per_page, first_row, HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, PREFETCH: gl.constexpr,
):  # fmt: skip
    q_l, q_r, q_p, k0_l, k0_r, k0_p = q_l.index(0), q_r.index(0), q_p.index(0), k0_l.index(0), k0_r.index(0), k0_p.index(0)
    k1_l, k1_r, k1_p = k1_l.index(0), k1_r.index(0), k1_p.index(0)
    tile, begin, end, first = _share(groups_ptr, first_ptr)
    request, phase, item_phase = first, 0, 0
    while begin < end:
        q0, _, block0, _, stop, active = _item(request, psum_q_ptr, psum_blocks_ptr, begin, end, tile, HEADS)
        if active:
            kv_len = gl.load(kv_lens_ptr + request)
            table_ptr = indices_ptr + gl.load(psum_pages_ptr + request)
            mbarrier.wait(bars.index(EMPTY_Q), item_phase ^ 1)
            mbarrier.expect(bars.index(FULL_Q), 64 * 576 * 2)
            q_row = q0 * HEADS + tile * ROWS
            tma.async_copy_global_to_shared(q_wide, [q_row, 0], bars.index(FULL_Q), q_l)
            tma.async_copy_global_to_shared(q_wide, [q_row, HALF], bars.index(FULL_Q), q_r)
            tma.async_copy_global_to_shared(q_narrow, [q_row, 2 * HALF], bars.index(FULL_Q), q_p)
            last = stop - block0 - 1
            for block in range(begin - block0, stop - block0, 2):
                other = gl.minimum(block + 1, last)  # an odd block is read once more, and masked
                row0 = gl.load(table_ptr + block * 64 // PAGE_SIZE) * rows_per_page + first_row + block * 64 % PAGE_SIZE
                row1 = gl.load(table_ptr + other * 64 // PAGE_SIZE) * rows_per_page + first_row + other * 64 % PAGE_SIZE
                valid0, valid1 = kv_len - block * 64, kv_len - other * 64
                if (PREFETCH > 0) & (block + 2 * PREFETCH + 1 <= last):
                    for i in gl.static_range(2):
                        at = (block + 2 * PREFETCH + i) * 64
                        row = gl.load(table_ptr + at // PAGE_SIZE) * rows_per_page + first_row + at % PAGE_SIZE
                        _prefetch(pages_ptr, row, tile, gl.load(groups_ptr))
                # in the order in which they become free
                _load_piece(kv_wide, pages_ptr, row0, 0, valid0, k0_l, bars, L0, phase, HALF)
                _load_piece(kv_wide, pages_ptr, row0, HALF, valid0, k0_r, bars, R0, phase, HALF)
                _load_piece(kv_narrow, pages_ptr, row0, 2 * HALF, valid0, k0_p, bars, P0, phase, ROPE)
                _load_piece(kv_wide, pages_ptr, row1, 0, valid1, k1_l, bars, L1, phase, HALF)
                _load_piece(kv_wide, pages_ptr, row1, HALF, valid1, k1_r, bars, R1, phase, HALF)
                _load_piece(kv_narrow, pages_ptr, row1, 2 * HALF, valid1, k1_p, bars, P1, phase, ROPE)
                phase ^= 1
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
            (_loader, (q_wide, q_narrow, kv_wide, kv_narrow, pages_ptr, q_l, q_r, q_p, k0_l, k0_r, k0_p, k1_l, k1_r, k1_p, bars,
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
