"""The noise of sampling: Philox4x32-10 bits as a pure function of (seed, choice, position, token id), the same on CPU and GPU.

Layout, defined here once (words are u32):
    key      (seed & 0xFFFFFFFF, seed >> 32)
    counter  (token id // 4, position, choice, 0); output word `token id % 4` belongs to the id
Known answers (Random123): key 0 0, counter 0 0 0 0 -> 6627e8d5 e169c58d bc57ac4c 9b00dbd8;
    all ones -> 408f276d 41c83b0e a20bc7c6 6d5451fd;
    key a4093822 299f31d0, counter 243f6a88 85a308d3 13198a2e 03707344 -> d16cfe09 94fdcceb 5001e420 24126ea1.

From bits to Gumbel noise, in fp32: u = min((float(bits) + 0.5) * 2^-32, 1 - 2^-24), then -log(-log1p(-u)). float() rounds to
nearest even, so u is the same bit for bit everywhere, is never 0 (at least 2^-33) and never 1 (the minimum catches what rounds up);
log1p keeps all 32 bits of resolution where they matter, at large noise. Only the two logarithms may differ between devices, by 2 ulp.
"""

from collections.abc import Sequence

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_LANE_ALIGNMENT = 16  # fp32 values in 64 bytes: every row starts at a vector's first lane


def philox4x32(key: tuple[torch.Tensor, torch.Tensor], counter: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Ten rounds on int64 tensors that hold u32 values; shapes broadcast. Products wrap modulo 2^64, which keeps both halves right."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        # The shift is arithmetic: masking after the exclusive or removes the sign's copies
        c0, c1, c2, c3 = ((p1 >> 32) ^ (c1 ^ k0)) & _MASK, p1 & _MASK, ((p0 >> 32) ^ (c3 ^ k1)) & _MASK, p0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def noise_bits(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], num_ids: int) -> torch.Tensor:
    """The 32 bits of every row and token id: [rows, num_ids rounded up to 16] int64 in [0, 2^32).

    seeds      u64 of each row's request
    choices    u32, which of the request's n answers
    positions  u32, absolute index (prompt included) of the token being chosen
    """
    num_blocks = -(-num_ids // _LANE_ALIGNMENT) * _LANE_ALIGNMENT // 4
    k0, k1, c1, c2 = (
        torch.tensor(words, dtype=torch.int64)[:, None]
        for words in ([seed & _MASK for seed in seeds], [seed >> 32 for seed in seeds], positions, choices)
    )
    blocks = torch.arange(num_blocks, dtype=torch.int64)[None, :]
    words = philox4x32((k0, k1), (blocks, c1, c2, torch.zeros_like(c1)))
    return torch.stack(words, dim=-1).flatten(1)


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """u32 values in int64 -> fp32 strictly between 0 and 1."""
    return ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)


def gumbel_noise(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], num_ids: int) -> torch.Tensor:
    """Standard Gumbel noise of every row and token id: [rows, num_ids] fp32; arguments as for `noise_bits`."""
    noise = uniform(noise_bits(seeds, choices, positions, num_ids)).neg_()
    for row in noise:
        # A row at a time: vector libraries may round a remainder differently, and where that lies must not depend on batch mates
        row.log1p_().neg_().log_().neg_()
    return noise[:, :num_ids]
