"""Which kernel multiplies which shape, measured on one H200 (tests/bench/tune_fp8_gemm.py)."""

from typing import NamedTuple


class Config(NamedTuple):
    """Of the Triton kernel: a tile of the output, into how many ranges its k is split, and how the program runs."""

    block_m: int
    block_n: int
    splits: int
    stages: int
    warps: int
    swap: bool
    """The weight is the left operand of the tensor cores' product: whose tiles have 64 rows and more, so for few rows of x."""
    tma: bool = True
    """Loads by TMA descriptors, else by cp.async."""


class Streamed(NamedTuple):
    """Of the Gluon kernel, likewise."""

    block_m: int
    block_n: int
    splits: int
    stages: int
    warps: int
    """Of the consumer; the loader has one more."""
    registers: int
    """A thread's, on average over all warpgroups: by them and the stages, two or three programs share an SM."""
    swap: bool


class Choice(NamedTuple):
    """A configuration that is right for a shape, and whether it was measured to be faster than DeepGEMM there."""

    config: Config | Streamed
    beats_deep_gemm: bool


MEASURED: dict[tuple[int, int], dict[int, Choice]] = {
    (2112, 7168): {
        16: Choice(Config(16, 64, 8, 5, 4, True, False), True),
        32: Choice(Streamed(32, 64, 4, 9, 4, 128, True), True),
        64: Choice(Streamed(64, 64, 4, 6, 4, 128, False), True),
        128: Choice(Streamed(128, 64, 4, 4, 4, 128, False), False),
    },
    (7168, 16384): {
        16: Choice(Streamed(16, 64, 1, 10, 4, 255, True), True),
        32: Choice(Streamed(32, 64, 1, 10, 4, 255, True), True),
        64: Choice(Streamed(64, 64, 1, 10, 4, 255, False), True),
        128: Choice(Streamed(128, 128, 2, 6, 8, 168, False), True),
    },
    (24576, 1536): {
        16: Choice(Config(16, 64, 1, 6, 4, True, False), True),
        32: Choice(Config(32, 64, 1, 6, 4, True), True),
        64: Choice(Config(64, 64, 1, 4, 4, False), True),
        128: Choice(Config(64, 128, 1, 3, 4, False), True),
    },
    (4096, 7168): {
        16: Choice(Streamed(16, 64, 4, 10, 4, 128, True), True),
    },
    (7168, 18432): {
        16: Choice(Streamed(16, 64, 1, 10, 4, 255, True), True),
        32: Choice(Streamed(32, 64, 1, 10, 4, 255, True), True),
        64: Choice(Streamed(64, 64, 1, 10, 4, 255, False), True),
        128: Choice(Streamed(128, 128, 2, 6, 8, 168, False), True),
    },
    (32768, 512): {
        16: Choice(Config(16, 128, 1, 6, 4, True, False), True),
        32: Choice(Config(32, 64, 1, 4, 4, True, False), True),
        64: Choice(Config(64, 64, 1, 3, 4, False), True),
    },
}
"""(n, k) -> the largest m of a bucket -> what is best there."""

_SMS = 132


def choose(m: int, n: int, k: int) -> Choice:
    """What the table says, else a guess that is right for any shape and claims nothing."""
    for bound, choice in MEASURED.get((n, k), {}).items():
        if m <= bound:
            return choice
    return Choice(split_k(m, n, k), beats_deep_gemm=False)


def split_k(m: int, n: int, k: int) -> Config:
    """As many splits as fill the SMs twice, for the tile that suits so many rows."""
    block_m, block_n = (16, 128) if m <= 16 else (32, 128) if m <= 32 else (64, 128) if m <= 64 else (128, 128)
    tiles = -(-m // block_m) * -(-n // block_n)
    splits = max(1, min(8, k // 512, 2 * _SMS // tiles))
    return Config(block_m, block_n, splits, stages=4, warps=8 if block_m == 128 else 4, swap=block_m < 64)
