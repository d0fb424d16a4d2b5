"""Batched product with FP8 weights that become bf16 in registers: exact, and no pass over x to quantise it."""

import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.launch import launch_options
from kernels.numerics import GROUP, Fp8
from kernels.quant_fp8._triton import scale_of, to_fp8


@triton.jit
def fp8_bmm_kernel(
    x_ptr, w_ptr, w_scale_ptr, out_ptr, out_scale_ptr,
    rows, x_stride_m, x_stride_b, out_stride_m, out_stride_b, out_scale_pitch,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr, QUANT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_M, BLOCK_N] of one head; tiles along m follow each other, so that a head's weights stay in L2."""
    GROUP: tl.constexpr = 128
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    m_tiles = tl.cdiv(rows, BLOCK_M)
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    m_tile, rest = tl.program_id(0) % m_tiles, tl.program_id(0) // m_tiles
    n_tile, head = rest % n_tiles, (rest // n_tiles).to(tl.int64)
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, GROUP)
    m_long = m.to(tl.int64)
    x_tile = x_ptr + head * x_stride_b + m_long[:, None] * x_stride_m + k[None, :]
    w_tile = w_ptr + head * (N * K) + n[:, None] * K + k[None, :]
    n_group = n_tile * BLOCK_N // GROUP if BLOCK_N <= GROUP else n // GROUP  # one for the tile, or one a column
    scales = w_scale_ptr + head * (((N + GROUP - 1) // GROUP) * (K // GROUP)) + n_group * (K // GROUP)
    m_in, n_in = m[:, None] < rows, n[:, None] < N
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in tl.range(K // GROUP, num_stages=STAGES):
        x = tl.load(x_tile + block * GROUP, mask=m_in, other=0.0)
        w = tl.load(w_tile + block * GROUP) if N % BLOCK_N == 0 else tl.load(w_tile + block * GROUP, mask=n_in, other=0.0)
        if BLOCK_N <= GROUP:
            scale = tl.load(scales + block)
        elif SWAP:
            scale = tl.load(scales + block, mask=n < N, other=0.0)[:, None]
        else:
            scale = tl.load(scales + block, mask=n < N, other=0.0)[None, :]
        if SWAP:
            acc += tl.dot(w.to(x.dtype), x.T) * scale
        else:
            acc += tl.dot(x, w.to(x.dtype).T) * scale
    if SWAP:
        acc = acc.T
    out_tile = out_ptr + head * out_stride_b + m_long[:, None] * out_stride_m + n[None, :]
    if QUANT:
        scale = scale_of(acc, 1)
        tl.store(out_scale_ptr + (head * n_tiles + n_tile) * out_scale_pitch + m, scale, mask=m < rows)
        tl.store(out_tile, to_fp8(acc, scale[:, None]), mask=m_in)
    elif N % BLOCK_N == 0:
        tl.store(out_tile, acc.to(out_ptr.dtype.element_ty), mask=m_in)
    else:
        tl.store(out_tile, acc.to(out_ptr.dtype.element_ty), mask=m_in & (n[None, :] < N))


@triton.jit
def fp8_bmm_tma_kernel(
    x_desc, w_desc, w_scale_ptr, out_desc, out_scale_ptr,
    rows, batch, out_scale_pitch,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr, QUANT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A fixed number of programs take tiles in turn, so that loads of the next overlap the stores of the last."""
    GROUP: tl.constexpr = 128
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    m_tiles = tl.cdiv(rows, BLOCK_M)
    n_tiles: tl.constexpr = N // BLOCK_N
    blocks: tl.constexpr = K // GROUP
    programs = tl.num_programs(0)
    my_tiles = tl.cdiv(m_tiles * n_tiles * batch - tl.program_id(0), programs)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in tl.range(0, my_tiles * blocks, num_stages=STAGES):
        tile, block = tl.program_id(0) + step // blocks * programs, step % blocks
        m_tile, rest = tile % m_tiles, tile // m_tiles
        n_tile, head = rest % n_tiles, rest // n_tiles
        x = x_desc.load([m_tile * BLOCK_M, head, block * GROUP]).reshape(BLOCK_M, GROUP)
        w = w_desc.load([head * N + n_tile * BLOCK_N, block * GROUP])
        scale = tl.load(w_scale_ptr + (head * (N // GROUP) + n_tile * BLOCK_N // GROUP) * blocks + block)
        if SWAP:
            acc += tl.dot(w.to(x.dtype), x.T) * scale
        else:
            acc += tl.dot(x, w.to(x.dtype).T) * scale
        if block == blocks - 1:
            result = acc.T if SWAP else acc
            if QUANT:
                m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
                out_scale = scale_of(result, 1)
                tl.store(out_scale_ptr + (head * n_tiles + n_tile).to(tl.int64) * out_scale_pitch + m, out_scale, mask=m < rows)
                result = to_fp8(result, out_scale[:, None])
            out_desc.store([m_tile * BLOCK_M, head, n_tile * BLOCK_N], result.to(out_desc.dtype).reshape(BLOCK_M, 1, BLOCK_N))
            acc = tl.zeros_like(acc)


def choose_config(m: int, n: int, k: int, quant: bool) -> dict[str, int | bool]:
    """Tile, warps and which kernel; PER_SM 0: a program a tile, else so many persistent programs on each SM."""
    block_m = 64 if m > 32 else 32 if m > 16 else 16
    return {"BLOCK_M": block_m, "BLOCK_N": 128, "SWAP": False, "STAGES": 3, "num_warps": 4, "PER_SM": 0}


def launch(x: torch.Tensor, w: Fp8, out: torch.Tensor, out_scale: torch.Tensor | None, config: dict[str, int | bool] | None = None) -> None:
    """out [m, batch, n], quantised in groups of 128 columns if there is an out_scale [m, batch * n / 128]."""
    rows, (batch, n, k) = x.shape[0], w.data.shape
    config = dict(config or choose_config(rows, n, k, out_scale is not None))
    block_m, block_n, per_sm = config["BLOCK_M"], config["BLOCK_N"], config.pop("PER_SM")
    tiles = triton.cdiv(rows, block_m) * triton.cdiv(n, block_n) * batch
    pitch = 0 if out_scale is None else out_scale.stride(1)
    shared = {"N": n, "K": k, "QUANT": out_scale is not None, **config, **launch_options()}
    assert out_scale is None or block_n == GROUP
    if per_sm and n % block_n == 0 and block_n <= GROUP and _tma_reads(x) and _tma_reads(out):
        x_desc = TensorDescriptor(x, list(x.shape), list(x.stride()), [block_m, 1, GROUP])
        w_desc = TensorDescriptor(w.data, [batch * n, k], [k, 1], [block_n, GROUP])
        out_desc = TensorDescriptor(out, list(out.shape), list(out.stride()), [block_m, 1, block_n])
        grid = (min(tiles, per_sm * num_sms(x.device)),)
        fp8_bmm_tma_kernel[grid](x_desc, w_desc, w.scale, out_desc, out_scale, rows, batch, pitch, **shared)
        return
    fp8_bmm_kernel[(tiles,)](
        x, w.data, w.scale, out, out_scale, rows, x.stride(0), x.stride(1), out.stride(0), out.stride(1), pitch, **shared
    )


def _tma_reads(x: torch.Tensor) -> bool:
    """Whether a TMA descriptor can describe `x`: everything a multiple of 16 bytes."""
    return x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])


@functools.cache
def num_sms(device: torch.device) -> int:
    """132 on an H200; the interpreter gets few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
