"""Which kernel multiplies which shape, measured on one H200 by tests/bench/tune_fp8_gemm.py."""

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
    """Of the Gluon kernel: a tile of the output, and how many programs share the k-blocks of all tiles."""

    block_m: int
    block_n: int
    programs: int
    stages: int
    warps: int
    """Of a consumer: there is one, or for tiles of 256 x 128 two; the loader has one more."""
    registers: int
    """A thread's, on average over all warpgroups: by them and the stages, two or three programs share an SM."""
    swap: bool


class Choice(NamedTuple):
    """A configuration that is right for a shape, and whether it was measured to be faster than DeepGEMM there."""

    config: Config | Streamed
    beats_deep_gemm: bool


MEASURED: dict[tuple[int, int], dict[int, Choice]] = {
    (2112, 7168): {  # fused qkv_a: 7.4, 7.5, 8.8, 10.8 us; DeepGEMM 11.1, 11.2, 10.3, 11.4 (at the largest m of each bucket)
        16: Choice(Streamed(16, 64, 231, 10, 4, 128, True), True),
        32: Choice(Streamed(32, 64, 132, 9, 4, 128, True), True),
        64: Choice(Streamed(64, 64, 132, 6, 4, 128, False), True),
        128: Choice(Streamed(128, 32, 264, 5, 8, 80, False), False),
        256: Choice(Streamed(128, 64, 132, 9, 8, 168, False), False),  # 15.0; 12.8
    },
    (7168, 16384): {  # o_proj: 31.9, 33.0, 34.2, 43.3; 36.6, 37.5, 36.7, 45.7
        16: Choice(Streamed(16, 64, 112, 10, 4, 255, True), True),
        32: Choice(Streamed(32, 64, 112, 10, 4, 255, True), True),
        64: Choice(Streamed(64, 64, 112, 10, 4, 255, False), True),
        128: Choice(Streamed(128, 128, 112, 6, 8, 168, False), True),
        256: Choice(Streamed(256, 128, 112, 4, 4, 168, False), False),  # 63.6; 57.3 to 61.5, mostly 60
    },
    (24576, 1536): {  # q_b: 11.1, 12.0, 13.4, 15.0; 16.3, 16.5, 16.0, 36.6
        16: Choice(Streamed(16, 64, 384, 7, 4, 80, True), True),
        32: Choice(Streamed(32, 64, 384, 5, 4, 80, True), True),
        64: Choice(Config(64, 64, 1, 4, 4, False), True),
        128: Choice(Config(128, 64, 1, 3, 4, False), True),
    },
    (4096, 7168): {  # shared gate and up: 10.4, 10.7, 12.2; 12.6, 12.7, 12.3
        16: Choice(Streamed(16, 64, 256, 10, 4, 128, True), True),
        32: Choice(Streamed(32, 64, 256, 9, 4, 128, True), True),
        64: Choice(Streamed(64, 64, 128, 10, 4, 255, False), False),
        128: Choice(Streamed(128, 64, 128, 9, 8, 168, False), False),  # 15.6; 13.8
    },
    (7168, 2048): {  # shared down: 6.1, 6.6, 7.1; 7.7, 7.7, 7.5
        16: Choice(Streamed(16, 64, 112, 10, 4, 255, True), True),
        32: Choice(Streamed(32, 64, 112, 10, 4, 255, True), True),
        64: Choice(Streamed(64, 64, 112, 10, 4, 255, False), True),
        128: Choice(Config(64, 128, 1, 6, 4, False), False),  # 9.0; 8.9
    },
    (36864, 7168): {
        16: Choice(Streamed(16, 128, 132, 10, 4, 255, True), False),  # dense gate and up: 67.8; 69.7
        32: Choice(Streamed(32, 64, 264, 9, 4, 128, True), False),  # 72.5; 69.8
        64: Choice(Streamed(64, 64, 264, 6, 4, 128, False), False),  # 75.4; 70.5
    },
    (7168, 18432): {  # dense down: 35.1, 36.2; 40.2, 40.5
        16: Choice(Streamed(16, 64, 112, 10, 4, 255, True), True),
        32: Choice(Streamed(32, 64, 112, 10, 4, 255, True), True),
        64: Choice(Streamed(64, 64, 112, 10, 4, 255, False), False),  # 37.4; 40.1 in the sweep, but 44; 42.5 in the benchmark, thrice
        128: Choice(Streamed(128, 128, 112, 6, 8, 168, False), False),  # 48.1; 51.3 in the sweep alone
        256: Choice(Streamed(256, 128, 112, 4, 4, 168, False), False),  # 69.3; 65.7
    },
    (32768, 512): {  # kv_b: 6.5, 7.1, 8.0; 8.7, 9.0, 9.2
        16: Choice(Streamed(16, 128, 256, 6, 4, 128, True), True),
        32: Choice(Streamed(32, 128, 256, 5, 4, 128, True), True),
        64: Choice(Config(64, 64, 1, 3, 4, False), True),
        128: Choice(Config(128, 64, 1, 4, 4, False), False),  # 11.3; 11.1
    },
}
"""(n, k) -> the largest m of a bucket -> what is best there. Microseconds with cold L2, a graph of such calls, launched dependently (see
kernels/launch.py), which DeepGEMM's cannot be: in a chain of other kernels ours gain less. Ours is taken where it was 5 % faster in the
sweep and the benchmark, where it has that shape, does not deny it."""

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
