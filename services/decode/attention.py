"""MLA in its absorbed form: kv_b's key half is multiplied into the query and its value half into the output, so that one
new token attends to the cached latents themselves and nothing of kv_len x num_heads is ever up-projected."""

from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.latent_store import latent_store
from kernels.linear import create_linear
from kernels.mla_decode import MlaDecode
from kernels.rms_norm import rms_norm
from kernels.rope import rope_
from services.decode.absorb import AbsorbedOutput, AbsorbedQuery
from services.model.config import ModelConfig
from services.model.weights import AttentionWeights


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What every layer of one step shares."""

    pages: torch.Tensor  # [num_pages, num_layers, page_size, width]
    rotation: torch.Tensor  # [batch, rope / 2] complex
    rows: tuple[torch.Tensor, ...]  # a layer each: [batch] int64, where the new entries go
    mla: MlaDecode  # planned for this step


class DecodeAttention:
    """One layer's attention over pages; weights fused and absorbed once."""

    def __init__(self, config: ModelConfig, weights: AttentionWeights, layer: int, backend: Backend) -> None:
        self._layer, self._eps, self._kv_lora_rank = layer, config.latent_norm_eps, config.kv_lora_rank
        self._backend: Backend = backend
        q_first = weights.q_b if weights.q_a is None else weights.q_a
        self._qkv_a = create_linear(torch.cat((q_first, weights.kv_a)), backend=backend)
        self._qkv_split = [q_first.shape[0], config.kv_lora_rank, config.qk_rope_head_dim]
        self._q_a_norm, self._kv_a_norm = weights.q_a_norm, weights.kv_a_norm
        self._query, self._output = AbsorbedQuery(config, weights, backend), AbsorbedOutput(config, weights, backend)

    def __call__(self, x: torch.Tensor, step: DecodeStep) -> torch.Tensor:
        """x [batch, hidden], normalised -> [batch, hidden]; appends each token's latent before attending."""
        q, latent, k_rope = self._qkv_a(x).split_with_sizes(self._qkv_split, dim=1)
        if self._q_a_norm is not None:
            q = rms_norm(q, self._q_a_norm, eps=self._eps, backend=self._backend)
        q = self._query(q)  # [batch, heads, kv_lora + rope]
        rope_(q[..., self._kv_lora_rank :], step.rotation, backend=self._backend)
        rope_(k_rope.unsqueeze(1), step.rotation, backend=self._backend)
        latent = rms_norm(latent, self._kv_a_norm, eps=self._eps, backend=self._backend)
        latent_store(latent, k_rope, step.pages, step.rows[self._layer], backend=self._backend)
        return self._output(step.mla.run(q, self._layer))
