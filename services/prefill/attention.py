"""MLA in its multi-head form: new tokens' latents are up-projected to keys and values of every head; a cached prefix is
read from the pages, up-projected a bounded piece at a time and merged by log-sum-exp."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.latent_store import latent_store
from kernels.linear import create_linear
from kernels.mla_prefill import MlaPrefill, merge_states
from kernels.rms_norm import rms_norm
from kernels.rope import rope_
from services.model.config import ModelConfig
from services.model.weights import AttentionWeights

PREFIX_PIECE_PAGES = 8
"""Pages of a cached prefix up-projected at once (512 tokens): bounds memory whatever the prefix's length."""


@dataclass(frozen=True, slots=True)
class PrefixPiece:
    """A run of cached pages of one request; all but the last are full."""

    pages: torch.Tensor  # [num_pages] int64
    num_tokens: int
    mla: MlaPrefill  # planned for the request's new tokens against this piece


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """What every layer of one step shares; tokens of all chunks stand one after the other."""

    pages: torch.Tensor  # [num_pages, num_layers, page_size, width]
    rotation: torch.Tensor  # [num_tokens, rope / 2] complex
    rows: tuple[torch.Tensor, ...]  # a layer each: [num_tokens] int64, where the new entries go
    psum_tokens: Sequence[int]  # [num_chunks + 1]
    prefixes: Sequence[Sequence[PrefixPiece]]  # a chunk each
    mla: MlaPrefill  # planned for the new tokens among themselves


class PrefillAttention:
    """One layer's attention of a ragged batch of chunks."""

    def __init__(self, config: ModelConfig, weights: AttentionWeights, layer: int, backend: Backend) -> None:
        self._config, self._layer = config, layer
        self._backend: Backend = backend
        first = weights.q_b if weights.q_a is None else weights.q_a
        self._qkv_split = [first.shape[0], config.kv_lora_rank, config.qk_rope_head_dim]
        self._qkv_a = create_linear(torch.cat((first, weights.kv_a)), few_rows=False, backend=backend)
        self._q_b = None if weights.q_a is None else create_linear(weights.q_b, few_rows=False, backend=backend)
        self._q_a_norm, self._kv_a_norm = weights.q_a_norm, weights.kv_a_norm
        self._kv_b = create_linear(weights.kv_b, few_rows=False, backend=backend)
        self._o = create_linear(weights.o, few_rows=False, backend=backend)

    def __call__(self, x: torch.Tensor, step: PrefillStep) -> torch.Tensor:
        """x [num_tokens, hidden], normalised -> [num_tokens, hidden]; stores the tokens' latents."""
        eps, heads = self._config.latent_norm_eps, self._config.num_attention_heads
        q, latent, k_rope = self._qkv_a(x).split(self._qkv_split, dim=1)
        if self._q_b is not None and self._q_a_norm is not None:
            q = self._q_b(rms_norm(q, self._q_a_norm, eps=eps, backend=self._backend))
        q = q.unflatten(1, (heads, -1))  # [num_tokens, heads, nope + rope]
        rope_(q[..., self._config.qk_nope_head_dim :], step.rotation, backend=self._backend)
        rope_(k_rope.unsqueeze(1), step.rotation, backend=self._backend)
        latent = rms_norm(latent, self._kv_a_norm, eps=eps, backend=self._backend)
        latent_store(latent, k_rope, step.pages, step.rows[self._layer], backend=self._backend)
        k, v = self._up_project(latent, k_rope)
        psum = step.psum_tokens
        out, lse = step.mla.run(q, k, v)
        for i, pieces in enumerate(step.prefixes):
            if pieces:
                rows = slice(psum[i], psum[i + 1])
                out[rows] = self._merge_prefix(q[rows], out[rows], lse[rows], pieces, step.pages)
        return self._o(out.flatten(1))

    def _merge_prefix(
        self, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, pieces: Sequence[PrefixPiece], pages: torch.Tensor
    ) -> torch.Tensor:
        """One request's q [n, heads, qk], with attention to its own chunk (out [n, heads, v], lse [n, heads]) -> to all."""
        for piece in pieces:
            entries = pages[:, self._layer].index_select(0, piece.pages).flatten(0, 1)[: piece.num_tokens].to(q.dtype)  # [m, width]
            latent, k_rope = entries.split([self._config.kv_lora_rank, self._config.qk_rope_head_dim], dim=1)
            k, v = self._up_project(latent, k_rope)
            out, lse = merge_states(out, lse, *piece.mla.run(q, k, v), backend=self._backend)
        return out

    def _up_project(self, latent: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """latent [n, kv_lora], rotated k_rope [n, rope] -> k [n, heads, nope + rope], v [n, heads, v]."""
        heads, config = self._config.num_attention_heads, self._config
        k_nope, v = self._kv_b(latent).unflatten(1, (heads, -1)).split([config.qk_nope_head_dim, config.v_head_dim], dim=2)
        return torch.cat((k_nope, k_rope.unsqueeze(1).expand(-1, heads, -1)), dim=2), v
