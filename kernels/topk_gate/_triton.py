"""The gate on Hopper: a split-K router GEMM that leaves partial sums, which are added in order and make the choice.

For few tokens all is one launch: the programs of a block of rows wait for each other, then share its tokens. For many, the choice is a
second kernel, launched while the first still runs (programmatic dependent launch). `topk_gate` is that second kernel alone.
"""

from typing import NamedTuple

import torch
import triton

from kernels.backend import interpreting
from kernels.topk_gate import GateRule
from kernels.topk_gate._triton_kernels import add_splits_kernel, gate_kernel, partial_logits_kernel, topk_gate_kernel


class Config(NamedTuple):
    """How the router's GEMM is cut."""

    block_m: int
    block_n: int
    block_k: int
    num_splits: int
    stages: int
    warps: int
    fused: bool  # one cooperative launch; else the choice is a second one, launched before the first has ended
    sort: bool = True


def choose_config(num_tokens: int, num_experts: int, hidden: int) -> Config:
    """About one program an SM, few splits, since each costs a plane of sums; measured for 256 experts and 7168."""
    block_m = 16 if num_tokens <= 16 else 64
    block_n = min(32 if num_tokens <= 128 else 64 if num_tokens <= 256 else 128, max(16, triton.next_power_of_2(num_experts)))
    tiles = max(1, triton.cdiv(num_tokens, block_m) * triton.cdiv(num_experts, block_n))
    num_splits = max(1, min(132 // tiles, 16, triton.cdiv(hidden, 128)))
    return Config(block_m, block_n, 64, num_splits, 6 if block_n <= 64 else 4, 4, num_tokens <= 512)


_MAX_STREAMS = 72  # torch has 65 a device
_MAX_ROW_BLOCKS = 132
_counters: dict[torch.device, torch.Tensor] = {}
_streams: dict[torch.device, list[int]] = {}


def _counters_of(device: torch.device) -> torch.Tensor:
    """Counters at 0, as every call leaves them; calls of different streams may overlap in time and have different ones."""
    if device.type == "cpu":
        return torch.zeros(_MAX_ROW_BLOCKS, dtype=torch.int32)
    if device not in _counters:
        assert not torch.cuda.is_current_stream_capturing(), "run once before capturing a graph"
        _counters[device] = torch.zeros((_MAX_STREAMS, _MAX_ROW_BLOCKS), dtype=torch.int32, device=device)
    stream, known = torch.cuda.current_stream(device).cuda_stream, _streams.setdefault(device, [])
    if stream not in known:
        known.append(stream)
    return _counters[device][known.index(stream) % _MAX_STREAMS]


def topk_gate_triton(logits: torch.Tensor, bias: torch.Tensor | None, rule: GateRule) -> tuple[torch.Tensor, torch.Tensor]:
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"{logits.dtype=} {logits.stride()=}"
    return _choose(logits.unsqueeze(0), bias, rule, pdl=False)


def gate_triton(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, rule: GateRule, config: Config | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    (num_tokens, hidden), num_experts = x.shape, w.shape[0]
    config = config or choose_config(num_tokens, num_experts, hidden)
    if not config.fused or num_tokens == 0:
        return _choose(_partials(x, w, config, pdl=not interpreting()), bias, rule, pdl=not interpreting())
    idx, weights = _empty(num_tokens, num_experts, bias, rule, x.device)
    grid, partial, gemm = _cut(x, w, config)
    block_t = triton.next_power_of_2(triton.cdiv(config.block_m, grid[1] * grid[2]))
    pointers = [x, w, partial, _counters_of(x.device), bias, idx, weights]
    numbers = [num_tokens, num_experts, hidden, x.stride(0), w.stride(0), rule.scale]
    options = {**gemm, **_options(num_experts, bias, rule), "SORT": config.sort, "NUM_SPLITS": grid[2], "BLOCK_T": block_t}
    if interpreting():  # one program after another: none may wait
        gate_kernel[grid](*pointers, *numbers, GEMM=True, CHOOSE=False, **options)
        gate_kernel[grid](*pointers, *numbers, GEMM=False, CHOOSE=True, **options)
    else:
        gate_kernel[grid](*pointers, *numbers, GEMM=True, CHOOSE=True, launch_cooperative_grid=True, **options)
    return idx, weights


def gate_logits_triton(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    partial = _partials(x, w, choose_config(x.shape[0], w.shape[0], x.shape[1]), pdl=False)
    if len(partial) == 1:
        return partial[0]
    out = torch.empty(partial.shape[1:], dtype=torch.float32, device=x.device)
    if out.numel() > 0:
        add_splits_kernel[(triton.cdiv(out.numel(), 512),)](partial, out, out.numel(), len(partial), 512, num_warps=4)
    return out


def _cut(x: torch.Tensor, w: torch.Tensor, config: Config) -> tuple[tuple[int, int, int], torch.Tensor, dict[str, int]]:
    """The grid, the planes [num_splits, num_tokens, num_experts] fp32 whose sum are the logits, and the kernel's options."""
    (num_tokens, hidden), num_experts = x.shape, w.shape[0]
    k_per_split = triton.cdiv(triton.cdiv(hidden, config.block_k), config.num_splits) * config.block_k
    num_splits = triton.cdiv(hidden, k_per_split)
    partial = torch.empty((num_splits, num_tokens, num_experts), dtype=torch.float32, device=x.device)
    blocks = {"K_PER_SPLIT": k_per_split, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    options = {**blocks, "EVEN_K": hidden % k_per_split == 0, "num_warps": config.warps, "num_stages": config.stages}
    return (triton.cdiv(num_tokens, config.block_m), triton.cdiv(num_experts, config.block_n), num_splits), partial, options


def _partials(x: torch.Tensor, w: torch.Tensor, config: Config, pdl: bool) -> torch.Tensor:
    grid, partial, options = _cut(x, w, config)
    if x.shape[0] > 0:
        partial_logits_kernel[grid](
            x, w, partial, x.shape[0], w.shape[0], x.shape[1], x.stride(0), w.stride(0), partial.stride(0), PDL=pdl, **options
        )
    return partial


def _empty(
    num_tokens: int, num_experts: int, bias: torch.Tensor | None, rule: GateRule, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous() and len(bias) == num_experts), f"{bias=}"
    shape = (num_tokens, rule.top_k)
    return torch.empty(shape, dtype=torch.int64, device=device), torch.empty(shape, dtype=torch.float32, device=device)


def _options(num_experts: int, bias: torch.Tensor | None, rule: GateRule) -> dict[str, object]:
    size = num_experts // rule.num_groups
    return {
        "TOP_K": rule.top_k, "TOP_K_P": max(2, triton.next_power_of_2(rule.top_k)),  # tl.topk knows no 1
        "NUM_GROUPS": rule.num_groups, "TOPK_GROUPS": rule.topk_groups, "NUM_BEST": min(rule.num_best, size), "SIZE": size,
        "SIZE_P": max(2, triton.next_power_of_2(size)), "GROUPS_P": triton.next_power_of_2(rule.num_groups),
        "SOFTMAX": rule.scoring == "softmax", "NORMALIZE": rule.normalize, "HAS_BIAS": bias is not None, "EXACT": not interpreting(),
    }  # fmt: skip


def _choose(
    planes: torch.Tensor, bias: torch.Tensor | None, rule: GateRule, pdl: bool, sort: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """planes [num_splits, num_tokens, num_experts] fp32, strided; their sum are the logits."""
    num_splits, num_tokens, num_experts = planes.shape
    idx, weights = _empty(num_tokens, num_experts, bias, rule, planes.device)
    if num_tokens > 0:
        topk_gate_kernel[(num_tokens,)](
            planes, bias, idx, weights, num_tokens, planes.stride(1), planes.stride(0), rule.scale, num_splits, PDL=pdl, BLOCK_T=1,
            **_options(num_experts, bias, rule), SORT=sort, num_warps=1, **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    return idx, weights
