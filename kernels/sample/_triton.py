"""The sampler's first kernel: every tile of every row once, at memory speed; `_triton_finish.py` makes tokens of what it leaves.

Noise is computed fast here, with a bounded error: each tile leaves its best score, that token and its second best score. Where the row's
two best lie nearer than the error, the second kernel repeats the few tiles in question with exact noise, so that the error never shows.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from kernels.backend import interpreting
from kernels.sample import GREEDY_BELOW, Sampled, SampleRows
from kernels.sample._triton_finish import finish_kernel
from kernels.sample._triton_noise import fast_best_of, fast_noise, sum_exp, tile_bits
from kernels.sample._triton_passes import passes_kernel

_BLOCK = 64  # ids whose largest logit is kept for top-k
MAX_CANDIDATES = 2048
FINISH_WARPS = 8
FINISH_REGISTERS: int | None = 128  # two programs an SM
PASS_WARPS = 16
TILES_A_PASS = 2
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)


@triton.jit
def _scan_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, choice_ptr, position_ptr, active_ptr,
    best_ptr, id_ptr, second_ptr, max_ptr, sum_ptr, raw_max_ptr, raw_sum_ptr, block_max_ptr, vocab, row_stride, NUM_TILES: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, LOGPROBS: tl.constexpr, HAS_ACTIVE: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """best, id of rows without filters, second too if they sample; max, block_max of rows with filters, sum too if they have top-p."""
    if ON_GPU:
        gdc_launch_dependents()
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    active = (tl.load(active_ptr + row) != 0) if HAS_ACTIVE else True
    if active:
        temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        ids = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
        place = row * NUM_TILES + tile
        if LOGPROBS:
            raw_max = tl.max(x)
            tl.store(raw_max_ptr + place, raw_max)
            tl.store(raw_sum_ptr + place, sum_exp(x, raw_max))
        if temperature < _GREEDY_BELOW:
            best = tl.max(x)
            tl.store(best_ptr + place, best)
            tl.store(id_ptr + place, tl.min(tl.where(x == best, ids, 0x7FFFFFFF)))
        elif ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (tl.load(min_p_ptr + row) > 0.0):
            block_max = tl.max(tl.reshape(tl.where(x != x, float("inf"), x), [TILE // BLOCK, BLOCK]), 1)
            largest = tl.max(block_max)
            block_max = tl.math.div_rn(block_max, tl.zeros_like(block_max) + temperature)  # as good as the largest of the quotients
            tl.store(block_max_ptr + place * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK), block_max)
            tl.store(max_ptr + place, tl.math.div_rn(largest, temperature))
            if top_p < 1.0:
                base = tl.where(largest == -float("inf"), 0.0, largest)
                tl.store(sum_ptr + place, tl.sum(tl.exp2((x - base) * (1.4426950408889634 / temperature))))
        else:
            bits = tile_bits(tl.load(seed_ptr + row), tl.load(choice_ptr + row), tl.load(position_ptr + row), tile * TILE, TILE)
            scores = x * (1.4426950408889634 / temperature) + fast_noise(bits, ON_GPU)
            best, best_id, second = fast_best_of(scores, ids, ON_GPU)
            tl.store(best_ptr + place, best)
            tl.store(id_ptr + place, best_id)
            tl.store(second_ptr + place, second)


def choose_tile(vocab: int) -> int:
    return min(2048, max(_BLOCK, triton.next_power_of_2(vocab)))


def sample_triton(logits: torch.Tensor, rows: SampleRows, logprobs: bool, tile: int | None = None, num_warps: int = 2) -> Sampled:
    num_rows, vocab = logits.shape
    tile = tile or choose_tile(vocab)
    num_tiles, on_gpu = triton.cdiv(vocab, tile), not interpreting()
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    chosen = torch.empty(num_rows, dtype=torch.float32, device=logits.device) if logprobs else None
    if num_rows == 0:
        return Sampled(token_ids, chosen)
    num_blocks = num_tiles * tile // _BLOCK
    dtypes = (torch.float32, torch.int32, *[torch.float32] * 5)
    partials = [torch.empty((num_rows, num_tiles), dtype=dtype, device=logits.device) for dtype in dtypes]
    block_max = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    blocks = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    max_candidates = min(MAX_CANDIDATES, triton.next_power_of_2(num_blocks * _BLOCK))
    candidates = torch.empty((num_rows, max_candidates), dtype=torch.int64, device=logits.device)
    columns = [*rows[:7], None if rows.active is None else rows.active.view(torch.uint8)]
    sizes = {"NUM_TILES": num_tiles, "TILE": tile, "BLOCK": _BLOCK}
    sizes |= {"LOGPROBS": logprobs, "HAS_ACTIVE": rows.active is not None, "ON_GPU": on_gpu}
    grid = (num_tiles, num_rows)
    _scan_kernel[grid](logits, *columns, *partials, block_max, vocab, logits.stride(0), **sizes, num_warps=num_warps)
    pending = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    floor = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    numbers = torch.empty((num_rows, 4), dtype=torch.float32, device=logits.device)
    left = [token_ids, chosen, pending, floor, numbers, vocab, logits.stride(0)]
    launch = {"launch_pdl": True} if on_gpu else {}
    finish_kernel[(num_rows,)](
        logits, *columns, *partials, block_max, blocks, candidates, *left, **sizes, NUM_TILES_P=triton.next_power_of_2(num_tiles),
        NUM_BLOCKS_P=triton.next_power_of_2(num_blocks), MAX_CANDIDATES=max_candidates, num_warps=FINISH_WARPS,
        maxnreg=FINISH_REGISTERS, **launch,
    )  # fmt: skip
    passes_kernel[(num_rows,)](
        logits, *columns[:3], *columns[4:7], partials[0], partials[3], *left, NUM_TILES=num_tiles, TILE=tile, TILES=TILES_A_PASS,
        LOGPROBS=logprobs, ON_GPU=on_gpu, num_warps=PASS_WARPS, **launch,
    )  # fmt: skip
    return Sampled(token_ids, chosen)
