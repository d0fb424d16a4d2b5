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
    pair: str = ""
    """Two products a block: of both halves of the tile's rows ("m") or columns ("n") with the other operand's one load."""
    shared: bool = False
    """All programs of a tile add up the partial sums, not the last one alone; all programs must fit on the GPU at once."""
    tma: bool = True
    """Loads by TMA descriptors, else by cp.async, which has no pair."""
    ahead: int = 0
    """k-blocks of the weight that a program asks L2 for at its start, beyond what its pipeline holds."""
    overlap: bool = False
    """The program starts while the kernel before it ends (programmatic dependent launch): not with `shared`."""


class Choice(NamedTuple):
    """A configuration that is right for a shape, and whether it was measured to be faster than DeepGEMM there."""

    config: Config
    beats_deep_gemm: bool


MEASURED: dict[tuple[int, int], dict[int, Choice]] = {}
"""(n, k) -> the largest m of a bucket -> what is best there."""

_SMS = 132


def choose(m: int, n: int, k: int) -> Choice:
    """What the table says, else a guess that is right for any shape and claims nothing."""
    for bound, choice in MEASURED.get((n, k), {}).items():
        if m <= bound:
            return choice
    return Choice(_guess(m, n, k), beats_deep_gemm=False)


def _guess(m: int, n: int, k: int) -> Config:
    """As many splits as fill the SMs twice, for the tile that suits so many rows."""
    block_m, block_n = (16, 128) if m <= 16 else (32, 128) if m <= 32 else (64, 128) if m <= 64 else (128, 128)
    tiles = -(-m // block_m) * -(-n // block_n)
    splits = max(1, min(8, k // 512, 2 * _SMS // tiles))
    return Config(block_m, block_n, splits, stages=4, warps=8 if block_m == 128 else 4, swap=block_m < 64)
