"""The sampler's second kernel: one program a row merges what the scan left, and settles the filters of rows that have any.

A filter keeps a head of the tokens in key order (value, then lower id). So no cut need be found: the best of all scores is a token c,
and it is kept if few enough tokens, or little enough mass, lie before c; if it is not, neither is any token after c, and the next one to
ask is the best score among those before c. The first answer is mostly yes.

This is asked of candidates only: the tokens of the blocks with the largest maxima, above a bound that leaves out none that can be kept
(the k-th largest of the block maxima is a lower bound of the k-th largest token; min-p gives one itself; for top-p the mass above it must
suffice). Where they are too many, or the mass of a flat distribution is spread too far, `_triton_passes.py` asks it of the whole row.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.sample import GREEDY_BELOW
from kernels.sample._triton_candidates import NO_BOUND, gather_candidates, settle_among_candidates
from kernels.sample._triton_noise import is_near
from kernels.sample._triton_order import ordered
from kernels.sample._triton_passes import BY_CUT, BY_NOISE, BY_SCAN

_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_TOP_P_BLOCKS = tl.constexpr(128)  # blocks looked at for top-p alone: a model's distribution mostly has its mass there
_LOWEST = tl.constexpr(-(2**63))
_MASKED_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def finish_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, choice_ptr, position_ptr, active_ptr,
    best_ptr, id_ptr, second_ptr, max_ptr, sum_ptr, raw_max_ptr, raw_sum_ptr, block_max_ptr, blocks_ptr, candidates_ptr, token_ptr,
    logprob_ptr, pending_ptr, floor_ptr, numbers_ptr, vocab, row_stride,
    NUM_TILES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, LOGPROBS: tl.constexpr,
    HAS_ACTIVE: tl.constexpr, ON_GPU: tl.constexpr, NUM_TILES_P: tl.constexpr, NUM_BLOCKS_P: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Writes the row's token, or else what is pending and what `passes_kernel` must know for it."""
    if ON_GPU:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    token, logprob, pending = tl.full([], -1, tl.int32), float("nan"), 0
    active = (tl.load(active_ptr + row) != 0) if HAS_ACTIVE else True
    if active:
        temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        seed, choice, position = tl.load(seed_ptr + row), tl.load(choice_ptr + row), tl.load(position_ptr + row)
        tile = tl.arange(0, NUM_TILES_P)
        place, valid = row * NUM_TILES + tile, tile < NUM_TILES
        sampled = not (temperature < _GREEDY_BELOW)
        limited = (top_k > 0) & (top_k < vocab)
        filtered = sampled & (limited | (top_p < 1.0) | (min_p > 0.0))
        best, second = -float("inf"), -float("inf")
        largest, total = 0.0, 1.0
        floor = tl.full([], _LOWEST, tl.int64)
        if filtered:
            tile_max = tl.load(max_ptr + place, mask=valid, other=-float("inf"))
            largest = tl.max(tile_max)
            if top_p < 1.0:
                total = tl.sum(tl.load(sum_ptr + place, mask=valid, other=0.0) * tl.exp(tile_max - largest))
            bound = tl.full([], NO_BOUND, tl.int32)
            if min_p > 0.0:
                bound = ordered(largest + tl.log(min_p.to(tl.float64)).to(tl.float32))
                floor = (bound.to(tl.int64) << 32) - 1
            given = bound
            if limited & (top_p < 1.0):  # min-p comes last: what it drops still has its share of the mass
                given = tl.full([], NO_BOUND, tl.int32)
            k = tl.where(limited, top_k, vocab + 1)
            FEW: tl.constexpr = min(MAX_CANDIDATES, 512)  # mostly enough, and so much less to go through
            num_blocks = NUM_TILES * (TILE // BLOCK)
            scratch = candidates_ptr + row * MAX_CANDIDATES
            guess = tl.where(limited, top_k, tl.where(top_p < 1.0, _TOP_P_BLOCKS, vocab))
            num_candidates, reached = gather_candidates(
                row_ptr, block_max_ptr + row * num_blocks, blocks_ptr + row * num_blocks, scratch, guess, given, vocab, temperature,
                num_blocks, NUM_BLOCKS_P, BLOCK, MAX_CANDIDATES,
            )  # fmt: skip
            # All that min-p keeps, or all there is, is enough whatever its mass
            needed = tl.where((reached > given) & (not limited) & (top_p < 1.0), top_p * total, 0.0)
            if num_candidates <= FEW:
                token = settle_among_candidates(
                    scratch, num_candidates, k, floor, top_p, total, needed, largest, seed, choice, position, FEW, ON_GPU
                )
            elif num_candidates <= MAX_CANDIDATES:
                token = settle_among_candidates(
                    scratch, num_candidates, k, floor, top_p, total, needed, largest, seed, choice, position, MAX_CANDIDATES, ON_GPU
                )
            if token < 0:
                pending = BY_NOISE
                if limited:
                    pending = BY_CUT
        else:
            tile_best = tl.load(best_ptr + place, mask=valid, other=-float("inf"))
            tile_id = tl.load(id_ptr + place, mask=valid, other=_MASKED_ID)
            best = tl.max(tile_best)
            token = tl.min(tl.where(tile_best == best, tile_id, _MASKED_ID))
            token = tl.where(token == _MASKED_ID, 0, token)  # nothing but NaN
            if sampled:
                tile_second = tl.load(second_ptr + place, mask=valid, other=-float("inf"))
                second = tl.max(tl.where(tile_id == token, tile_second, tile_best))
                if is_near(best, second):
                    pending = BY_SCAN
        lse = 0.0
        if LOGPROBS:
            tile_max = tl.load(raw_max_ptr + place, mask=valid, other=-float("inf"))
            raw_largest = tl.max(tile_max)
            lse = raw_largest + tl.log(tl.sum(tl.load(raw_sum_ptr + place, mask=valid, other=0.0) * tl.exp(tile_max - raw_largest)))
            logprob = tl.load(row_ptr + tl.maximum(token, 0)).to(tl.float32) - lse
        if pending > 0:
            tl.store(floor_ptr + row, floor)
            tl.store(numbers_ptr + row * 4, best)
            tl.store(numbers_ptr + row * 4 + 1, largest)
            tl.store(numbers_ptr + row * 4 + 2, total)
            tl.store(numbers_ptr + row * 4 + 3, lse)
    tl.store(pending_ptr + row, pending)
    tl.store(token_ptr + row, token.to(tl.int64))
    if LOGPROBS:
        tl.store(logprob_ptr + row, logprob)
