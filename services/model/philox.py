"""The noise of sampling as the model asks for it: `kernels/sample/noise.py` from Python's numbers."""

from collections.abc import Sequence

import torch

from kernels.sample import noise


def noise_bits(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], num_ids: int) -> torch.Tensor:
    """The 32 bits of every row and token id: [rows, num_ids rounded up to 16] int64 in [0, 2^32).

    seeds      u64 of each row's request
    choices    u32, which of the request's n answers
    positions  u32, absolute index (prompt included) of the token being chosen
    """
    return noise.noise_bits(*_columns(seeds, choices, positions), num_ids)


def gumbel_noise(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], num_ids: int) -> torch.Tensor:
    """Standard Gumbel noise of every row and token id: [rows, num_ids] fp32; arguments as for `noise_bits`."""
    return noise.gumbel_noise_torch(*_columns(seeds, choices, positions), num_ids)


def _columns(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int64 tensors; a seed's holds the bits of its u64."""
    signed = [seed - 2**64 if seed >= 2**63 else seed for seed in seeds]
    return torch.tensor(signed, dtype=torch.int64), torch.tensor(choices, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64)
