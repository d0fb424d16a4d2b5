"""Split-K GEMM for few rows: the weight streams once at memory speed, whatever the number of its tiles.

A program owns one tile of the output and a contiguous range of its 128-wide k-blocks; there are as many ranges as fill the SMs evenly.
If a tile has several, every program leaves its fp32 partial sums in the workspace, and the one that arrives last at the tile's counter
adds them up in the order of k, writes bf16 and sets the counter back to 0: one launch, no order of arrival in the result, and nobody waits
for another program, which might not run before this one ends.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.backend import interpreting
from kernels.fp8_gemm._table import Config, Streamed, split_k
from kernels.launch import launch_options
from kernels.numerics import GROUP, Fp8


@triton.jit(do_not_specialize=["m", "k_blocks", "splits"])
def _kernel(
    x_source, w_source, x_scale_ptr, w_scale_ptr, out_ptr, partial_ptr, counter_ptr,
    m, n, k_blocks, x_row, x_scale_pitch, out_row, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, SLICE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    m_tiles = tl.cdiv(m, BLOCK_M)
    tiles = m_tiles * tl.cdiv(n, BLOCK_N)
    tile, split = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    first_row, first_column = tile % m_tiles * BLOCK_M, tile // m_tiles * BLOCK_N
    begin, end = split * k_blocks // splits, (split + 1) * k_blocks // splits
    rows, columns = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    x_scales = x_scale_ptr + tl.minimum(rows, m - 1)  # rows beyond m only fill accumulators that nobody reads
    w_scales = w_scale_ptr + first_column // 128 * k_blocks
    if not TMA:
        inner = tl.arange(0, 128)
        x_pointers = x_source + tl.minimum(rows, m - 1).to(tl.int64)[:, None] * x_row + inner[None, :]
        w_pointers = w_source + tl.minimum(columns, n - 1).to(tl.int64)[:, None] * (k_blocks * 128) + inner[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for block in tl.range(begin, end, num_stages=STAGES):
        if TMA:
            x, w = x_source.load([first_row, block * 128]), w_source.load([first_column, block * 128])
        else:
            x, w = tl.load(x_pointers + block * 128), tl.load(w_pointers + block * 128)
        scale = tl.load(x_scales + block * x_scale_pitch) * tl.load(w_scales + block)
        if SWAP:
            acc += tl.dot(w, x.T) * scale[None, :]
        else:
            acc += tl.dot(x, w.T) * scale[:, None]
    if SWAP:
        acc = acc.T
    if splits == 1:
        _store(acc, out_ptr, rows, columns, m, n, out_row)
    else:
        TILE: tl.constexpr = BLOCK_M * BLOCK_N
        partials = partial_ptr + tile * splits * TILE
        tl.store(partials + split * TILE + tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :], acc)
        tl.debug_barrier()  # all threads' sums are written before one of them announces it
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.store(counter_ptr + tile, 0)
            for part in range(0, BLOCK_M // SLICE):
                inside = part * SLICE + tl.arange(0, SLICE)
                pointers = partials + inside[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                total = tl.load(pointers, cache_modifier=".cg")
                for other in tl.range(1, splits, loop_unroll_factor=4):
                    total += tl.load(pointers + other * TILE, cache_modifier=".cg")
                _store(total, out_ptr, first_row + inside, columns, m, n, out_row)


@triton.jit
def _store(tile, out_ptr, rows, columns, m, n, out_row):
    valid = (rows < m)[:, None] & (columns < n)[None, :]
    pointers = out_ptr + rows.to(tl.int64)[:, None] * out_row + columns[None, :]
    tl.store(pointers, tile.to(out_ptr.dtype.element_ty), mask=valid)


class Workspace:
    """Where the programs of split tiles meet. Calls that may overlap in time need different ones."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu" or not torch.cuda.is_current_stream_capturing(), "run once before capturing a graph"
        self.partials = torch.empty(8 << 20, dtype=torch.float32, device=device)
        self.counters = torch.zeros(4096, dtype=torch.int32, device=device)  # 0 between kernels


_workspaces: dict[torch.device, Workspace] = {}


def workspace_of(device: torch.device) -> Workspace:
    """The device's own workspace, made at the first call."""
    if device not in _workspaces:
        _workspaces[device] = Workspace(device)
    return _workspaces[device]


def fp8_gemm(x: Fp8, w: Fp8, out: torch.Tensor, config: Config | Streamed, workspace: Workspace | None = None) -> None:
    """See kernels.fp8_gemm.fp8_gemm."""
    kernel, grid, args, options = _call(x, w, out, config, workspace or workspace_of(out.device))
    kernel[grid](*args, **options)


def compile_only(x: Fp8, w: Fp8, out: torch.Tensor, config: Config | Streamed) -> object:
    """The kernel that such a call runs, compiled; for tuning."""
    kernel, grid, args, options = _call(x, w, out, config, workspace_of(out.device))
    return kernel.warmup(*args, grid=grid, **options)


def _call(x: Fp8, w: Fp8, out: torch.Tensor, config: Config | Streamed, workspace: Workspace) -> tuple:
    if isinstance(config, Streamed) and interpreting():  # Gluon has no interpreter
        config = split_k(out.shape[0], out.shape[1], x.data.shape[1])
    if isinstance(config, Streamed):
        from kernels.fp8_gemm import _triton_hopper

        return _triton_hopper.kernel, *_triton_hopper.launch(x, w, out, config, workspace.partials, workspace.counters)
    return _kernel, *_launch(x, w, out, config, workspace)


def _launch(x: Fp8, w: Fp8, out: torch.Tensor, config: Config, workspace: Workspace) -> tuple:
    (m, k), n = x.data.shape, w.data.shape[0]
    sources = [x.data, w.data]
    if config.tma:
        x_desc = TensorDescriptor(x.data, [m, k], [x.data.stride(0), 1], [config.block_m, GROUP])
        sources = [x_desc, TensorDescriptor(w.data, [n, k], [k, 1], [config.block_n, GROUP])]
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    fits = tiles <= workspace.counters.numel() and tiles * config.splits * config.block_m * config.block_n <= workspace.partials.numel()
    assert config.splits == 1 or fits, f"{m=} {n=} {config=}"
    pointers = [x.scale, w.scale, out, workspace.partials, workspace.counters]
    numbers = [m, n, k // GROUP, x.data.stride(0), x.scale.stride(1), out.stride(0), config.splits]
    tile = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "SWAP": config.swap, "TMA": config.tma}
    pipeline = {"STAGES": config.stages, "SLICE": min(config.block_m, 512 * config.warps // config.block_n), "num_warps": config.warps}
    return (tiles * config.splits,), [*sources, *pointers, *numbers], {**tile, **pipeline, **launch_options()}
