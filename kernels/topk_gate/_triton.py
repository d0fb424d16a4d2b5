"""The gate on Hopper: a split-K router GEMM that leaves partial sums, and a kernel that adds them in order and chooses experts.

The second is launched while the first still runs (programmatic dependent launch) and waits for its sums. `topk_gate` is the second alone.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.backend import interpreting
from kernels.topk_gate import GateRule

_LOWEST = tl.constexpr(-(2**63))
_MINUS_INF = tl.constexpr(-2139095041)  # -inf as _ordered gives it


@triton.jit
def _exp(x, EXACT: tl.constexpr):
    """torch's own expf on a GPU: tl.exp is a rougher one there, and libdevice has no interpreter."""
    return libdevice.exp(x) if EXACT else tl.exp(x)


@triton.jit
def _ordered(x):
    """fp32 -> int32 in the same order; NaN above everything, -0 equal to 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def _value_of(keys):
    """The fp32 in the upper half of keys."""
    ordered = (keys >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _scores(logits, SOFTMAX: tl.constexpr, EXACT: tl.constexpr):
    """[T, P] logits, -inf where padded -> scores by torch's formulas."""
    if SOFTMAX:
        exps = _exp(logits - tl.max(logits, 1, keep_dims=True), EXACT)
        return tl.math.div_rn(exps, tl.broadcast_to(tl.sum(exps, 1, keep_dims=True), exps.shape))
    return tl.math.div_rn(tl.full(logits.shape, 1.0, tl.float32), 1.0 + _exp(-logits, EXACT))


@triton.jit
def _mask_groups(keys, expert, valid, SIZE_P: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, NUM_BEST: tl.constexpr):
    """[T, P] keys with the experts of all but the best groups at -inf."""
    T: tl.constexpr = keys.shape[0]
    GROUPS_P: tl.constexpr = keys.shape[1] // SIZE_P
    grouped = tl.reshape(keys, [T, GROUPS_P, SIZE_P])
    best = tl.max(grouped, 2, keep_dims=True)
    total = _value_of(tl.reshape(best, [T, GROUPS_P]))
    if NUM_BEST == 2:
        total += _value_of(tl.max(tl.where(grouped == best, _LOWEST, grouped), 2))
    group = tl.arange(0, GROUPS_P)[None, :]
    group_keys = tl.where(group < NUM_GROUPS, (_ordered(total).to(tl.int64) << 32) | (GROUPS_P - group), _LOWEST)
    better = group_keys[:, None, :] > group_keys[:, :, None]
    rank = tl.sum(better.to(tl.int32), 2)  # [T, GROUPS_P]
    masked = (tl.full([1], _MINUS_INF, tl.int64) << 32) | (0xFFFF - expert)
    dropped = tl.reshape(tl.broadcast_to(rank[:, :, None] >= TOPK_GROUPS, [T, GROUPS_P, SIZE_P]), [T, GROUPS_P * SIZE_P])
    return tl.where(dropped & valid, masked, keys)


