"""Philox bits and Gumbel noise inside Triton kernels: exact, and fast with a bounded error (the layout of bits: `noise.py`)."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

_LOG2_E = tl.constexpr(1.4426950408889634)
_TWO_32 = tl.constexpr(4294967296.0)


@triton.jit
def _multiply(a, b: tl.constexpr):
    """Upper and lower half of the 64-bit product of u32 values."""
    product = a.to(tl.uint64) * b
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox_words(seed, choice, position, block):
    """The four u32 words of each block of four token ids; seed is int64 with a u64's bits, choice and position scalars."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    zero = block * 0
    c0, c1, c2, c3 = block.to(tl.uint32), (zero + position).to(tl.uint32), (zero + choice).to(tl.uint32), zero.to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def tile_bits(seed, choice, position, first, TILE: tl.constexpr):
    """Bits of the ids first .. first + TILE - 1 (first a multiple of 4), [TILE] u32."""
    w0, w1, w2, w3 = philox_words(seed, choice, position, first // 4 + tl.arange(0, TILE // 4))
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [TILE])


@triton.jit
def id_bits(seed, choice, position, ids):
    """Bits of scattered ids, one Philox block each."""
    w0, w1, w2, w3 = philox_words(seed, choice, position, ids // 4)
    word = ids % 4
    return tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))


@triton.jit
def _uniform(bits):
    """u times 2^32, bit for bit as `noise.uniform` but for that power of two."""
    return tl.minimum(bits.to(tl.float32) + 0.5, 4294967040.0)


@triton.jit
def exact_gumbel(bits):
    """-log(-log1p(-u)) with both logarithms rounded from fp64; 1 - u is exact there, since u is a multiple of 2^-33."""
    exponential = (-tl.log(1.0 - _uniform(bits).to(tl.float64) / _TWO_32)).to(tl.float32)
    return (-tl.log(exponential.to(tl.float64))).to(tl.float32)


@triton.jit
def _log2(x, ON_GPU: tl.constexpr):
    """lg2.approx: at most 2^-22 off, absolutely between 0.5 and 2, relatively elsewhere. libdevice has no interpreter."""
    return libdevice.fast_log2f(x) if ON_GPU else tl.log2(x)


@triton.jit
def fast_noise(bits, ON_GPU: tl.constexpr):
    """(Gumbel noise + log(ln 2)) / ln 2 within 6e-5: in these units both logarithms are lg2.approx. A series where 1 - u would lose u."""
    u = _uniform(bits)
    series = u * (3.35903615e-10 + u * (3.91043274e-20 + u * 6.06979048e-30))
    return -_log2(tl.where(u < 67108864.0, series, -_log2(1.0 - u * 2.3283064365386963e-10, ON_GPU)), ON_GPU)


@triton.jit
def fast_scores(values, bits, ON_GPU: tl.constexpr):
    """Scores in the units of `fast_noise`, which keep the order of values + noise."""
    return values * _LOG2_E + fast_noise(bits, ON_GPU)


@triton.jit
def is_near(best, second):
    """Whether fast scores cannot tell the two apart: noise is off by 6e-5 at most, value / temperature by 2^-22 of itself."""
    return second >= best - (1.5e-4 + 1e-6 * tl.abs(best))


@triton.jit
def sum_exp(x, largest):
    """Sum of exp(x - largest); 0 where all of x is -inf."""
    return tl.sum(tl.exp(x - tl.where(largest == -float("inf"), 0.0, largest)))


@triton.jit
def best_of(scores, ids):
    """(best score, its lowest id, second best score) of [n] scores with distinct ids; NaN counts as +inf."""
    scores = tl.where(scores != scores, float("inf"), scores)
    best = tl.max(scores)
    best_id = tl.min(tl.where(scores == best, ids, 0x7FFFFFFF))
    return best, best_id, tl.max(tl.where(ids == best_id, -float("inf"), scores))


@triton.jit
def _better(best_a, second_a, id_a, best_b, second_b, id_b):
    second = tl.maximum(tl.maximum(second_a, second_b), tl.minimum(best_a, best_b))
    return tl.maximum(best_a, best_b), second, tl.where(best_a > best_b, id_a, id_b)


@triton.jit
def fast_best_of(scores, ids, ON_GPU: tl.constexpr):
    """`best_of` in one reduction; of equal scores, which are near ones, and among NaN any id."""
    if ON_GPU:
        best, second, best_id = tl.reduce((scores, tl.full(scores.shape, -float("inf"), tl.float32), ids), 0, _better)
    else:
        best, best_id, second = best_of(scores, ids)
    return best, best_id, second
