"""The sampler's second kernel: one program a row merges what the scan left, and settles the filters of rows that have any.

A filter keeps a head of the tokens in key order (value, then lower id). So no cut need be found for top-p: the best of all scores is a
token c, and it is kept if the mass before c is small enough; if it is not, neither is any token after c, and the next one to ask is the
best score among those before c. Each question is a pass over the tiles that hold a value above c; the first answer is mostly yes.

top-k needs its cut, for top-p asks for the mass that it leaves. The k-th largest of the block maxima is a lower bound of the cut; tokens
above it, few more than k, are gathered and bisected there. Too many of them (k beyond a thousand, or a row of equal logits) are bisected
over the whole row: right, but slow.
"""

import triton
import triton.language as tl

from kernels.sample import GREEDY_BELOW
from kernels.sample._triton_noise import best_of, exact_gumbel, fast_gumbel, id_uniform, is_near, ordered, tile_uniform, value_of

_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_LOWEST = tl.constexpr(-(2**63))
_MASKED_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _keys_of(values, ids):
    """Distinct int64 keys: larger for a higher value and, of equal ones, for the lower id."""
    return (ordered(values).to(tl.int64) << 32) | (ids ^ _MASKED_ID)


@triton.jit
def _id_of(keys):
    return (keys & _MASKED_ID).to(tl.int32) ^ _MASKED_ID


@triton.jit
def _scaled(row_ptr, ids, vocab, temperature):
    x = tl.load(row_ptr + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    return tl.math.div_rn(x, tl.zeros_like(x) + temperature)


@triton.jit
def _count_and_mass(row_ptr, tile_max_ptr, pivot, largest, vocab, temperature, NUM_TILES: tl.constexpr, TILE: tl.constexpr):
    """Of the tokens with keys above `pivot`: how many, and the sum of exp(value - largest)."""
    counts, masses = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.float32)
    pivot_value = value_of((pivot >> 32).to(tl.int32))
    for tile in range(NUM_TILES):
        if not (tl.load(tile_max_ptr + tile) < pivot_value):
            ids = tile * TILE + tl.arange(0, TILE)
            values = _scaled(row_ptr, ids, vocab, temperature)
            above = (_keys_of(values, ids) > pivot) & (ids < vocab)
            counts += above.to(tl.int32)
            masses += tl.where(above, tl.exp(values - largest), 0.0)
    return tl.sum(counts), tl.sum(masses)


@triton.jit
def _best_by_fast_noise(
    row_ptr, floor, seed, choice, position, vocab, temperature, NUM_TILES: tl.constexpr, TILE: tl.constexpr, ON_GPU: tl.constexpr
):
    """(best score, its id, second best score) of the tokens with keys above `floor`."""
    best, best_id, second = -float("inf"), _MASKED_ID, -float("inf")
    for tile in range(NUM_TILES):
        ids = tile * TILE + tl.arange(0, TILE)
        values = _scaled(row_ptr, ids, vocab, temperature)
        alive = (_keys_of(values, ids) > floor) & (ids < vocab)
        if tl.max(alive.to(tl.int32)) > 0:
            scores = values + fast_gumbel(tile_uniform(seed, choice, position, tile * TILE, TILE), ON_GPU)
            tile_best, tile_id, tile_second = best_of(tl.where(alive, scores, -float("inf")), tl.where(alive, ids, _MASKED_ID))
            second = tl.maximum(tl.maximum(second, tile_second), tl.minimum(best, tile_best))
            best_id = tl.where((tile_best > best) | (best_id == _MASKED_ID), tile_id, best_id)
            best = tl.maximum(best, tile_best)
    return best, best_id, second


