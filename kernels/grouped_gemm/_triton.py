"""Grouped FP8 GEMM on a fixed number of programs, which find their tiles from counts in device memory."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.launch import launch_options, num_sms
from kernels.numerics import GROUP, Fp8


@triton.jit
def _tile(
    x_desc, x_scales, pitch, w_desc, w_scale_ptr, row, group, n_tile, N, blocks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of x @ w[group].T over `blocks` blocks of k; SWAP makes w the operand of 64 rows, for few rows of x.

    x_scales points to the scale of row `row` and k block 0, those of the next block lie `pitch` further: TMA could not fetch fewer than 32.
    """
    GROUP: tl.constexpr = 128
    last_scale = tl.cdiv(N, GROUP) - 1
    scale_n = n_tile * BLOCK_N // GROUP
    scales = w_scale_ptr + (group * (last_scale + 1) + scale_n) * blocks
    more = tl.minimum(1, last_scale - scale_n) * blocks  # to the scales of a tile's second 128 columns
    second = tl.arange(0, BLOCK_N) >= GROUP
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in tl.range(blocks, num_stages=STAGES):
        x = x_desc.load([row, block * GROUP])
        w = w_desc.load([group * N + n_tile * BLOCK_N, block * GROUP])
        x_scale = tl.load(x_scales + tl.cast(pitch, tl.int64) * block + tl.arange(0, BLOCK_M))
        if BLOCK_N <= GROUP:
            scale = x_scale * tl.load(scales + block)
            scale = scale[None, :] if SWAP else scale[:, None]
        else:
            w_scale = tl.where(second, tl.load(scales + more + block), tl.load(scales + block))
            scale = w_scale[:, None] * x_scale[None, :] if SWAP else x_scale[:, None] * w_scale[None, :]
        if SWAP:
            acc += tl.dot(w, x.T) * scale
        else:
            acc += tl.dot(x, w.T) * scale
    return acc.T if SWAP else acc


