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
        self._config, self._layer = config, layer
        self._backend: Backend = backend
        first = weights.q_b if weights.q_a is None else weights.q_a
        self._qkv_split = [first.shape[0], config.kv_lora_rank, config.qk_rope_head_dim]
        self._qkv_a = create_linear(torch.cat((first, weights.kv_a)), backend=backend)
        self._q_b = None if weights.q_a is None else create_linear(weights.q_b, backend=backend)
        self._q_a_norm, self._kv_a_norm = weights.q_a_norm, weights.kv_a_norm
        per_head = weights.kv_b.view(config.num_attention_heads, -1, config.kv_lora_rank)  # [heads, nope + v, kv_lora]
        key, value = per_head.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        self._k_b = key.contiguous()  # [heads, nope, kv_lora]
        self._v_b = value.transpose(1, 2).contiguous()  # [heads, kv_lora, v]
        self._o = create_linear(weights.o, backend=backend)

    def __call__(self, x: torch.Tensor, step: DecodeStep) -> torch.Tensor:
        """x [batch, hidden], normalised -> [batch, hidden]; appends each token's latent before attending."""
        eps = self._config.rms_norm_eps
        q, latent, k_rope = self._qkv_a(x).split(self._qkv_split, dim=1)
        if self._q_b is not None and self._q_a_norm is not None:
            q = self._q_b(rms_norm(q, self._q_a_norm, eps=eps, backend=self._backend))
        rope_(k_rope.unsqueeze(1), step.rotation, backend=self._backend)
        latent = rms_norm(latent, self._kv_a_norm, eps=eps, backend=self._backend)
        latent_store(latent, k_rope, step.pages, step.rows[self._layer], backend=self._backend)
        attended = step.mla.run(self._absorb(q, step.rotation), self._layer)  # [batch, heads, kv_lora]
        values = torch.bmm(attended.transpose(0, 1), self._v_b)  # [heads, batch, v]
        return self._o(values.transpose(0, 1).flatten(1))

    def _absorb(self, q: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """q [batch, heads * (nope + rope)] -> [batch, heads, kv_lora + rope]: as the cached entries are laid out."""
        heads, nope = self._config.num_attention_heads, self._config.qk_nope_head_dim
        q_nope, q_rope = q.unflatten(1, (heads, -1)).split([nope, self._config.qk_rope_head_dim], dim=2)
        rope_(q_rope, rotation, backend=self._backend)
        absorbed = torch.bmm(q_nope.transpose(0, 1), self._k_b)  # [heads, batch, kv_lora]
        return torch.cat((absorbed.transpose(0, 1), q_rope), dim=2)
