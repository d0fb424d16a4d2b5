"""The gate's kernels; `_triton.py` launches them."""

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.sample._triton_order import ordered, value_of

_MINUS_INF = tl.constexpr(-2139095041)  # -inf as `ordered` gives it


@triton.jit
def _exp(x, EXACT: tl.constexpr):
    """torch's own expf on a GPU: tl.exp is a rougher one there, and libdevice has no interpreter."""
    return libdevice.exp(x) if EXACT else tl.exp(x)


@triton.jit
def _scores(logits, SOFTMAX: tl.constexpr, EXACT: tl.constexpr):
    """[T, P] logits, -inf where padded -> scores by torch's formulas."""
    if SOFTMAX:
        exps = _exp(logits - tl.max(logits, 1, keep_dims=True), EXACT)
        return tl.math.div_rn(exps, tl.broadcast_to(tl.sum(exps, 1, keep_dims=True), exps.shape))
    return tl.math.div_rn(tl.full(logits.shape, 1.0, tl.float32), 1.0 + _exp(-logits, EXACT))


@triton.jit
def _dropped(keys, SIZE_P: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, NUM_BEST: tl.constexpr):
    """[T, P] biased scores -> [T, P]: whether the expert is in none of the best groups."""
    T: tl.constexpr = keys.shape[0]
    GROUPS_P: tl.constexpr = keys.shape[1] // SIZE_P
    grouped = tl.reshape(keys, [T, GROUPS_P, SIZE_P])
    best = tl.max(grouped, 2, keep_dims=True)
    total = value_of(tl.reshape(best, [T, GROUPS_P]))
    if NUM_BEST == 2:
        equal = grouped == best
        second = tl.max(tl.where(equal, -(2**31), grouped), 2)
        twice = tl.sum(equal.to(tl.int32), 2) > 1
        total += tl.where(twice, total, value_of(second))
    group = tl.arange(0, GROUPS_P)
    scores = tl.where(group[None, :] < NUM_GROUPS, ordered(total), -(2**31))
    mine, other = scores[:, :, None], scores[:, None, :]
    before = (other > mine) | ((other == mine) & (group[None, None, :] < group[None, :, None]))
    rank = tl.sum(before.to(tl.int32), 2)  # [T, GROUPS_P]
    return tl.reshape(tl.broadcast_to(rank[:, :, None] >= TOPK_GROUPS, [T, GROUPS_P, SIZE_P]), [T, GROUPS_P * SIZE_P])


@triton.jit
def topk_gate_kernel(
    logits_ptr, bias_ptr, idx_ptr, weights_ptr, row_stride, split_stride, scale, NUM_SPLITS: tl.constexpr, TOP_K: tl.constexpr,
    TOP_K_P: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, NUM_BEST: tl.constexpr, SIZE: tl.constexpr,
    SIZE_P: tl.constexpr, GROUPS_P: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr,
    EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A token's gate. Logits are the sum of NUM_SPLITS planes; columns are padded to GROUPS_P groups of SIZE_P, both powers of two."""
    column = tl.arange(0, GROUPS_P * SIZE_P)[None, :]
    group, member = column // SIZE_P, column % SIZE_P
    expert = group * SIZE + member
    valid = (group < NUM_GROUPS) & (member < SIZE)
    token = tl.program_id(0).to(tl.int64)
    biases = tl.load(bias_ptr + expert, mask=valid, other=0.0) if HAS_BIAS else 0.0
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = logits_ptr + token * row_stride + expert
    logits = tl.load(source, mask=valid, other=0.0)
    for split in tl.static_range(1, NUM_SPLITS):
        logits += tl.load(source + split * split_stride, mask=valid, other=0.0)
    scores = _scores(tl.where(valid, logits, -float("inf")), SOFTMAX, EXACT)
    keys = tl.where(valid, ordered(scores + biases), -(2**31))  # below -inf, which is what an expert of a dropped group gets
    if TOPK_GROUPS < NUM_GROUPS:
        dropped = _dropped(keys, SIZE_P, NUM_GROUPS, TOPK_GROUPS, NUM_BEST)
        keys = tl.where(dropped & valid, _MINUS_INF, keys)
    slot = tl.arange(0, TOP_K_P)[None, :]
    chosen = tl.zeros([1, TOP_K_P], tl.int32)
    # A selection sort that stops after TOP_K: bitonic top-k of packed (score, index) keys takes 1.6 times the instructions
    for place in tl.static_range(TOP_K):
        best = tl.max(keys, 1, keep_dims=True)
        winner = tl.min(tl.where(keys == best, expert, 0x7FFFFFFF), 1, keep_dims=True)
        chosen = tl.where(slot == place, winner, chosen)
        keys = tl.where(expert == winner, -(2**31), keys)
    weights = tl.where(slot < TOP_K, tl.gather(scores, chosen // SIZE * SIZE_P + chosen % SIZE, 1), 0.0)
    if NORMALIZE:
        weights = tl.math.div_rn(weights, tl.broadcast_to(tl.sum(weights, 1, keep_dims=True) + 1e-20, weights.shape))
    tl.store(idx_ptr + token * TOP_K + slot, chosen.to(tl.int64), mask=slot < TOP_K)
    tl.store(weights_ptr + token * TOP_K + slot, weights * scale, mask=slot < TOP_K)


@triton.jit
def _ask_for_weights(w_ptr, column, num_experts, w_stride, first, SIZE: tl.constexpr):
    """Ask L2 for SIZE elements of each of the tile's rows of w: they do not depend on the kernel before this one."""
    row = tl.minimum(column, num_experts - 1).to(tl.int64)
    address = (w_ptr + row * w_stride + first).to(tl.int64)
    size = (column * 0 + SIZE * 2).to(tl.int32)
    request: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(request, "=r,l,r", [address, size], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def partial_logits_kernel(
    x_ptr, w_ptr, out_ptr, num_tokens, num_experts, hidden, x_stride, w_stride, split_stride, K_PER_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One tile of one split's plane: x @ w.T over K_PER_SPLIT of the hidden dimension, in fp32."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        if AHEAD:
            _ask_for_weights(w_ptr, column, num_experts, w_stride, split * K_PER_SPLIT, K_PER_SPLIT)
        gdc_wait()
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
def add_splits_kernel(partial_ptr, out_ptr, size, NUM_SPLITS: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.load(partial_ptr + place, mask=place < size, other=0.0)
    for split in tl.static_range(1, NUM_SPLITS):
        total += tl.load(partial_ptr + split * size + place, mask=place < size, other=0.0)
    tl.store(out_ptr + place, total, mask=place < size)
