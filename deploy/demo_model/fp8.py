"""Block-scaled FP8 as in DeepSeek-V3's checkpoints: e4m3 values, one fp32 scale a block of 128 x 128, edge blocks partial."""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
FP8_MAX = 448.0


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [..., rows, columns] fp32 -> (e4m3 data of that shape, fp32 scale [..., ceil(rows/128), ceil(columns/128)]).

    data * scale is close to weight; the largest value of a block becomes 448.
    """
    rows, columns = weight.shape[-2:]
    padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., row blocks, 128, column blocks, 128]
    scale = blocks.abs().amax(dim=(-3, -1), keepdim=True).clamp(min=1e-12) / FP8_MAX
    data = (blocks / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return data.flatten(-4, -3).flatten(-2, -1)[..., :rows, :columns].contiguous(), scale.squeeze(-1).squeeze(-2)


def dequantize_blocks(data: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `quantize_blocks`, fp32."""
    full = scale.repeat_interleave(BLOCK, dim=-2).repeat_interleave(BLOCK, dim=-1)
    return data.float() * full[..., : data.shape[-2], : data.shape[-1]]
