"""kv_b absorbed: its key half into the query's projection, its value half into the output's, split per head as [nope | value].

Each half has two forms. Apart, a batched product a head follows (or precedes) the projection. Merged, the product of the
two weights is formed once, in float64, and one projection does both.
"""

import torch

from kernels.backend import Backend
from kernels.linear import create_linear
from services.model.config import ModelConfig
from services.model.weights import AttentionWeights

_MERGE_GROWTH = 1.5
"""A merged weight is used if it has at most this many times the elements of the two it replaces: one GEMM streams memory
faster than a batched one and a second GEMM do. Demo shape, one Zen 5 core, weights from memory, apart | merged: query (0.8
times the elements) 75 | 43 us at 1 request, 135 | 60 at 8; output (1.3 times) 71 | 75 and 137 | 90. V3's own shape (3.0
and 3.7 times) stays apart."""


def split_kv_b(config: ModelConfig, kv_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """kv_b [heads * (nope + v), kv_lora] -> key half [heads, nope, kv_lora], value half [heads, v, kv_lora]."""
    key, value = kv_b.unflatten(0, (config.num_attention_heads, -1)).split_with_sizes([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    return key, value


class AbsorbedQuery:
    """What is left of the query after the fused first projection, up to queries laid out as cached entries are."""

    def __init__(self, config: ModelConfig, weights: AttentionWeights, backend: Backend) -> None:
        self._heads, self._nope, self._rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        key = split_kv_b(config, weights.kv_b)[0]
        q_b = weights.q_b.unflatten(0, (self._heads, -1))  # [heads, nope + rope, q_in]
        grown = config.kv_lora_rank * q_b.shape[2] / (self._nope * (config.kv_lora_rank + q_b.shape[2]))
        self._key = None if weights.q_a is not None and grown <= _MERGE_GROWTH else key.contiguous()
        self._project = None
        if self._key is None:
            merged = (key.double().transpose(1, 2) @ q_b[:, : self._nope].double()).to(q_b.dtype)  # [heads, kv_lora, q_in]
            self._project = create_linear(torch.cat((merged, q_b[:, self._nope :]), dim=1).flatten(0, 1), backend=backend)
        elif weights.q_a is not None:
            self._project = create_linear(weights.q_b, backend=backend)

    def __call__(self, q: torch.Tensor) -> torch.Tensor:
        """q [batch, q_lora], normalised (or the whole query [batch, heads * (nope + rope)] without q_lora)
        -> [batch, heads, kv_lora + rope], the last `rope` values still to be rotated."""
        if self._project is not None:
            q = self._project(q)
        q = q.unflatten(1, (self._heads, -1))
        if self._key is None:
            return q
        q_nope, q_rope = q.split_with_sizes([self._nope, self._rope], dim=2)
        absorbed = torch.bmm(q_nope.transpose(0, 1), self._key)  # [heads, batch, kv_lora]
        return torch.cat((absorbed.transpose(0, 1), q_rope), dim=2)


class AbsorbedOutput:
    """From attended latents to the layer's output."""

    def __init__(self, config: ModelConfig, weights: AttentionWeights, backend: Backend) -> None:
        value = split_kv_b(config, weights.kv_b)[1]
        grown = config.kv_lora_rank * config.hidden_size / (config.v_head_dim * (config.kv_lora_rank + config.hidden_size))
        self._value = None if grown <= _MERGE_GROWTH else value.transpose(1, 2).contiguous()  # [heads, kv_lora, v]
        projection = weights.o
        if self._value is None:
            per_head = projection.unflatten(1, (config.num_attention_heads, -1)).transpose(0, 1)  # [heads, hidden, v]
            merged = (per_head.double() @ value.double()).to(projection.dtype)  # [heads, hidden, kv_lora]
            projection = merged.transpose(0, 1).flatten(1)
        self._project = create_linear(projection, backend=backend)

    def __call__(self, attended: torch.Tensor) -> torch.Tensor:
        """attended [batch, heads, kv_lora] -> [batch, hidden]."""
        if self._value is not None:
            attended = torch.bmm(attended.transpose(0, 1), self._value).transpose(0, 1)  # [batch, heads, v]
        return self._project(attended.flatten(1))
