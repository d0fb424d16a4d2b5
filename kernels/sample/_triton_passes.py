"""The sampler's third kernel: passes of one large program over its whole row, for the few rows that the second left pending."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kernels.sample._triton_noise import best_of, exact_gumbel, fast_scores, is_near, tile_bits
from kernels.sample._triton_order import keys_of, ordered

_MASKED_ID = tl.constexpr(0x7FFFFFFF)
BY_SCAN = tl.constexpr(1)
"""Why a row is pending: the scan's two best scores are near, among tiles whose best scores are known."""
BY_NOISE = tl.constexpr(2)
"""Candidates are too many, or hold too little mass: all tokens above the floor are asked for noise."""
BY_CUT = tl.constexpr(3)
"""So too, and top-k's cut is not known yet."""


@triton.jit
def load_values(row_ptr, ids, vocab):
    return tl.load(row_ptr + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)


@triton.jit
def divided(x, temperature):
    return tl.math.div_rn(x, tl.zeros_like(x) + temperature)


@triton.jit
def _above(values, ids, pivot):
    """keys_of(values, ids) > pivot for any int64 pivot, in 32 bits: no key has bit 31 set, which therefore is above all ids."""
    upper, lower = (pivot >> 32).to(tl.int32), pivot & 0xFFFFFFFF
    end = tl.where(lower > _MASKED_ID, 0, lower ^ _MASKED_ID).to(tl.int32)
    bits = ordered(values)
    return (bits > upper) | ((bits == upper) & (ids < end))


@triton.jit
def _has_above(tile_max_ptr, part, pivot, NUM_TILES: tl.constexpr, TILES: tl.constexpr):
    """Whether any of the part's TILES tiles reaches the pivot's value."""
    tile = part * TILES + tl.arange(0, TILES)
    largest = tl.load(tile_max_ptr + tile, mask=tile < NUM_TILES, other=-float("inf"))
    return tl.max(ordered(largest)) >= (pivot >> 32).to(tl.int32)


@triton.jit
def _count_and_mass(
    row_ptr, tile_max_ptr, pivot, largest, vocab, temperature, NUM_TILES: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr
):
    """Of the tokens with keys above `pivot`: how many, and the sum of exp(value - largest)."""
    PART: tl.constexpr = TILE * TILES
    counts, masses = tl.zeros([PART], tl.int32), tl.zeros([PART], tl.float32)
    ids = tl.arange(0, PART)
    following = load_values(row_ptr, ids, vocab)
    for part in range(tl.cdiv(NUM_TILES, TILES)):
        x = following
        following = load_values(row_ptr, ids + PART, vocab)  # on its way while this part is counted
        if _has_above(tile_max_ptr, part, pivot, NUM_TILES, TILES):
            values = divided(x, temperature)
            above = _above(values, ids, pivot) & (ids < vocab)
            counts += above.to(tl.int32)
            masses += tl.where(above, tl.exp(values - largest), 0.0)
        ids += PART
    return tl.sum(counts), tl.sum(masses)


