"""silu(gate) * up -> FP8 on Hopper: memory bound. A unit of work is 1024 columns of one row, for one warp.

A program of one warp needs no barrier for its reductions, and many of them on an SM keep enough loads in flight.
"""

import torch
import triton
import triton.language as tl

from kernels.launch import launch_options
from kernels.numerics import GROUP, Fp8, empty_fp8
from kernels.quant_fp8._triton import scale_of, to_fp8

_NUM_SMS = 132
_PROGRAMS_PER_SM = 20


@triton.jit
def silu_kernel(
    x_ptr, num_rows_ptr, data_ptr, scale_ptr, num_groups, max_m, width, x_group, x_row, pitch,
    GROUPS: tl.constexpr, COUNTED: tl.constexpr, RUNS: tl.constexpr, PDL: tl.constexpr,
):
    """`width` is that of the product; GROUPS >= num_groups and RUNS (of 128 columns) are powers of two."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    group = tl.arange(0, GROUPS)
    counts = tl.where(group < num_groups, max_m, 0)
    if COUNTED:
        counts = tl.minimum(tl.load(num_rows_ptr + group, mask=group < num_groups, other=0), max_m)
    psum_rows = tl.cumsum(counts)
    units_per_row = tl.cdiv(width, RUNS * 128)
    num_units = tl.sum(counts) * units_per_row
    inside = tl.arange(0, RUNS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        row = unit // units_per_row
        first = (unit % units_per_row) * RUNS * 128
        before = psum_rows <= row  # groups that end before this row
        group_id = tl.sum(before.to(tl.int32)).to(tl.int64)
        row = (row - tl.sum(tl.where(before, counts, 0))).to(tl.int64)
        column = first + inside
        valid = column < width
        gate_ptr = x_ptr + group_id * x_group + row * x_row + column
        gate = tl.load(gate_ptr, mask=valid, other=0.0).to(tl.float32)
        up = tl.load(gate_ptr + width, mask=valid, other=0.0).to(tl.float32)
        root = tl.rsqrt(1.0 + tl.exp2(gate * -1.4426950408889634))
        product = gate * (root * root) * up
        scale = scale_of(product, 1)
        # eight columns a thread, so that loads stay 16 bytes apart from lane to lane
        target = tl.max_contiguous((group_id * max_m + row) * width + column, [1, 8])
        tl.store(data_ptr + target, to_fp8(product, scale[:, None]), mask=valid)
        run = first // 128 + tl.arange(0, RUNS)
        tl.store(scale_ptr + (group_id * (width // 128) + run) * pitch + row, scale, mask=run < width // 128)


def silu_mul_quant(gate_up: torch.Tensor, num_rows: torch.Tensor | None) -> Fp8:
    """See kernels.silu_mul_quant.silu_mul_quant_masked."""
    groups, max_m, width = gate_up.shape[0], gate_up.shape[1], gate_up.shape[2] // 2
    out = empty_fp8(groups, max_m, width, device=gate_up.device)
    if out.data.numel():
        runs = min(8, triton.next_power_of_2(width // GROUP))
        most = groups * max_m * triton.cdiv(width, runs * GROUP)
        silu_kernel[(min(most, _NUM_SMS * _PROGRAMS_PER_SM),)](
            gate_up, num_rows, *out, groups, max_m, width, gate_up.stride(0), gate_up.stride(1), out.scale.stride(-1),
            GROUPS=triton.next_power_of_2(groups), COUNTED=num_rows is not None, RUNS=runs, num_warps=1, **launch_options(),
        )
    return out
