"""Split-K GEMM for few rows: the weight streams once at memory speed, whatever the number of its tiles.

A program owns one tile of the output and a contiguous range of its 128-wide k-blocks; there are as many ranges as fill the SMs evenly.
Every program leaves its fp32 partial sums in the workspace, and the one that arrives last at the tile's counter adds them up in
the order of k, writes bf16 and sets the counter back to 0: one launch, no order of arrival in the result.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.fp8_gemm._table import Config
from kernels.numerics import GROUP, Fp8


@triton.jit(do_not_specialize=["m", "k_blocks", "splits"])
def _kernel(
    x_desc, w_desc, x_scale_ptr, w_scale_ptr, out_ptr, partial_ptr, counter_ptr,
    m, n, k_blocks, x_scale_pitch, out_row, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    m_tiles = tl.cdiv(m, BLOCK_M)
    tiles = m_tiles * tl.cdiv(n, BLOCK_N)
    tile, split = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    first_row, first_column = tile % m_tiles * BLOCK_M, tile // m_tiles * BLOCK_N
    begin, end = split * k_blocks // splits, (split + 1) * k_blocks // splits
    rows = first_row + tl.arange(0, BLOCK_M)
    x_scales = x_scale_ptr + tl.minimum(rows, m - 1)  # [BLOCK_M]; rows beyond m only fill accumulators that nobody reads
    w_scales = w_scale_ptr + first_column // 128 * k_blocks
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(begin, end, num_stages=STAGES):
        x = x_desc.load([first_row, block * 128])
        w = w_desc.load([first_column, block * 128])
        scale = tl.load(x_scales + block * x_scale_pitch) * tl.load(w_scales + block)
        if SWAP:
            acc += tl.dot(w, x.T) * scale[None, :]
        else:
            acc += tl.dot(x, w.T) * scale[:, None]
    if splits > 1:
        inside = tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
        partials = partial_ptr + tile * splits * (BLOCK_M * BLOCK_N) + inside
        tl.store(partials + split * (BLOCK_M * BLOCK_N), acc)
        tl.debug_barrier()  # all threads' sums are written before one of them announces it
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.store(counter_ptr + tile, 0)
            acc = tl.load(partials, cache_modifier=".cg")
            for other in tl.range(1, splits, loop_unroll_factor=2):
                acc += tl.load(partials + other * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
            _store(acc, out_ptr, rows, first_column, m, n, out_row, SWAP, BLOCK_N)
    else:
        _store(acc, out_ptr, rows, first_column, m, n, out_row, SWAP, BLOCK_N)


@triton.jit
def _store(acc, out_ptr, rows, first_column, m, n, out_row, SWAP: tl.constexpr, BLOCK_N: tl.constexpr):
    columns = first_column + tl.arange(0, BLOCK_N)
    out = acc.to(out_ptr.dtype.element_ty)
    if SWAP:
        out = out.T
    valid = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * out_row + columns[None, :], out, mask=valid)


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
    (m, k), n = x.data.shape, w.data.shape[0]
    assert workspace.fits(m, n, config), f"{m=} {n=} {config=}"
    x_desc = TensorDescriptor(x.data, [m, k], [x.data.stride(0), 1], [config.block_m, GROUP])
    w_desc = TensorDescriptor(w.data, [n, k], [w.data.stride(0), 1], [config.block_n, GROUP])
    grid = (triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n) * config.splits,)
    _kernel[grid](
        x_desc, w_desc, x.scale, w.scale, out, workspace.partials, workspace.counters,
        m, n, k // GROUP, x.scale.stride(1), out.stride(0), config.splits,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, SWAP=config.swap, STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