@triton.jit
def _best_by_fast_noise(
    row_ptr, tile_max_ptr, floor, seed, choice, position, vocab, temperature,
    NUM_TILES: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """(best score, its id, second best score) of the tokens with keys above `floor`."""
    PART: tl.constexpr = TILE * TILES
    best, second = tl.full([PART], -float("inf"), tl.float32), tl.full([PART], -float("inf"), tl.float32)
    best_ids = tl.full([PART], _MASKED_ID, tl.int32)
    ids = tl.arange(0, PART)
    following = load_values(row_ptr, ids, vocab)
    for part in range(tl.cdiv(NUM_TILES, TILES)):
        x = following
        following = load_values(row_ptr, ids + PART, vocab)
        if _has_above(tile_max_ptr, part, floor, NUM_TILES, TILES):
            values = divided(x, temperature)
            alive = _above(values, ids, floor) & (ids < vocab)
            scores = fast_scores(values, tile_bits(seed, choice, position, part * PART, PART), ON_GPU)
            scores = tl.where(alive, scores, -float("inf"))
            best_ids = tl.where(alive & ((scores > best) | (best_ids == _MASKED_ID)), ids, best_ids)
            second = tl.maximum(second, tl.minimum(best, scores))
            best = tl.maximum(best, scores)
        ids += PART
    row_best, token, row_second = best_of(best, best_ids)
    return row_best, token, tl.maximum(row_second, tl.max(tl.where(best_ids == token, second, -float("inf"))))


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
            values = divided(load_values(row_ptr, ids, vocab), temperature)
            alive = _above(values, ids, floor) & (ids < vocab)
            scores = values + exact_gumbel(tile_bits(seed, choice, position, part * PART, PART))
            part_best, part_id, _ = best_of(tl.where(alive, scores, -float("inf")), tl.where(alive, ids, _MASKED_ID))
            best_id = tl.where((part_best > best) | (best_id == _MASKED_ID), part_id, best_id)
            best = tl.maximum(best, part_best)
    return best_id


@triton.jit
def _settle(
    row_ptr, tile_best_ptr, tile_max_ptr, best, known, floor, top_p, total, largest, seed, choice, position, vocab, temperature,
    NUM_TILES: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """The best token with a key above `floor` that top-p keeps; known: the scan's best score, near another, is `best`."""
    PART: tl.constexpr = TILE if TILE < 1024 else 1024
    token, settled, second = tl.full([], -1, tl.int32), False, best
    while not settled:
        if not known:
            best, token, second = _best_by_fast_noise(
                row_ptr, tile_max_ptr, floor, seed, choice, position, vocab, temperature, NUM_TILES, TILE, TILES, ON_GPU
            )
        if is_near(best, second):
            # Only while the tiles' best scores are those of the scan do they say which tiles matter
            least = tl.where(known, best - (1.5e-4 + 1e-6 * tl.abs(best)), -float("inf"))
            token = _best_by_exact_noise(
                row_ptr, tile_best_ptr, least, floor, seed, choice, position, vocab, temperature, NUM_TILES, TILE, PART
            )
        token = tl.where(token == _MASKED_ID, 0, token)  # nothing is alive: a row of NaN
        key = keys_of(tl.math.div_rn(tl.load(row_ptr + token).to(tl.float32), temperature), token)
        over = False
        if (top_p < 1.0) & (key > floor):  # each round raises the floor, or is the last
            count, mass = _count_and_mass(row_ptr, tile_max_ptr, key, largest, vocab, temperature, NUM_TILES, TILE, TILES)
            over = (count > 0) & (mass >= top_p * total)
        if over:
            floor = key
        settled = not over
        known = False
    return token


@triton.jit
def _kth_key(row_ptr, tile_max_ptr, k, largest, vocab, temperature, NUM_TILES: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    """The k-th largest key of the row, less 1; and the mass above that."""
    lowest = (ordered(tl.full([], -float("inf"), tl.float32)).to(tl.int64) << 32) - 1
    low, high = lowest, (ordered(largest).to(tl.int64) + 1) << 32
    count, mass = 0, 0.0
    while (high > low + 1) & (count != k):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        count, mass = _count_and_mass(row_ptr, tile_max_ptr, middle, largest, vocab, temperature, NUM_TILES, TILE, TILES)
        if count >= k:
            low = middle
        else:
            high = middle
    count, mass = _count_and_mass(row_ptr, tile_max_ptr, low, largest, vocab, temperature, NUM_TILES, TILE, TILES)
    return low, mass


@triton.jit
def passes_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, seed_ptr, choice_ptr, position_ptr, best_ptr, max_ptr, token_ptr, logprob_ptr,
    pending_ptr, floor_ptr, numbers_ptr, vocab, row_stride,
    NUM_TILES: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, LOGPROBS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    if ON_GPU:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    pending = tl.load(pending_ptr + row)
    if pending > 0:
        row_ptr, tile_max_ptr = logits_ptr + row * row_stride, max_ptr + row * NUM_TILES
        temperature, top_p, floor = tl.load(temperature_ptr + row), tl.load(top_p_ptr + row), tl.load(floor_ptr + row)
        best, largest, total = tl.load(numbers_ptr + row * 4), tl.load(numbers_ptr + row * 4 + 1), tl.load(numbers_ptr + row * 4 + 2)
        if pending == BY_CUT:
            cut, total = _kth_key(row_ptr, tile_max_ptr, tl.load(top_k_ptr + row), largest, vocab, temperature, NUM_TILES, TILE, TILES)
            floor = tl.maximum(floor, cut)
        token = _settle(
            row_ptr, best_ptr + row * NUM_TILES, tile_max_ptr, best, pending == BY_SCAN, floor, top_p, total, largest,
            tl.load(seed_ptr + row), tl.load(choice_ptr + row), tl.load(position_ptr + row), vocab, temperature,
            NUM_TILES, TILE, TILES, ON_GPU,
        )  # fmt: skip
        tl.store(token_ptr + row, token.to(tl.int64))
        if LOGPROBS:
            tl.store(logprob_ptr + row, tl.load(row_ptr + token).to(tl.float32) - tl.load(numbers_ptr + row * 4 + 3))
