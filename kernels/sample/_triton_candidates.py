"""Filters settled among candidates: the tokens of a row above a bound that leaves out none that can be kept."""

import triton
import triton.language as tl

from kernels.sample._triton_noise import best_of, exact_gumbel, fast_scores, id_bits, is_near
from kernels.sample._triton_order import keys_of, ordered, value_of
from kernels.sample._triton_passes import divided, load_values

_LOWEST = tl.constexpr(-(2**63))
_MASKED_ID = tl.constexpr(0x7FFFFFFF)
NO_BOUND = tl.constexpr(-(2**31))


@triton.jit
def _bound_of_blocks(block_max, k, num_blocks):
    """A value, ordered, that k or a few more block maxima reach: no more than the k-th largest token; none if there are fewer blocks."""
    low, high, count = tl.full([], NO_BOUND, tl.int64), tl.max(block_max).to(tl.int64) + 1, num_blocks
    if k <= num_blocks:
        low = tl.min(tl.where(block_max == NO_BOUND, 0x7FFFFFFF, block_max)).to(tl.int64)
        while (high > low + 1) & (count > k + k // 4 + 4):
            middle = (low + high) >> 1
            reached = tl.sum((block_max >= middle.to(tl.int32)).to(tl.int32))
            if reached >= k:
                low = middle
                count = reached
            else:
                high = middle
    return low.to(tl.int32)


@triton.jit
def gather_candidates(
    row_ptr, block_max_ptr, blocks_ptr, candidates_ptr, k, bound, vocab, temperature, num_blocks,
    NUM_BLOCKS_P: tl.constexpr, BLOCK: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Writes the keys of all tokens of at least both bounds; returns how many they are (none beyond the buffer), and the higher bound."""
    index = tl.arange(0, NUM_BLOCKS_P)
    block_max = tl.load(block_max_ptr + index, mask=index < num_blocks, other=0.0)
    block_max = tl.where(index < num_blocks, ordered(block_max), NO_BOUND)
    bound = tl.maximum(bound, _bound_of_blocks(block_max, k, num_blocks))
    chosen = ((block_max >= bound) & (index < num_blocks)).to(tl.int32)
    num_chosen = tl.sum(chosen)
    tl.store(blocks_ptr + tl.cumsum(chosen) - 1, index, mask=chosen > 0)
    tl.debug_barrier()
    num_candidates = 0
    STEP: tl.constexpr = min(NUM_BLOCKS_P, 2048 // BLOCK)
    for first in range(0, num_chosen, STEP):
        slot = first + tl.arange(0, STEP)
        block = tl.load(blocks_ptr + slot, mask=slot < num_chosen, other=-1)
        ids = tl.reshape(tl.where(block < 0, vocab, block * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :], [STEP * BLOCK])
        values = divided(load_values(row_ptr, ids, vocab), temperature)
        candidate = ((ids < vocab) & (ordered(values) >= bound)).to(tl.int32)
        at = num_candidates + tl.cumsum(candidate) - 1
        tl.store(candidates_ptr + at, keys_of(values, ids), mask=(candidate > 0) & (at < MAX_CANDIDATES))
        num_candidates += tl.sum(candidate)
    tl.debug_barrier()
    return num_candidates, bound


@triton.jit
def _mass_of_k_best(keys, masses, k):
    """Of the keys (those that are none are the lowest): the mass of the k largest."""
    low, high, count = tl.min(tl.where(keys == _LOWEST, 0x7FFFFFFFFFFFFFFF, keys)) - 1, tl.max(keys), k + 1
    while (high > low + 1) & (count != k):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        count = tl.sum((keys > middle).to(tl.int32))
        if count >= k:
            low = middle
        else:
            high = middle
    return tl.sum(tl.where(keys > low, masses, 0.0))


@triton.jit
def settle_among_candidates(
    candidates_ptr, num_candidates, k, floor, top_p, total, needed, largest, seed, choice, position,
    SIZE: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """The best token with a key above `floor` that top-k and top-p keep; -1 if the candidates' mass is less than `needed`.

    k      more than there are tokens: no top-k
    total  the row's mass, of which top-p is a share if there is no top-k
    """
    index = tl.arange(0, SIZE)
    keys = tl.load(candidates_ptr + index, mask=index < num_candidates, other=_LOWEST)
    values, ids = value_of((keys >> 32).to(tl.int32)), (keys & _MASKED_ID).to(tl.int32) ^ _MASKED_ID
    masses = tl.where(index < num_candidates, tl.exp(values - largest), 0.0)
    found = tl.sum(masses)
    limited = k <= num_candidates
    least_mass, most_mass = total, total
    if limited:
        # The candidates beyond the k best are the smallest ones
        least_mass, most_mass = found * k / num_candidates, found
    token, settled = tl.full([], -1, tl.int32), found < needed
    bits, scores = keys.to(tl.uint32), masses
    if not settled:
        bits = id_bits(seed, choice, position, ids)
        scores = fast_scores(values, bits, ON_GPU)
    while not settled:
        alive = keys > floor
        best, token, second = best_of(tl.where(alive, scores, -float("inf")), tl.where(alive, ids, _MASKED_ID))
        if is_near(best, second):
            exact = tl.where(alive, values + exact_gumbel(bits), -float("inf"))
            best, token, second = best_of(exact, tl.where(alive, ids, _MASKED_ID))
        key = tl.max(tl.where(ids == token, keys, _LOWEST))
        above = keys > key
        count, mass = tl.sum(above.to(tl.int32)), tl.sum(tl.where(above, masses, 0.0))
        over = count >= k
        if (top_p < 1.0) & (not over) & (count > 0):
            if (mass >= top_p * least_mass) & (mass < top_p * most_mass):
                most_mass = _mass_of_k_best(keys, masses, k)
                least_mass = most_mass
            over = mass >= top_p * most_mass
        over = over & (key > floor)  # each round raises the floor, or is the last
        settled = not over
        if over:
            floor = key
    return tl.where(token == _MASKED_ID, 0, token)
