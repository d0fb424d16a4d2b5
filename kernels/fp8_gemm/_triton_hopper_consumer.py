"""What the consumer warps of the Gluon kernel do with the blocks that its loader brings."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
MOST_BLOCKS = gl.constexpr(256)


@gluon.jit
def multiply(
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
    unit, stage, phase = begin, 0, 0
    if PDL:
        gdc_wait()
    while unit < end:
        tile = unit // k_blocks
        first_block = unit - tile * k_blocks
        number = gl.minimum(end - unit, k_blocks - first_block)
        first_row, first_column = tile % m_tiles * BM, tile // m_tiles * BN
        _keep_scales(ws_smem, w_scale_ptr + first_column // 128 * k_blocks + first_block, number)
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, acc_layout)
        none = gl.zeros([ROWS, COLUMNS], gl.float32, acc_layout)
        for i in range(0, number):
            w_scale = ws_smem.index(i).load(scale_layout)
            mbarrier.wait(full.index(stage), phase)
            x, w = x_smem.index(stage), w_smem.index(stage)
            x_scales = xs_smem.index(stage)._reinterpret(gl.float32, [xs_smem.shape[2]], VECTOR)
            if SWAP:
                product = warpgroup_mma(w, x.permute((1, 0)), none, use_acc=False, is_async=True)
            else:
                product = warpgroup_mma(x, w.permute((1, 0)), none, use_acc=False, is_async=True)
            x_scale = x_scales.slice(0, BM).load(scale_layout)
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
            first, parts = _sharers(tile, tiles, k_blocks)
            partials = partial_ptr + tile * slots * (BM * BN)
            gl.store(partials + (gl.program_id(0) - first) * (BM * BN) + rows * BN + columns, acc)
            gl.thread_barrier()  # all threads' sums are written before one of them announces it
            arrived = gl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
            if arrived == parts - 1:
                gl.store(counter_ptr + tile, 0)
                _reduce(partials, out_ptr, parts, first_row, first_column, m, n, out_row, BM, BM, BN)
        unit += number


@gluon.jit
def multiply_half(
    w_scale_ptr, out_ptr, partial_ptr, counter_ptr, x_smem, w_smem, xs_smem, ws_smem, full, empty,
    m, n, k_blocks, out_row, slots, m_tiles, tiles, begin, end, HALF: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One half of the rows of a tile of 256 x 128, in two products a block: two such warpgroups take turns at the tensor cores."""
    STAGES: gl.constexpr = x_smem.shape[0]
    TILE: gl.constexpr = 256 * 128
    TOP: gl.constexpr = HALF * 128
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    scale_layout: gl.constexpr = gl.SliceLayout(1, layout)
    unit, stage, phase = begin, 0, 0
    if PDL:
        gdc_wait()
    while unit < end:
        tile = unit // k_blocks
        first_block = unit - tile * k_blocks
        number = gl.minimum(end - unit, k_blocks - first_block)
        first_row, first_column = tile % m_tiles * 256 + TOP, tile // m_tiles * 128
        _keep_scales(ws_smem, w_scale_ptr + first_column // 128 * k_blocks + first_block, number)
        never = number < 0  # unknown to the compiler, so that all products are made in the same registers
        upper = gl.zeros([64, 128], gl.float32, layout)
        lower, product = upper, upper
        for i in range(0, number):
            w_scale = ws_smem.index(i).load(scale_layout)
            mbarrier.wait(full.index(stage), phase)
            x, w = x_smem.index(stage), w_smem.index(stage).permute((1, 0))
            x_scales = xs_smem.index(stage)._reinterpret(gl.float32, [256], VECTOR)
            upper_scale = x_scales.slice(TOP, 64).load(scale_layout) * w_scale
            lower_scale = x_scales.slice(TOP + 64, 64).load(scale_layout) * w_scale
            product = warpgroup_mma(x.slice(TOP, 64), w, product, use_acc=never, is_async=True)
            product = warpgroup_mma_wait(0, [product])
            upper = _fma(product, upper_scale, upper)
            product = warpgroup_mma(x.slice(TOP + 64, 64), w, product, use_acc=never, is_async=True)
            product = warpgroup_mma_wait(0, [product])
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            lower = _fma(product, lower_scale, lower)
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)
        rows = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
        columns = gl.arange(0, 128, gl.SliceLayout(0, layout))[None, :]
        if number == k_blocks:
            _store(upper, out_ptr, first_row + rows, first_column + columns, m, n, out_row)
            _store(lower, out_ptr, first_row + 64 + rows, first_column + columns, m, n, out_row)
        else:
            first, parts = _sharers(tile, tiles, k_blocks)
            partials = partial_ptr + tile * slots * TILE + TOP * 128
            mine = partials + (gl.program_id(0) - first) * TILE + rows * 128 + columns
            gl.store(mine, upper)
            gl.store(mine + 64 * 128, lower)
            gl.thread_barrier()
            counter = counter_ptr + tile * 2 + HALF
            arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == parts - 1:
                gl.store(counter, 0)
                _reduce(partials, out_ptr, parts, first_row, first_column, m, n, out_row, 128, 256, 128)
        unit += number


@gluon.jit
def _fma(x, scale, acc):
    """acc + x * scale, at this place of the program and no later: a product's registers must be free for the next one."""
    x, scale = gl.broadcast(x, scale[:, None])
    return gl.inline_asm_elementwise("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, scale, acc], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _keep_scales(ws_smem, scales, number):
    """The weight's scales of a program's blocks of one tile, into shared memory."""
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    at = gl.arange(0, MOST_BLOCKS, flat)
    gl.thread_barrier()  # those of the tile before may still be read
    ws_smem._reinterpret(gl.float32, [MOST_BLOCKS], VECTOR).store(gl.load(scales + at, mask=at < number, other=0.0))
    gl.thread_barrier()


@gluon.jit
def _sharers(tile, tiles, k_blocks):
    """(first program, number of programs) that have blocks of this tile."""
    units, programs = tiles * k_blocks, gl.num_programs(0)
    first = ((tile * k_blocks + 1) * programs - 1) // units
    return first, ((tile + 1) * k_blocks * programs - 1) // units - first + 1


@gluon.jit
def _reduce(partials, out_ptr, parts, first_row, first_column, m, n, out_row, HEIGHT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """Add up the partial sums of HEIGHT rows of a tile, some rows at a time, four in flight."""
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = BN // 4 if BN < 128 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    MOST: gl.constexpr = WARPS * 32 * 16 // BN
    SLICE: gl.constexpr = MOST if MOST < HEIGHT else HEIGHT
    TILE: gl.constexpr = BM * BN
    columns = gl.arange(0, BN, gl.SliceLayout(0, layout))[None, :]
    for part in range(0, HEIGHT // SLICE):
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
