"""The gate on Hopper: a split-K router GEMM that leaves partial sums, and a kernel that adds them in order and chooses experts.

Each is launched while the kernel before it still runs (programmatic dependent launch). `topk_gate` is the second kernel alone. Measured
and left: one cooperative launch for both (10.3 us against 9.9 for 256 tokens), a bitonic sort of packed keys (1.8 times as long at 16384).
"""

from typing import NamedTuple

import torch
import triton

from kernels.backend import interpreting
from kernels.topk_gate import GateRule, router_torch
from kernels.topk_gate._triton_kernels import add_splits_kernel, partial_logits_kernel, topk_gate_kernel

_MAX_SPLIT_TOKENS = 512  # beyond, cuBLAS is as fast


class Config(NamedTuple):
    """How the router's GEMM is cut."""

    block_m: int
    block_n: int
    block_k: int
    num_splits: int
    stages: int
    warps: int
    ahead: bool  # ask L2 for all of the weights before waiting for x


def choose_config(num_tokens: int, num_experts: int, hidden: int) -> Config:
    """About one program an SM, few splits, since each costs a plane of sums; measured for 256 experts and 7168."""
    block_m = 16 if num_tokens <= 16 else 64
    block_n = min(32 if num_tokens <= 64 else 64 if num_tokens <= 256 else 128, max(16, triton.next_power_of_2(num_experts)))
    tiles = max(1, triton.cdiv(num_tokens, block_m) * triton.cdiv(num_experts, block_n))
    num_splits = max(1, min(132 // tiles, 14 if 16 < num_tokens <= 64 else 16, triton.cdiv(hidden, 128)))
    return Config(block_m, block_n, 64, num_splits, 6, 4, num_tokens <= 16)


def topk_gate_triton(logits: torch.Tensor, bias: torch.Tensor | None, rule: GateRule) -> tuple[torch.Tensor, torch.Tensor]:
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"{logits.dtype=} {logits.stride()=}"
    return _choose(logits.unsqueeze(0), bias, rule)


def gate_triton(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, rule: GateRule) -> tuple[torch.Tensor, torch.Tensor]:
    return _choose(_planes(x, w), bias, rule)


def gate_logits_triton(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    planes = _planes(x, w)
    if len(planes) == 1:
        return planes[0]
    out = torch.empty(planes.shape[1:], dtype=torch.float32, device=x.device)
    if out.numel() > 0:
        pdl = not interpreting()
        add_splits_kernel[(triton.cdiv(out.numel(), 512),)](planes, out, out.numel(), len(planes), pdl, 512, num_warps=4, **_launch(pdl))
    return out


def _launch(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}


def _planes(x: torch.Tensor, w: torch.Tensor, config: Config | None = None) -> torch.Tensor:
    """[num_splits, num_tokens, num_experts] fp32, whose sum are the logits."""
    (num_tokens, hidden), num_experts = x.shape, w.shape[0]
    if num_tokens > _MAX_SPLIT_TOKENS:
        return router_torch(x, w).unsqueeze(0)
    config = config or choose_config(num_tokens, num_experts, hidden)
    k_per_split = triton.cdiv(triton.cdiv(hidden, config.block_k), config.num_splits) * config.block_k
    num_splits, even, pdl = triton.cdiv(hidden, k_per_split), hidden % k_per_split == 0, not interpreting()
    planes = torch.empty((num_splits, num_tokens, num_experts), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(num_tokens, config.block_m), triton.cdiv(num_experts, config.block_n), num_splits)
    aligned = (w.data_ptr() | w.stride(0) * w.element_size()) % 16 == 0
    if num_tokens > 0:
        partial_logits_kernel[grid](
            x, w, planes, num_tokens, num_experts, hidden, x.stride(0), w.stride(0), planes.stride(0), K_PER_SPLIT=k_per_split,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, EVEN_K=even, PDL=pdl,
            AHEAD=config.ahead and even and aligned,
            num_warps=config.warps, num_stages=config.stages, **_launch(pdl),
        )  # fmt: skip
    return planes


def _choose(planes: torch.Tensor, bias: torch.Tensor | None, rule: GateRule) -> tuple[torch.Tensor, torch.Tensor]:
    """planes [num_splits, num_tokens, num_experts] fp32, strided; their sum are the logits."""
    num_splits, num_tokens, num_experts = planes.shape
    assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous() and len(bias) == num_experts), f"{bias=}"
    idx = torch.empty((num_tokens, rule.top_k), dtype=torch.int64, device=planes.device)
    weights = torch.empty((num_tokens, rule.top_k), dtype=torch.float32, device=planes.device)
    size, pdl = num_experts // rule.num_groups, not interpreting()
    if num_tokens > 0:
        topk_gate_kernel[(num_tokens,)](
            planes, bias, idx, weights, planes.stride(1), planes.stride(0), rule.scale, num_splits,
            TOP_K=rule.top_k, TOP_K_P=max(2, triton.next_power_of_2(rule.top_k)), NUM_GROUPS=rule.num_groups, TOPK_GROUPS=rule.topk_groups,
            NUM_BEST=min(rule.num_best, size), SIZE=size, SIZE_P=max(2, triton.next_power_of_2(size)),
            GROUPS_P=triton.next_power_of_2(rule.num_groups), SOFTMAX=rule.scoring == "softmax", NORMALIZE=rule.normalize,
            HAS_BIAS=bias is not None, EXACT=not interpreting(), PDL=pdl, num_warps=1, **_launch(pdl),
        )  # fmt: skip
    return idx, weights
