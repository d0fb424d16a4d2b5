"""The loader of `_triton_hopper.py`: a program's share of the work, and its pieces of KV brought to shared memory as they become free."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

ROWS = gl.constexpr(64)
HALF = gl.constexpr(256)
ROPE = gl.constexpr(64)
# full and empty barriers of a step's six pieces of smem, in this order
L0, R0, P0, L1, R1, P1 = (gl.constexpr(i) for i in range(6))
FULL_Q, EMPTY_Q, WEIGHTS0, WEIGHTS1, NORM0, NORM1 = (gl.constexpr(i) for i in range(12, 18))
NUM_BARRIERS = gl.constexpr(18)


@gluon.jit
def share_of(groups_ptr, first_ptr):
    """(tile, begin, end, first request) of this program; begin == end if it has no work."""
    tiles, num_groups, total = gl.load(groups_ptr), gl.load(groups_ptr + 1), gl.load(groups_ptr + 2)
    group, tile = gl.program_id(0) // tiles, gl.program_id(0) % tiles
    group_ok = group < num_groups
    begin = gl.where(group_ok, (total * group) // num_groups, 0)
    end = gl.where(group_ok, (total * (group + 1)) // num_groups, 0)
    return tile, begin, end, gl.load(first_ptr + gl.minimum(group, num_groups - 1))


@gluon.jit
def item_of(request, psum_q_ptr, psum_blocks_ptr, begin, end, tile, HEADS: gl.constexpr):
    """(first query, queries, first block of the request, end of this share in it, whether this tile has rows)."""
    block0, block1 = gl.load(psum_blocks_ptr + request), gl.load(psum_blocks_ptr + request + 1)
    q0, q1 = gl.load(psum_q_ptr + request), gl.load(psum_q_ptr + request + 1)
    stop = gl.minimum(end, block1)
    active = (stop > begin) & (tile * ROWS < (q1 - q0) * HEADS)
    return q0, q1 - q0, block0, block1, stop, active


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
def loader(
    q_wide, q_narrow, kv_wide, kv_narrow, pages_ptr, q_l, q_r, q_p, k0_l, k0_r, k0_p, k1_l, k1_r, k1_p, bars,
    psum_q_ptr, psum_pages_ptr, kv_lens_ptr, psum_blocks_ptr, first_ptr, groups_ptr, indices_ptr,
    rows_per_page, first_row, HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, PREFETCH: gl.constexpr,
):  # fmt: skip
    q_l, q_r, q_p, k0_l, k0_r, k0_p = q_l.index(0), q_r.index(0), q_p.index(0), k0_l.index(0), k0_r.index(0), k0_p.index(0)
    k1_l, k1_r, k1_p = k1_l.index(0), k1_r.index(0), k1_p.index(0)
    tile, begin, end, first = share_of(groups_ptr, first_ptr)
    request, phase, item_phase = first, 0, 0
    while begin < end:
        q0, _, block0, _, stop, active = item_of(request, psum_q_ptr, psum_blocks_ptr, begin, end, tile, HEADS)
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
