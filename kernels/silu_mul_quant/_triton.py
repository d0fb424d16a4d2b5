"""silu(gate) * up -> FP8 on Hopper: memory bound, and nearly bound by instructions. A unit of work is 1024 columns of one row."""

import torch
import triton
import triton.language as tl

from kernels.launch import in_pairs, launch_options
from kernels.numerics import GROUP, Fp8, empty_fp8
from kernels.quant_fp8 import _triton_pairs as pairs

_NUM_SMS = 132
_PROGRAMS_PER_SM = 16
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _silu(gate):
    return gate * pairs.reciprocal(1.0 + tl.exp2(gate * -_LOG2_E))


@triton.jit
def silu_kernel(
    x_ptr, num_rows_ptr, data_ptr, scale_ptr, num_groups, max_m, x_group, x_row, pitch,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, COUNTED: tl.constexpr, RUNS: tl.constexpr, PDL: tl.constexpr,
):
    """WIDTH is that of the product; GROUPS >= num_groups and RUNS (of 128 columns) are powers of two."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    group = tl.arange(0, GROUPS)
    counts = tl.where(group < num_groups, max_m, 0)
    if COUNTED:
        counts = tl.minimum(tl.load(num_rows_ptr + group, mask=group < num_groups, other=0), max_m)
    psum_rows = tl.cumsum(counts)
    UNITS: tl.constexpr = (WIDTH + RUNS * 128 - 1) // (RUNS * 128)
    num_units = tl.sum(counts) * UNITS
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    inside = tl.arange(0, RUNS)[:, None] * 64 + tl.arange(0, 64)[None, :]
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        row = unit // UNITS
        first = (unit % UNITS) * RUNS
        group_id = 0
        if GROUPS > 1:
            before = psum_rows <= row  # groups that end before this row
            group_id = tl.sum(before.to(tl.int32)).to(tl.int64)
            row -= tl.sum(tl.where(before, counts, 0))
        row = tl.cast(row, tl.int64)
        pair = first * 64 + inside
        valid = pair < WIDTH // 2
        gate_ptr = x_ptr + group_id * x_group + row * x_row
        gate, up = pairs.load(gate_ptr, pair, valid), pairs.load(gate_ptr + WIDTH, pair, valid)
        tl.debug_barrier()  # or the compiler, to save registers, asks for the last columns when the first have come
        gate_even, gate_odd = pairs.widen(gate, dtype)
        up_even, up_odd = pairs.widen(up, dtype)
        even, odd = _silu(gate_even) * up_even, _silu(gate_odd) * up_odd
        scale = pairs.scale_of(even, odd)
        inverse = pairs.reciprocal(scale)[:, None]
        pairs.store_fp8(data_ptr, (group_id * max_m + row) * (WIDTH // 2), pair, even * inverse, odd * inverse, valid)
        run = first + tl.arange(0, RUNS)
        tl.store(scale_ptr + (group_id * (WIDTH // 128) + run) * pitch + row, scale, mask=run < WIDTH // 128)


def silu_mul_quant(gate_up: torch.Tensor, num_rows: torch.Tensor | None) -> Fp8:
    """See kernels.silu_mul_quant.silu_mul_quant_masked."""
    groups, max_m, width = gate_up.shape[0], gate_up.shape[1], gate_up.shape[2] // 2
    assert in_pairs(gate_up), f"{gate_up.stride()=}, or an odd offset"
    out = empty_fp8(groups, max_m, width, device=gate_up.device)
    if out.data.numel():
        runs = min(8, triton.next_power_of_2(width // GROUP))
        most = groups * max_m * triton.cdiv(width, runs * GROUP)
        silu_kernel[(min(most, _NUM_SMS * _PROGRAMS_PER_SM),)](
            gate_up, num_rows, *out, groups, max_m, gate_up.stride(0), gate_up.stride(1), out.scale.stride(-1),
            WIDTH=width, GROUPS=triton.next_power_of_2(groups), COUNTED=num_rows is not None, RUNS=runs,
            num_warps=max(1, runs // 2), **launch_options(),
        )
    return out
