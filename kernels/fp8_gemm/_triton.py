"""Split-K GEMM for few rows: the weight streams once at memory speed, whatever the number of its tiles.

A program owns one tile of the output and a contiguous range of its 128-wide k-blocks; there are as many ranges as fill the SMs evenly.
Every program leaves its fp32 partial sums in the workspace and arrives at the tile's counter. Then either the last one to arrive adds them
all up, or all programs of the tile wait for each other and each adds up its share of the rows (`shared`: a cooperative launch, which runs
all programs at once or none). The order of the sum is that of k: no order of arrival is in the result. Counters end at 0, as they began.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.backend import interpreting
from kernels.fp8_gemm._table import Config
from kernels.numerics import GROUP, Fp8


@triton.jit(do_not_specialize=["m", "k_blocks", "splits", "ahead"])
def _kernel(
    x_source, w_source, w_ptr, x_scale_ptr, w_scale_ptr, out_ptr, partial_ptr, counter_ptr,
    m, n, k_blocks, x_row, x_scale_pitch, out_row, splits, ahead,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, PAIR: tl.constexpr, TMA: tl.constexpr,
    PREFETCH: tl.constexpr, OVERLAP: tl.constexpr, STAGES: tl.constexpr, SHARED: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    m_tiles = tl.cdiv(m, BLOCK_M)
    tiles = m_tiles * tl.cdiv(n, BLOCK_N)
    tile, split = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    first_row, first_column = tile % m_tiles * BLOCK_M, tile // m_tiles * BLOCK_N
    begin, end = split * k_blocks // splits, (split + 1) * k_blocks // splits
    if PREFETCH:
        _prefetch(w_ptr, first_column, n, k_blocks, begin, tl.minimum(ahead, end - begin), BLOCK_N)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    DOT_M: tl.constexpr = BLOCK_M // 2 if PAIR == "m" else BLOCK_M
    DOT_N: tl.constexpr = BLOCK_N // 2 if PAIR == "n" else BLOCK_N
    rows, columns = first_row + tl.arange(0, DOT_M), first_column + tl.arange(0, DOT_N)
    x_scales = x_scale_ptr + tl.minimum(rows, m - 1)  # rows beyond m only fill accumulators that nobody reads
    w_scales = w_scale_ptr + first_column // 128 * k_blocks
    acc = tl.zeros((DOT_N, DOT_M) if SWAP else (DOT_M, DOT_N), tl.float32)
    if PAIR != "":
        other_acc = tl.zeros((DOT_M, DOT_N), tl.float32)
    if PAIR == "m":
        other_x_scales = x_scale_ptr + tl.minimum(rows + DOT_M, m - 1)
    if PAIR == "n":  # the last tile's second half may lie beyond n
        other_w_scales = w_scale_ptr + tl.minimum(first_column // 128 + 1, tl.cdiv(n, 128) - 1) * k_blocks
    if not TMA:
        inner = tl.arange(0, 128)
        x_pointers = x_source + tl.minimum(rows, m - 1).to(tl.int64)[:, None] * x_row + inner[None, :]
        w_pointers = w_source + tl.minimum(columns, n - 1).to(tl.int64)[:, None] * (k_blocks * 128) + inner[None, :]
    for block in tl.range(begin, end, num_stages=STAGES):
        if TMA:
            x, w = x_source.load([first_row, block * 128]), w_source.load([first_column, block * 128])
        else:
            x, w = tl.load(x_pointers + block * 128), tl.load(w_pointers + block * 128)
        x_scale, w_scale = tl.load(x_scales + block * x_scale_pitch), tl.load(w_scales + block)
        if SWAP:
            acc += tl.dot(w, x.T) * (x_scale * w_scale)[None, :]
        else:
            acc += tl.dot(x, w.T) * (x_scale * w_scale)[:, None]
        if PAIR == "m":
            other_x = x_source.load([first_row + DOT_M, block * 128])
            other_acc += tl.dot(other_x, w.T) * (tl.load(other_x_scales + block * x_scale_pitch) * w_scale)[:, None]
        if PAIR == "n":
            other_w = w_source.load([first_column + DOT_N, block * 128])
            other_acc += tl.dot(x, other_w.T) * (x_scale * tl.load(other_w_scales + block))[:, None]
    if SWAP:
        acc = acc.T
    if splits == 1:
        _store(acc, out_ptr, rows, columns, m, n, out_row)
        if PAIR == "m":
            _store(other_acc, out_ptr, rows + DOT_M, columns, m, n, out_row)
        if PAIR == "n":
            _store(other_acc, out_ptr, rows, columns + DOT_N, m, n, out_row)
    else:
        TILE: tl.constexpr = BLOCK_M * BLOCK_N
        partials = partial_ptr + tile * splits * TILE
        inside = split * TILE + tl.arange(0, DOT_M)[:, None] * BLOCK_N + tl.arange(0, DOT_N)[None, :]
        tl.store(partials + inside, acc)
        if PAIR == "m":
            tl.store(partials + inside + DOT_M * BLOCK_N, other_acc)
        if PAIR == "n":
            tl.store(partials + inside + DOT_N, other_acc)
        tl.debug_barrier()  # all threads' sums are written before one of them announces it
        counter = counter_ptr + tile
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
        if SHARED:
            while arrived < splits:
                arrived = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
            _reduce(partials, out_ptr, split, splits, first_row, first_column, m, n, out_row, splits, BLOCK_M, BLOCK_N, SLICE)
            if tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") == 2 * splits - 1:
                tl.store(counter, 0)
        elif arrived == splits:
            tl.store(counter, 0)
            _reduce(partials, out_ptr, 0, 1, first_row, first_column, m, n, out_row, splits, BLOCK_M, BLOCK_N, SLICE)


@triton.jit
def _prefetch(w_ptr, first_column, n, k_blocks, begin, number, BLOCK_N: tl.constexpr):
    """Ask L2 for the first blocks of the tile's rows of w, one request a row: more in flight than the pipeline holds."""
    row = tl.minimum(first_column + tl.arange(0, BLOCK_N), n - 1).to(tl.int64)
    address = (w_ptr + (row * k_blocks + begin) * 128).to(tl.int64)
    size = tl.full((BLOCK_N,), 128, tl.int32) * number
    request: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(request, "=r,l,r", [address, size], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _reduce(
    partials, out_ptr, first, step, first_row, first_column, m, n, out_row, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Add up the partial sums of every `step`th slice of the tile's rows, in the order of k."""
    columns = tl.arange(0, BLOCK_N)
    for part in range(first, BLOCK_M // SLICE, step):
        rows = part * SLICE + tl.arange(0, SLICE)
        inside = partials + rows[:, None] * BLOCK_N + columns[None, :]
        total = tl.load(inside, cache_modifier=".cg")
        for other in tl.range(1, splits, loop_unroll_factor=4):
            total += tl.load(inside + other * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
        _store(total, out_ptr, first_row + rows, first_column + columns, m, n, out_row)


@triton.jit
def _store(tile, out_ptr, rows, columns, m, n, out_row):
    valid = (rows < m)[:, None] & (columns < n)[None, :]
    pointers = out_ptr + rows.to(tl.int64)[:, None] * out_row + columns[None, :]
    tl.store(pointers, tile.to(out_ptr.dtype.element_ty), mask=valid)


class Workspace:
    """Partial sums and counters of split tiles. Calls that may overlap in time need different ones."""

    FLOATS = 8 << 20
    COUNTERS = 4096

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu" or not torch.cuda.is_current_stream_capturing(), "run once before capturing a graph"
        self.partials = torch.empty(self.FLOATS, dtype=torch.float32, device=device)
        self.counters = torch.zeros(self.COUNTERS, dtype=torch.int32, device=device)

    def fits(self, m: int, n: int, config: Config) -> bool:
        """Whether the split tiles of such an output find room."""
        tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
        return config.splits == 1 or (tiles <= self.COUNTERS and tiles * config.splits * config.block_m * config.block_n <= self.FLOATS)


_workspaces: dict[torch.device, Workspace] = {}


def workspace_of(device: torch.device) -> Workspace:
    """The device's own workspace, made at the first call."""
    if device not in _workspaces:
        _workspaces[device] = Workspace(device)
    return _workspaces[device]


def fp8_gemm(x: Fp8, w: Fp8, out: torch.Tensor, config: Config, workspace: Workspace | None = None) -> None:
    """See kernels.fp8_gemm.fp8_gemm."""
    workspace = workspace or workspace_of(out.device)
    assert workspace.fits(*out.shape, config), f"{out.shape=} {config=}"
    grid, args, options = _launch(x, w, out, config, workspace)
    _kernel[grid](*args, **options)


def compile_only(x: Fp8, w: Fp8, out: torch.Tensor, config: Config) -> object:
    """The kernel that such a call runs, compiled; for tuning."""
    grid, args, options = _launch(x, w, out, config, workspace_of(out.device))
    return _kernel.warmup(*args, grid=grid, **options)


def _launch(x: Fp8, w: Fp8, out: torch.Tensor, config: Config, workspace: Workspace) -> tuple[tuple[int], list[object], dict[str, object]]:
    (m, k), n = x.data.shape, w.data.shape[0]
    shared = config.shared and config.splits > 1 and not interpreting()  # the interpreter runs one program after another
    sources = [x.data, w.data]
    if config.tma:
        dot_m, dot_n = config.block_m // (2 if config.pair == "m" else 1), config.block_n // (2 if config.pair == "n" else 1)
        x_desc = TensorDescriptor(x.data, [m, k], [x.data.stride(0), 1], [dot_m, GROUP])
        sources = [x_desc, TensorDescriptor(w.data, [n, k], [k, 1], [dot_n, GROUP])]
    grid = (triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n) * config.splits,)
    pointers = [w.data, x.scale, w.scale, out, workspace.partials, workspace.counters]
    numbers = [m, n, k // GROUP, x.data.stride(0), x.scale.stride(1), out.stride(0), config.splits, config.ahead]
    tile = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "SWAP": config.swap, "PAIR": config.pair, "TMA": config.tma}
    rows_at_once = min(config.block_m, 16 if shared else 1024 * config.warps // config.block_n)
    prefetch, overlap = config.ahead > 0 and not interpreting(), config.overlap and not interpreting()
    launch = {"num_warps": config.warps, "launch_cooperative_grid": shared, "launch_pdl": overlap}
    pipeline = {"PREFETCH": prefetch, "OVERLAP": overlap, "STAGES": config.stages, "SHARED": shared, "SLICE": rows_at_once}
    return grid, [*sources, *pointers, *numbers], {**tile, **pipeline, **launch}
