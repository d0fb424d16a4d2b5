"""Batched product with FP8 weights that become bf16 in registers: exact, and no pass over x to quantise it."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.backend import interpreting
from kernels.launch import launch_options
from kernels.numerics import GROUP, Fp8
from kernels.quant_fp8._triton import scale_of, to_fp8

_INTERPRETING = tl.constexpr(interpreting())


@triton.jit
def _widen(w, dtype: tl.constexpr, PAIRS: tl.constexpr):
    """e4m3 (never NaN) as `dtype`, exactly. To bf16 by hand: the compiler's cast goes by way of fp16 and takes four times as long.

    An e4m3's bits are those of a bf16 that is 2**120 times smaller, subnormals too: sign, four zeros, exponent and mantissa. A byte
    above the next one's sign eight times over, shifted as a signed number, brings every bit to its place. PAIRS where threads hold
    two neighbours, not four.
    """
    if _INTERPRETING:
        return w.to(dtype)
    if PAIRS:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 x, up;
            cvt.u32.u16 x, $1;
            prmt.b32 x, x, 0, 0x1800;
            shr.s32 x, x, 4;
            and.b32 x, x, 0x87f087f0;
            mov.b32 up, 0x7b807b80;
            mul.rn.bf16x2 $0, x, up;
            }""",
            "=r,h",
            [w],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 x, y, up;
        prmt.b32 x, $2, 0, 0x1800;
        prmt.b32 y, $2, 0, 0x3a22;
        shr.s32 x, x, 4;
        shr.s32 y, y, 4;
        and.b32 x, x, 0x87f087f0;
        and.b32 y, y, 0x87f087f0;
        mov.b32 up, 0x7b807b80;
        mul.rn.bf16x2 $0, x, up;
        mul.rn.bf16x2 $1, y, up;
        }""",
        "=r,=r,r",
        [w],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


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
            acc += tl.dot(_widen(w, x.dtype, SWAP), x.T) * scale
        else:
            acc += tl.dot(x, _widen(w, x.dtype, SWAP).T) * scale
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
def fp8_bmm_deep_kernel(
    x_desc, w_desc, w_scale_ptr, out_desc, out_scale_ptr, rows, x_stride_b, out_stride_b, out_scale_pitch,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr, QUANT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a tile; tiles along m follow each other, so that a head's weights stay in L2."""
    GROUP: tl.constexpr = 128
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    m_tiles = tl.cdiv(rows, BLOCK_M)
    n_tiles: tl.constexpr = N // BLOCK_N
    m_tile, rest = tl.program_id(0) % m_tiles, tl.program_id(0) // m_tiles
    n_tile, head = rest % n_tiles, rest // n_tiles
    scales = w_scale_ptr + (head * ((N + GROUP - 1) // GROUP) + n_tile * BLOCK_N // GROUP) * (K // GROUP)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    last = 1.0
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x = x_desc.load([m_tile * BLOCK_M, head * x_stride_b + k])
        w = w_desc.load([head * N + n_tile * BLOCK_N, k])
        scale = tl.load(scales + k // GROUP)
        acc *= last / scale  # the sum in units of this block's scale: one accumulator does, and the weights stay exact
        acc = tl.dot(_widen(w, x.dtype, SWAP), x.T, acc) if SWAP else tl.dot(x, _widen(w, x.dtype, SWAP).T, acc)
        last = scale
    result = (acc.T if SWAP else acc) * last
    if QUANT:
        m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        out_scale = scale_of(result, 1)
        tl.store(out_scale_ptr + (head * n_tiles + n_tile).to(tl.int64) * out_scale_pitch + m, out_scale, mask=m < rows)
        result = to_fp8(result, out_scale[:, None])
    out_desc.store([m_tile * BLOCK_M, head * out_stride_b + n_tile * BLOCK_N], result.to(out_desc.dtype))


@triton.jit
def fp8_bmm_wide_kernel(
    x_desc, w_desc, w_scale_ptr, out_desc, rows, x_stride_b, out_stride_b,
    N: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """k = 128: a program keeps its rows of one head and passes WIDTH rows of the head's weights by them."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    m_tiles = tl.cdiv(rows, BLOCK_M)
    m, rest = tl.program_id(0) % m_tiles * BLOCK_M, tl.program_id(0) // m_tiles
    first, head = rest % (N // WIDTH) * WIDTH, rest // (N // WIDTH)
    x = x_desc.load([m, head * x_stride_b])
    for n in tl.range(first, first + WIDTH, BLOCK_N, num_stages=STAGES):
        w = w_desc.load([head * N + n, 0])
        scale = tl.load(w_scale_ptr + head * ((N + 127) // 128) + n // 128)
        acc = tl.dot(_widen(w, x.dtype, SWAP), x.T).T if SWAP else tl.dot(x, _widen(w, x.dtype, SWAP).T)
        out_desc.store([m, head * out_stride_b + n], (acc * scale).to(out_desc.dtype))


def choose_config(m: int, n: int, k: int, quant: bool) -> dict[str, int | bool | str]:
    """Kernel, tile and warps, as measured on an H200 at 128 heads, 128 -> 512 and 512 -> 128 (us at m 256, 128, 64, 16).

    key half    18.3, 12.1, 8.2, 6.3;  cuBLAS on bf16 weights 22.4, 13.9, 10.2, 7.9, DeepGEMM on them 20.2, 14.0, 10.5, 8.4
    value half  17.3, 11.9, 8.2, 7.1, quantised;  18.7, not measured, 9.7, 7.8 and 20.5, not measured, 9.8, 8.0, not quantised
    """
    wide = k == GROUP and not quant
    if m > 128 and wide:
        return {"KIND": "wide", "BLOCK_M": 128, "BLOCK_N": 128, "WIDTH": n, "SWAP": True, "STAGES": 3, "num_warps": 8}
    if m > 64 and wide:
        return {"KIND": "wide", "BLOCK_M": 64, "BLOCK_N": 64, "WIDTH": min(n, 256), "SWAP": True, "STAGES": 3, "num_warps": 4}
    if m > 128:
        return {"KIND": "deep", "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "SWAP": False, "STAGES": 3, "num_warps": 8}
    if m > 64:
        return {"KIND": "deep", "BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "SWAP": False, "STAGES": 4, "num_warps": 4}
    if m > 32 and k > GROUP:
        return {"KIND": "deep", "BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 128, "SWAP": False, "STAGES": 3, "num_warps": 4}
    block_m = 64 if m > 32 else 32 if m > 16 else 16
    return {"KIND": "plain", "BLOCK_M": block_m, "BLOCK_N": 128, "SWAP": False, "STAGES": 3, "num_warps": 8 if k > GROUP else 4}


def launch(
    x: torch.Tensor, w: Fp8, out: torch.Tensor, out_scale: torch.Tensor | None, config: dict[str, int | bool | str] | None = None
) -> None:
    """out [m, batch, n], quantised in groups of 128 columns if there is an out_scale [m, batch * n / 128]."""
    rows, (batch, n, k) = x.shape[0], w.data.shape
    config = dict(config or choose_config(rows, n, k, out_scale is not None))
    kind, block_m, block_n = config.pop("KIND"), config["BLOCK_M"], config["BLOCK_N"]
    width, block_k = config.pop("WIDTH", block_n), config.pop("BLOCK_K", GROUP)
    m_tiles, n_tiles = triton.cdiv(rows, block_m), triton.cdiv(n, block_n)
    pitch = 0 if out_scale is None else out_scale.stride(1)
    config |= {"N": n, **launch_options()}
    assert out_scale is None or block_n == GROUP
    if kind == "plain" or n % width or n % block_n or not _tma_reads(x) or not _tma_reads(out):
        strides = x.stride(0), x.stride(1), out.stride(0), out.stride(1), pitch
        grid, quant = (m_tiles * n_tiles * batch,), out_scale is not None
        fp8_bmm_kernel[grid](x, w.data, w.scale, out, out_scale, rows, *strides, K=k, QUANT=quant, **config)
        return
    x_desc = TensorDescriptor(x, [rows, (batch - 1) * x.stride(1) + k], [x.stride(0), 1], [block_m, block_k])
    w_desc = TensorDescriptor(w.data, [batch * n, k], [k, 1], [block_n, block_k])
    out_desc = TensorDescriptor(out, [rows, (batch - 1) * out.stride(1) + n], [out.stride(0), 1], [block_m, block_n])
    operands = x_desc, w_desc, w.scale, out_desc
    if kind == "wide":
        grid = (m_tiles * (n // width) * batch,)
        fp8_bmm_wide_kernel[grid](*operands, rows, x.stride(1), out.stride(1), WIDTH=width, **config)
    else:
        config |= {"K": k, "BLOCK_K": block_k, "QUANT": out_scale is not None}
        grid = (m_tiles * n_tiles * batch,)
        fp8_bmm_deep_kernel[grid](*operands, out_scale, rows, x.stride(1), out.stride(1), pitch, **config)


def _tma_reads(x: torch.Tensor) -> bool:
    """Whether a TMA descriptor can describe a row of all heads: multiples of 16 bytes, heads side by side in it."""
    row, head, _ = x.stride()
    side_by_side = x.shape[0] == 1 or x.shape[1] == 1 or head * (x.shape[1] - 1) + x.shape[2] <= row
    return side_by_side and x.data_ptr() % 16 == row * x.element_size() % 16 == head * x.element_size() % 16 == 0