@triton.jit
def _topk_gate_kernel(
    logits_ptr, bias_ptr, idx_ptr, weights_ptr, num_tokens, row_stride, split_stride, scale, NUM_SPLITS: tl.constexpr,
    TOP_K: tl.constexpr, TOP_K_P: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, NUM_BEST: tl.constexpr,
    SIZE: tl.constexpr, SIZE_P: tl.constexpr, GROUPS_P: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Logits are the sum of NUM_SPLITS planes. Columns are padded to GROUPS_P groups of SIZE_P, both powers of two."""
    P: tl.constexpr = GROUPS_P * SIZE_P
    column = tl.arange(0, P)[None, :]
    group, member = column // SIZE_P, column % SIZE_P
    expert = group * SIZE + member
    valid = (group < NUM_GROUPS) & (member < SIZE)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    biases = tl.load(bias_ptr + expert, mask=valid, other=0.0) if HAS_BIAS else 0.0
    if PDL:
        gdc_wait()
    present = valid & (token < num_tokens)
    source = logits_ptr + token.to(tl.int64) * row_stride + expert
    logits = tl.load(source, mask=present, other=0.0)
    for split in tl.static_range(1, NUM_SPLITS):
        logits += tl.load(source + split * split_stride, mask=present, other=0.0)
    logits = tl.where(valid, logits, -float("inf"))
    scores = _scores(logits, SOFTMAX, EXACT)
    keys = tl.where(valid, (_ordered(scores + biases).to(tl.int64) << 32) | (0xFFFF - expert), _LOWEST)
    if TOPK_GROUPS < NUM_GROUPS:
        keys = _mask_groups(keys, expert, valid, SIZE_P, NUM_GROUPS, TOPK_GROUPS, NUM_BEST)
    best = tl.topk(keys, TOP_K_P)  # [BLOCK_T, TOP_K_P], falling
    kept = tl.arange(0, TOP_K_P)[None, :] < TOP_K
    chosen = tl.where(kept, 0xFFFF - (best & 0xFFFF).to(tl.int32), 0)
    weights = tl.where(kept, tl.gather(scores, chosen // SIZE * SIZE_P + chosen % SIZE, 1), 0.0)
    if NORMALIZE:
        weights = tl.math.div_rn(weights, tl.broadcast_to(tl.sum(weights, 1, keep_dims=True) + 1e-20, weights.shape))
    place = token.to(tl.int64) * TOP_K + tl.arange(0, TOP_K_P)[None, :]
    written = kept & (token < num_tokens)
    tl.store(idx_ptr + place, chosen.to(tl.int64), mask=written)
    tl.store(weights_ptr + place, weights * scale, mask=written)


@triton.jit
def _partial_logits_kernel(
    x_ptr, w_ptr, out_ptr, num_tokens, num_experts, hidden, x_stride, w_stride, split_stride,
    K_PER_SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of one split's plane: x @ w.T over K_PER_SPLIT of the hidden dimension, in fp32."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    row_ok, column_ok = (row < num_tokens)[:, None], (column < num_experts)[None, :]
    k = split * K_PER_SPLIT + tl.arange(0, BLOCK_K)
    x_tile = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_tile = w_ptr + column.to(tl.int64)[None, :] * w_stride + k[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, K_PER_SPLIT, BLOCK_K):
        if EVEN_K:
            a, b = tl.load(x_tile + step, mask=row_ok, other=0.0), tl.load(w_tile + step, mask=column_ok, other=0.0)
        else:
            a = tl.load(x_tile + step, mask=row_ok & (k + step < hidden)[None, :], other=0.0)
            b = tl.load(w_tile + step, mask=column_ok & (k + step < hidden)[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    out = out_ptr + split.to(tl.int64) * split_stride + row.to(tl.int64)[:, None] * num_experts + column[None, :]
    tl.store(out, sums, mask=row_ok & column_ok)


@triton.jit
def _add_splits_kernel(partial_ptr, out_ptr, size, NUM_SPLITS: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    total = tl.load(partial_ptr + place, mask=place < size, other=0.0)
    for split in tl.static_range(1, NUM_SPLITS):
        total += tl.load(partial_ptr + split * size + place, mask=place < size, other=0.0)
    tl.store(out_ptr + place, total, mask=place < size)


def choose_config(num_tokens: int, num_experts: int, hidden: int) -> dict[str, int]:
    """Tiles and splits of the router's GEMM: about one program an SM, few splits, since each costs a plane of sums."""
    block_m = 16 if num_tokens <= 16 else 64
    block_n = min(64 if num_tokens <= 64 else 128, max(16, triton.next_power_of_2(num_experts)))
    tiles = max(1, triton.cdiv(num_tokens, block_m) * triton.cdiv(num_experts, block_n))
    num_splits = max(1, min(132 // tiles, 16, triton.cdiv(hidden, 128)))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 64, "num_splits": num_splits, "num_warps": 4, "num_stages": 5}


def topk_gate_triton(logits: torch.Tensor, bias: torch.Tensor | None, rule: GateRule) -> tuple[torch.Tensor, torch.Tensor]:
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"{logits.dtype=} {logits.stride()=}"
    return _choose(logits.unsqueeze(0), bias, rule, pdl=False)


def gate_triton(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, rule: GateRule) -> tuple[torch.Tensor, torch.Tensor]:
    return _choose(_partial_logits(x, w), bias, rule, pdl=not interpreting())


def gate_logits_triton(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    partial = _partial_logits(x, w)  # [num_splits, num_tokens, num_experts]
    if len(partial) == 1:
        return partial[0]
    out = torch.empty(partial.shape[1:], dtype=torch.float32, device=x.device)
    if out.numel() > 0:
        pdl = not interpreting()
        grid = (triton.cdiv(out.numel(), 512),)
        _add_splits_kernel[grid](partial, out, out.numel(), len(partial), pdl, 512, num_warps=4, **_launch(pdl))
    return out


def _launch(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}


def _partial_logits(x: torch.Tensor, w: torch.Tensor, config: dict[str, int] | None = None) -> torch.Tensor:
    """[num_splits, num_tokens, num_experts] fp32, whose sum over the first dimension are the logits."""
    (num_tokens, hidden), num_experts = x.shape, w.shape[0]
    config = dict(config or choose_config(num_tokens, num_experts, hidden))
    k_per_split = triton.cdiv(triton.cdiv(hidden, config["BLOCK_K"]), config.pop("num_splits")) * config["BLOCK_K"]
    num_splits = triton.cdiv(hidden, k_per_split)
    partial = torch.empty((num_splits, num_tokens, num_experts), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(num_tokens, config["BLOCK_M"]), triton.cdiv(num_experts, config["BLOCK_N"]), num_splits)
    if num_tokens > 0:
        _partial_logits_kernel[grid](
            x, w, partial, num_tokens, num_experts, hidden, x.stride(0), w.stride(0), partial.stride(0), K_PER_SPLIT=k_per_split,
            EVEN_K=hidden % k_per_split == 0, PDL=not interpreting(), **config,
        )  # fmt: skip
    return partial


def _choose(planes: torch.Tensor, bias: torch.Tensor | None, rule: GateRule, pdl: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """planes [num_splits, num_tokens, num_experts] fp32, strided; their sum are the logits."""
    num_splits, num_tokens, num_experts = planes.shape
    assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous() and len(bias) == num_experts), f"{bias=}"
    idx = torch.empty((num_tokens, rule.top_k), dtype=torch.int64, device=planes.device)
    weights = torch.empty((num_tokens, rule.top_k), dtype=torch.float32, device=planes.device)
    if num_tokens == 0:
        return idx, weights
    size = num_experts // rule.num_groups
    top_k_p = max(2, triton.next_power_of_2(rule.top_k))  # tl.topk knows no 1
    size_p, groups_p = max(2, triton.next_power_of_2(size)), triton.next_power_of_2(rule.num_groups)
    block_t = 1 if num_tokens <= 4096 else 4
    _topk_gate_kernel[(triton.cdiv(num_tokens, block_t),)](
        planes, bias, idx, weights, num_tokens, planes.stride(1), planes.stride(0), rule.scale, num_splits,
        TOP_K=rule.top_k, TOP_K_P=top_k_p, NUM_GROUPS=rule.num_groups, TOPK_GROUPS=rule.topk_groups,
        NUM_BEST=min(rule.num_best, size), SIZE=size, SIZE_P=size_p, GROUPS_P=groups_p, SOFTMAX=rule.scoring == "softmax",
        NORMALIZE=rule.normalize, HAS_BIAS=bias is not None, EXACT=not interpreting(), PDL=pdl, BLOCK_T=block_t,
        num_warps=block_t, **_launch(pdl),
    )  # fmt: skip
    return idx, weights
