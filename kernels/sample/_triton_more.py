"""The sampler's small companions: the best tokens with their logprobs, the acceptance of drafts, and the noise alone."""

import torch
import triton
import triton.language as tl

from kernels.backend import interpreting
from kernels.sample import MAX_TOP_LOGPROBS, Accepted
from kernels.sample._triton_noise import exact_gumbel, fast_noise, sum_exp, tile_bits
from kernels.sample._triton_order import keys_of, value_of

_KEPT = triton.next_power_of_2(MAX_TOP_LOGPROBS)
TILE = 2048
_LOWEST = tl.constexpr(-(2**63))


@triton.jit
def _best_keys_kernel(
    logits_ptr, active_ptr, keys_ptr, max_ptr, sum_ptr, vocab, row_stride, NUM_TILES: tl.constexpr, TILE: tl.constexpr, KEPT: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
):  # fmt: skip
    """keys [rows, NUM_TILES, KEPT]: the best (value, lower id) keys of each tile, falling."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    active = (tl.load(active_ptr + row) != 0) if HAS_ACTIVE else True
    if active:
        ids = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
        keys = tl.where(ids < vocab, keys_of(x, ids), _LOWEST)
        place = row * NUM_TILES + tile
        tl.store(keys_ptr + place * KEPT + tl.arange(0, KEPT), tl.topk(keys, KEPT))
        largest = tl.max(x)
        tl.store(max_ptr + place, largest)
        tl.store(sum_ptr + place, sum_exp(x, largest))


@triton.jit
def _top_logprobs_kernel(
    keys_ptr, active_ptr, max_ptr, sum_ptr, ids_ptr, logprobs_ptr, num_top, NUM_TILES: tl.constexpr, NUM_TILES_P: tl.constexpr,
    KEPT: tl.constexpr, HAS_ACTIVE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, KEPT)
    out = row * num_top + slot
    active = (tl.load(active_ptr + row) != 0) if HAS_ACTIVE else True
    if active:
        index = tl.arange(0, NUM_TILES_P * KEPT)
        keys = tl.topk(tl.load(keys_ptr + row * NUM_TILES * KEPT + index, mask=index < NUM_TILES * KEPT, other=_LOWEST), KEPT)
        tile = tl.arange(0, NUM_TILES_P)
        maxima = tl.load(max_ptr + row * NUM_TILES + tile, mask=tile < NUM_TILES, other=-float("inf"))
        sums = tl.load(sum_ptr + row * NUM_TILES + tile, mask=tile < NUM_TILES, other=0.0)
        largest = tl.max(maxima)
        log_total = tl.log(tl.sum(sums * tl.exp(maxima - largest)))
        tl.store(ids_ptr + out, 0x7FFFFFFF - (keys & 0x7FFFFFFF), mask=slot < num_top)
        tl.store(logprobs_ptr + out, value_of((keys >> 32).to(tl.int32)) - largest - log_total, mask=slot < num_top)
    else:
        tl.store(ids_ptr + out, tl.full([KEPT], -1, tl.int64), mask=slot < num_top)
        tl.store(logprobs_ptr + out, tl.full([KEPT], float("nan"), tl.float32), mask=slot < num_top)


def top_logprobs_triton(logits: torch.Tensor, num_top: int, active: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, vocab = logits.shape
    ids = torch.empty((num_rows, num_top), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty((num_rows, num_top), dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return ids, logprobs
    tile = min(TILE, max(_KEPT, triton.next_power_of_2(vocab)))
    num_tiles = triton.cdiv(vocab, tile)
    keys = torch.empty((num_rows, num_tiles, _KEPT), dtype=torch.int64, device=logits.device)
    maxima, sums = (torch.empty((num_rows, num_tiles), dtype=torch.float32, device=logits.device) for _ in range(2))
    flags = None if active is None else active.view(torch.uint8)
    sizes = {"NUM_TILES": num_tiles, "KEPT": _KEPT, "HAS_ACTIVE": active is not None}
    _best_keys_kernel[(num_tiles, num_rows)](
        logits, flags, keys, maxima, sums, vocab, logits.stride(0), TILE=tile, **sizes, num_warps=4
    )  # fmt: skip
    _top_logprobs_kernel[(num_rows,)](
        keys, flags, maxima, sums, ids, logprobs, num_top, NUM_TILES_P=triton.next_power_of_2(num_tiles), **sizes, num_warps=4
    )  # fmt: skip
    return ids, logprobs


@triton.jit
def _accept_drafts_kernel(
    draft_ptr, target_ptr, num_drafts_ptr, num_accepted_ptr, out_ptr, requests, k, K_P: tl.constexpr, BLOCK: tl.constexpr
):
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    place = tl.arange(0, K_P)[None, :]
    real = request < requests
    limit = tl.load(num_drafts_ptr + request, mask=real, other=-1)  # [BLOCK, 1]
    target = tl.load(target_ptr + request.to(tl.int64) * (k + 1) + place, mask=real & (place <= k) & (limit >= 0), other=-1)
    asked = real & (place < limit) & (place < k)
    draft = tl.load(draft_ptr + request.to(tl.int64) * k + place, mask=asked, other=-1)
    refused = tl.where(asked & (draft == target), K_P, place)  # the first place that is not an accepted draft
    num_accepted = tl.min(refused, 1, keep_dims=True)
    kept = (place <= num_accepted) & (limit >= 0)
    tl.store(out_ptr + request.to(tl.int64) * (k + 1) + place, tl.where(kept, target, -1), mask=real & (place <= k))
    tl.store(num_accepted_ptr + request, num_accepted.to(tl.int64), mask=real)


def accept_drafts_triton(draft_ids: torch.Tensor, target_ids: torch.Tensor, num_drafts: torch.Tensor) -> Accepted:
    requests, k = draft_ids.shape
    num_accepted, token_ids = torch.empty_like(num_drafts), torch.empty_like(target_ids)
    if requests > 0:
        grid = (triton.cdiv(requests, 32),)
        _accept_drafts_kernel[grid](
            draft_ids, target_ids, num_drafts, num_accepted, token_ids, requests, k,
            K_P=triton.next_power_of_2(k + 1), BLOCK=32, num_warps=1,
        )  # fmt: skip
    return Accepted(num_accepted, token_ids)


@triton.jit
def _noise_kernel(seed_ptr, choice_ptr, position_ptr, bits_ptr, fast_ptr, exact_ptr, num_ids, TILE: tl.constexpr, ON_GPU: tl.constexpr):
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ids = tile * TILE + tl.arange(0, TILE)
    bits = tile_bits(tl.load(seed_ptr + row), tl.load(choice_ptr + row), tl.load(position_ptr + row), tile * TILE, TILE)
    tl.store(bits_ptr + row * num_ids + ids, bits.to(tl.int64), mask=ids < num_ids)
    tl.store(fast_ptr + row * num_ids + ids, fast_noise(bits, ON_GPU), mask=ids < num_ids)
    tl.store(exact_ptr + row * num_ids + ids, exact_gumbel(bits), mask=ids < num_ids)


def noise_triton(seed: torch.Tensor, choice: torch.Tensor, position: torch.Tensor, num_ids: int) -> tuple[torch.Tensor, ...]:
    """Bits (int64), fast noise and exact noise [rows, num_ids] as the sampler computes them: for tests."""
    out = tuple(torch.empty((len(seed), num_ids), dtype=t, device=seed.device) for t in (torch.int64, torch.float32, torch.float32))
    grid = (triton.cdiv(num_ids, 1024), len(seed))
    _noise_kernel[grid](seed, choice, position, *out, num_ids, TILE=1024, ON_GPU=not interpreting())
    return out


@triton.jit
def _noise_of_bits_kernel(bits_ptr, fast_ptr, exact_ptr, size, BLOCK: tl.constexpr, ON_GPU: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + place, mask=place < size, other=0).to(tl.uint32)
    tl.store(fast_ptr + place, fast_noise(bits, ON_GPU), mask=place < size)
    tl.store(exact_ptr + place, exact_gumbel(bits), mask=place < size)


def noise_of_bits_triton(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fast and exact noise of given bits [n] int64: for tests."""
    fast, exact = (torch.empty(len(bits), dtype=torch.float32, device=bits.device) for _ in range(2))
    _noise_of_bits_kernel[(triton.cdiv(len(bits), 1024),)](bits, fast, exact, len(bits), BLOCK=1024, ON_GPU=not interpreting())
    return fast, exact
