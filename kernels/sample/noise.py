"""The noise of sampling in torch: Philox4x32-10 bits as a pure function of (seed, choice, position, token id), the same on CPU and GPU.

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

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_LANES = 16  # fp32 values in 64 bytes: a row starts at a CPU vector's first lane


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


def noise_bits(seed: torch.Tensor, choice: torch.Tensor, position: torch.Tensor, num_ids: int) -> torch.Tensor:
    """[rows, num_ids rounded up to 16] int64 in [0, 2^32).

    seed              [rows] int64 holding a u64's bits
    choice, position  [rows] integers, each below 2^32
    """
    blocks = torch.arange(-(-num_ids // _LANES) * _LANES // 4, dtype=torch.int64, device=seed.device)[None, :]
    key = (seed & _MASK)[:, None], ((seed >> 32) & _MASK)[:, None]
    words = philox4x32(key, (blocks, position.long()[:, None], choice.long()[:, None], torch.zeros_like(key[0])))
    return torch.stack(words, dim=-1).flatten(1)


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """u32 values in int64 -> fp32 strictly between 0 and 1."""
    return ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)


def gumbel_noise_torch(seed: torch.Tensor, choice: torch.Tensor, position: torch.Tensor, num_ids: int) -> torch.Tensor:
    """Standard Gumbel noise [rows, num_ids] fp32; arguments as in `noise_bits`."""
    noise = uniform(noise_bits(seed, choice, position, num_ids)).neg_()
    for part in [noise] if noise.is_cuda else noise:
        # A row at a time on CPU: vector libraries may round a remainder differently, and where that lies must not depend on batch mates
        part.log1p_().neg_().log_().neg_()
    return noise[:, :num_ids]