@triton.jit
def _best_by_exact_noise(
    row_ptr, tile_best_ptr, least, floor, seed, choice, position, vocab, temperature,
    NUM_TILES: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Id of the best token with a key above `floor`; tiles whose fast best score is below `least` are left out."""
    best, best_id = -float("inf"), _MASKED_ID
    for part in range(NUM_TILES * TILE // PART):
        if not (tl.load(tile_best_ptr + part * PART // TILE) < least):
            ids = part * PART + tl.arange(0, PART)
            values = _scaled(row_ptr, ids, vocab, temperature)
            alive = (_keys_of(values, ids) > floor) & (ids < vocab)
            scores = values + exact_gumbel(tile_uniform(seed, choice, position, part * PART, PART))
            part_best, part_id, _ = best_of(tl.where(alive, scores, -float("inf")), tl.where(alive, ids, _MASKED_ID))
            best_id = tl.where((part_best > best) | (best_id == _MASKED_ID), part_id, best_id)
            best = tl.maximum(best, part_best)
    return best_id


@triton.jit
def _settle_by_passes(
    row_ptr, tile_best_ptr, tile_max_ptr, best, best_id, second, floor, top_p, total, largest, seed, choice, position, vocab, temperature,
    NUM_TILES: tl.constexpr, TILE: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """The best token with a key above `floor` that top-p keeps; best_id < 0: no best score is known yet."""
    PART: tl.constexpr = TILE if TILE < 1024 else 1024
    token, settled = best_id, False
    known = best_id >= 0
    while not settled:
        if not known:
            best, token, second = _best_by_fast_noise(row_ptr, floor, seed, choice, position, vocab, temperature, NUM_TILES, TILE, ON_GPU)
        if is_near(best, second):
            # Only while the tiles' best scores are those of the scan do they say which tiles matter
            least = tl.where(known, best - (1e-4 + 1e-6 * tl.abs(best)), -float("inf"))
            token = _best_by_exact_noise(
                row_ptr, tile_best_ptr, least, floor, seed, choice, position, vocab, temperature, NUM_TILES, TILE, PART
            )
        value = tl.load(row_ptr + token).to(tl.float32)
        key = _keys_of(tl.math.div_rn(value, temperature), token)
        settled = key > floor
        if settled & (top_p < 1.0):
            count, mass = _count_and_mass(row_ptr, tile_max_ptr, key, largest, vocab, temperature, NUM_TILES, TILE)
            settled = (count == 0) | (not (mass >= top_p * total))
            if not settled:
                floor = key
        known = False
    return token


@triton.jit
def _kth_key_by_passes(row_ptr, tile_max_ptr, k, largest, vocab, temperature, NUM_TILES: tl.constexpr, TILE: tl.constexpr):
    """The k-th largest key of the row, less 1; and the mass above that."""
    low, high = tl.full([], _LOWEST, tl.int64), (ordered(largest).to(tl.int64) + 1) << 32
    count, mass = 0, 0.0
    while (high > low + 1) & (count != k):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        count, mass = _count_and_mass(row_ptr, tile_max_ptr, middle, largest, vocab, temperature, NUM_TILES, TILE)
        if count >= k:
            low = middle
        else:
            high = middle
    count, mass = _count_and_mass(row_ptr, tile_max_ptr, low, largest, vocab, temperature, NUM_TILES, TILE)
    return low, mass


@triton.jit
def _gather_candidates(
    row_ptr, block_max_ptr, blocks_ptr, candidates_ptr, k, vocab, temperature, num_blocks,
    NUM_BLOCKS_P: tl.constexpr, BLOCK: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Writes the keys of all tokens that may be among the k best, and returns how many there are: none is written beyond the buffer."""
    index = tl.arange(0, NUM_BLOCKS_P)
    valid = index < num_blocks
    block_max = tl.where(valid, ordered(tl.load(block_max_ptr + index, mask=valid, other=0.0)).to(tl.int64), -(2**32))
    low, high, count = tl.full([], -(2**31), tl.int64), tl.max(block_max) + 1, 0
    while (high > low + 1) & (count != k):
        middle = (low + high) >> 1
        count = tl.sum((block_max >= middle).to(tl.int32))
        if count >= k:
            low = middle
        else:
            high = middle
    chosen = block_max >= low
    num_chosen = tl.sum(chosen.to(tl.int32))
    tl.store(blocks_ptr + tl.cumsum(chosen.to(tl.int32)) - 1, index, mask=chosen)
    tl.debug_barrier()
    num_candidates = 0
    STEP: tl.constexpr = 2048 // BLOCK
    for first in range(0, num_chosen, STEP):
        slot = first + tl.arange(0, STEP)
        block = tl.load(blocks_ptr + slot, mask=slot < num_chosen, other=-1)
        ids = tl.reshape(tl.where(block < 0, vocab, block * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :], [STEP * BLOCK])
        values = _scaled(row_ptr, ids, vocab, temperature)
        candidate = (ids < vocab) & (ordered(values) >= low)
        at = num_candidates + tl.cumsum(candidate.to(tl.int32)) - 1
        tl.store(candidates_ptr + at, _keys_of(values, ids), mask=candidate & (at < MAX_CANDIDATES))
        num_candidates += tl.sum(candidate.to(tl.int32))
    tl.debug_barrier()
    return num_candidates


@triton.jit
def _settle_among_candidates(
    candidates_ptr, num_candidates, k, floor, top_p, largest, seed, choice, position, MAX_CANDIDATES: tl.constexpr, ON_GPU: tl.constexpr
):
    """The best token of the k best candidates with keys above `floor` that top-p keeps."""
    index = tl.arange(0, MAX_CANDIDATES)
    keys = tl.load(candidates_ptr + index, mask=index < num_candidates, other=_LOWEST)
    low, high, count = tl.min(tl.where(index < num_candidates, keys, 0x7FFFFFFFFFFFFFFF)) - 1, tl.max(keys), num_candidates
    while (high > low + 1) & (count != k):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        count = tl.sum((keys > middle).to(tl.int32))
        if count >= k:
            low = middle
        else:
            high = middle
    values, ids = value_of((keys >> 32).to(tl.int32)), _id_of(keys)
    masses = tl.where(keys > low, tl.exp(values - largest), 0.0)
    total = tl.sum(masses)
    floor = tl.maximum(floor, low)
    u = id_uniform(seed, choice, position, ids)
    scores = values + fast_gumbel(u, ON_GPU)
    token, settled = 0, False
    while not settled:
        alive = keys > floor
        best, token, second = best_of(tl.where(alive, scores, -float("inf")), tl.where(alive, ids, _MASKED_ID))
        if is_near(best, second):
            exact = tl.where(alive, values + exact_gumbel(u), -float("inf"))
            best, token, second = best_of(exact, tl.where(alive, ids, _MASKED_ID))
        key = tl.max(tl.where(ids == token, keys, _LOWEST))
        above = keys > key
        mass = tl.sum(tl.where(above, masses, 0.0))
        settled = (top_p >= 1.0) | (tl.sum(above.to(tl.int32)) == 0) | (not (mass >= top_p * total))
        if not settled:
            floor = key
    return token


@triton.jit
def finish_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, choice_ptr, position_ptr, active_ptr,
    best_ptr, id_ptr, second_ptr, max_ptr, sum_ptr, raw_max_ptr, raw_sum_ptr, block_max_ptr, blocks_ptr, candidates_ptr, token_ptr,
    logprob_ptr, vocab, row_stride, NUM_TILES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, LOGPROBS: tl.constexpr,
    HAS_ACTIVE: tl.constexpr, ON_GPU: tl.constexpr, NUM_TILES_P: tl.constexpr, NUM_BLOCKS_P: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    token, logprob = tl.full([], -1, tl.int32), float("nan")
    active = (tl.load(active_ptr + row) != 0) if HAS_ACTIVE else True
    if active:
        temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        seed, choice, position = tl.load(seed_ptr + row), tl.load(choice_ptr + row), tl.load(position_ptr + row)
        tile = tl.arange(0, NUM_TILES_P)
        place, valid = row * NUM_TILES + tile, tile < NUM_TILES
        sampled = not (temperature < _GREEDY_BELOW)
        limited = sampled & (top_k > 0) & (top_k < vocab)
        filtered = sampled & ((top_p < 1.0) | (min_p > 0.0))
        best, second = -float("inf"), -float("inf")
        largest, total = 0.0, 1.0
        floor = tl.full([], _LOWEST, tl.int64)
        if not limited:
            tile_best = tl.load(best_ptr + place, mask=valid, other=-float("inf"))
            tile_id = tl.load(id_ptr + place, mask=valid, other=_MASKED_ID)
            best = tl.max(tile_best)
            token = tl.min(tl.where(tile_best == best, tile_id, _MASKED_ID))
            if sampled:
                tile_second = tl.load(second_ptr + place, mask=valid, other=-float("inf"))
                second = tl.max(tl.where(tile_id == token, tile_second, tile_best))
        if limited | filtered:
            tile_max = tl.load(max_ptr + place, mask=valid, other=-float("inf"))
            largest = tl.max(tile_max)
            if min_p > 0.0:
                bound = largest + tl.log(min_p.to(tl.float64)).to(tl.float32)
                floor = (ordered(bound).to(tl.int64) << 32) - 1
            if not limited:
                total = tl.sum(tl.load(sum_ptr + place, mask=valid, other=0.0) * tl.exp(tile_max - largest))
        passes = sampled & (not limited) & (filtered | is_near(best, second))
        if limited:
            num_blocks = NUM_TILES * (TILE // BLOCK)
            scratch = candidates_ptr + row * MAX_CANDIDATES
            num_candidates = _gather_candidates(
                row_ptr, block_max_ptr + row * num_blocks, blocks_ptr + row * num_blocks, scratch, top_k, vocab, temperature, num_blocks,
                NUM_BLOCKS_P, BLOCK, MAX_CANDIDATES,
            )  # fmt: skip
            if num_candidates <= MAX_CANDIDATES:
                token = _settle_among_candidates(
                    scratch, num_candidates, top_k, floor, top_p, largest, seed, choice, position, MAX_CANDIDATES, ON_GPU
                )
            else:
                cut, total = _kth_key_by_passes(row_ptr, max_ptr + row * NUM_TILES, top_k, largest, vocab, temperature, NUM_TILES, TILE)
                floor = tl.maximum(floor, cut)
                passes = True
        if passes:
            token = _settle_by_passes(
                row_ptr, best_ptr + row * NUM_TILES, max_ptr + row * NUM_TILES, best, token, second, floor, top_p, total, largest,
                seed, choice, position, vocab, temperature, NUM_TILES, TILE, ON_GPU,
            )  # fmt: skip
        if LOGPROBS:
            tile_max = tl.load(raw_max_ptr + place, mask=valid, other=-float("inf"))
            largest = tl.max(tile_max)
            total = tl.sum(tl.load(raw_sum_ptr + place, mask=valid, other=0.0) * tl.exp(tile_max - largest))
            logprob = tl.load(row_ptr + token).to(tl.float32) - largest - tl.log(total)
    tl.store(token_ptr + row, token.to(tl.int64))
    if LOGPROBS:
        tl.store(logprob_ptr + row, logprob)