@triton.jit
def grouped_gemm_masked_kernel(
    x_desc, x_scale_ptr, pitch, w_desc, w_scale_ptr, num_rows_ptr, out_desc, max_m, N, K, GROUPS: tl.constexpr, GROUPS_2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr, FLATTEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tiles in the order group, n, m: those that share weights follow each other."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    group_ids = tl.arange(0, GROUPS_2)
    counts = tl.load(num_rows_ptr + group_ids, mask=group_ids < GROUPS, other=0)
    tiles = tl.cdiv(counts, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    ends = tl.cumsum(tiles, 0)
    blocks = K // 128
    for tile in tl.range(tl.program_id(0), tl.sum(tiles, 0), tl.num_programs(0), flatten=FLATTEN):
        before = ends <= tile
        group = tl.sum(before.to(tl.int32), 0)
        first = tl.max(tl.where(before, ends, 0), 0)
        m_tiles = tl.cdiv(tl.sum(tl.where(group_ids == group, counts, 0), 0), BLOCK_M)
        m = (tile - first) % m_tiles * BLOCK_M
        n_tile = (tile - first) // m_tiles
        row = group * max_m + m
        x_scales = x_scale_ptr + group.to(tl.int64) * blocks * pitch + m
        acc = _tile(x_desc, x_scales, pitch, w_desc, w_scale_ptr, row, group, n_tile, N, blocks, BLOCK_M, BLOCK_N, SWAP, STAGES)
        out_desc.store([row, n_tile * BLOCK_N], acc.to(out_desc.dtype))


@triton.jit
def grouped_gemm_contiguous_kernel(
    x_desc, x_scale_ptr, pitch, w_desc, w_scale_ptr, group_of_row_ptr, out_desc, m_tiles, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr, BAND: tl.constexpr, FLATTEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Tiles in bands of BAND along m, so that what the programs read at one time fits in L2."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n_tiles = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=FLATTEN):
        band = tile // (BAND * n_tiles) * BAND
        height = tl.minimum(BAND, m_tiles - band)
        row = (band + tile % (BAND * n_tiles) % height) * BLOCK_M
        n_tile = tile % (BAND * n_tiles) // height
        group = tl.load(group_of_row_ptr + row)
        if group >= 0:
            acc = _tile(
                x_desc, x_scale_ptr + row, pitch, w_desc, w_scale_ptr, row, group, n_tile, N, K // 128, BLOCK_M, BLOCK_N, SWAP, STAGES
            )
            out_desc.store([row, n_tile * BLOCK_N], acc.to(out_desc.dtype))


def choose_masked(expected_m: int) -> dict[str, int | bool]:
    """Tile, stages, warps and programs an SM; with few rows the weights take the place of the 64-row operand."""
    if expected_m <= 16:
        return {"BLOCK_M": 16, "BLOCK_N": 128, "SWAP": True, "STAGES": 5, "FLATTEN": True, "num_warps": 4, "PER_SM": 2}
    if expected_m <= 64:
        return {"BLOCK_M": 64, "BLOCK_N": 128, "SWAP": False, "STAGES": 6, "FLATTEN": True, "num_warps": 4, "PER_SM": 1}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "SWAP": False, "STAGES": 4, "FLATTEN": True, "num_warps": 8, "PER_SM": 1}


CONTIGUOUS_CONFIG = {"BLOCK_M": 128, "BLOCK_N": 128, "SWAP": False, "STAGES": 4, "BAND": 16, "FLATTEN": False, "num_warps": 8, "PER_SM": 1}


def launch_masked(
    x: Fp8, w: Fp8, num_rows: torch.Tensor, expected_m: int, out: torch.Tensor, config: dict[str, int | bool] | None = None
) -> None:
    """Write out [groups, max_m, n]."""
    (groups, max_m, k), n = x.data.shape, w.data.shape[1]
    config = dict(config or choose_masked(expected_m))
    programs = config.pop("PER_SM") * num_sms(out.device)
    x_desc, w_desc, out_desc = _descriptors(x, w, out, config["BLOCK_M"], config["BLOCK_N"])
    operands = x_desc, x.scale, x.scale.stride(-1), w_desc, w.scale, num_rows, out_desc
    shape = {"GROUPS": groups, "GROUPS_2": triton.next_power_of_2(groups)}
    grouped_gemm_masked_kernel[(programs,)](*operands, max_m, n, k, **shape, **config, **launch_options())


def launch_contiguous(x: Fp8, w: Fp8, group_of_row: torch.Tensor, out: torch.Tensor, config: dict[str, int | bool] | None = None) -> None:
    """Write out [m, n]."""
    config = dict(config or CONTIGUOUS_CONFIG)
    programs = config.pop("PER_SM") * num_sms(out.device)
    x_desc, w_desc, out_desc = _descriptors(x, w, out, config["BLOCK_M"], config["BLOCK_N"])
    operands = x_desc, x.scale, x.scale.stride(-1), w_desc, w.scale, group_of_row, out_desc
    m_tiles, (_, n, k) = out.shape[0] // config["BLOCK_M"], w.data.shape
    grouped_gemm_contiguous_kernel[(programs,)](*operands, m_tiles, n, k, **config, **launch_options())


def _descriptors(x: Fp8, w: Fp8, out: torch.Tensor, block_m: int, block_n: int) -> tuple[TensorDescriptor, ...]:
    """Groups one below the other: x [rows, k], w [groups * n, k], out [rows, n]."""
    groups, n, k = w.data.shape
    rows = out.numel() // n
    return (
        TensorDescriptor(x.data, [rows, k], [k, 1], [block_m, GROUP]),
        TensorDescriptor(w.data, [groups * n, k], [k, 1], [block_n, GROUP]),
        TensorDescriptor(out, [rows, n], [n, 1], [block_m, block_n]),
    )
