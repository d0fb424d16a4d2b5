"""One decode step of one rank: a token a request in, a row of logits a request out, latents appended to the pages."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.latent_store import pool_rows
from kernels.linear import create_linear
from kernels.mla_decode import MlaDecodeShape, create_mla_decode
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import rotations
from services.decode.attention import DecodeAttention, DecodeStep
from services.decode.experts import DecodeExperts, DecodeMlp
from services.model.config import ModelConfig
from services.model.weights import LayerWeights, MlpWeights, ModelWeights
from services.model.yarn import cos_sin_table, softmax_scale


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One step's work, a request each.

    token_ids    the token to feed
    positions    its absolute position; its entry goes to that slot, and it attends to the positions 0 .. position
    page_tables  page numbers covering 0 .. position, all entries before `position` written; no two requests may append
                 to one page
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    page_tables: Sequence[Sequence[int]]


class DecodeLayer:
    """One decoder layer; the residual's addition is left to the next norm."""

    def __init__(self, config: ModelConfig, weights: LayerWeights, layer: int, backend: Backend) -> None:
        self._eps = config.rms_norm_eps
        self._backend: Backend = backend
        self._input_norm, self._post_attention_norm = weights.input_norm, weights.post_attention_norm
        self._attention = DecodeAttention(config, weights.attention, layer, backend)
        mlp = weights.mlp
        self._mlp = DecodeMlp(mlp, backend) if isinstance(mlp, MlpWeights) else DecodeExperts(config, mlp, backend)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, step: DecodeStep) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, residual), each [batch, hidden] and summing to the stream before the layer -> the same after it."""
        if residual is None:
            normed, residual = rms_norm(x, self._input_norm, eps=self._eps, backend=self._backend), x
        else:
            normed, residual = add_rms_norm(x, residual, self._input_norm, eps=self._eps, backend=self._backend)
        attended = self._attention(normed, step)
        normed, residual = add_rms_norm(attended, residual, self._post_attention_norm, eps=self._eps, backend=self._backend)
        return self._mlp(normed), residual


class DecodeForward:
    """The model as decode runs it; weights are laid out once here, the ones given may be dropped afterwards."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, *, backend: Backend = "auto") -> None:
        self._config = config
        self._backend: Backend = backend
        self._embed, self._norm = weights.embed, weights.norm
        with torch.inference_mode():
            cos, sin = cos_sin_table(config, config.max_position_embeddings)
            self._rotations = rotations(cos.to(weights.embed.dtype), sin.to(weights.embed.dtype))  # [positions, rope / 2]
            # `map` holds no layer while the next one is read, as a loop's variable would
            self._layers = list(map(lambda layer, i: DecodeLayer(config, layer, i, backend), weights.layers, itertools.count()))
            self._head = create_linear(weights.head, backend=backend)
        shape = MlaDecodeShape(config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim, softmax_scale(config))
        self._mla = create_mla_decode(shape, backend=backend, dtype=weights.embed.dtype)

    @torch.inference_mode()
    def run(self, pages: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """Feed each request's token and return the logits after it.

        pages    [num_pages, num_layers, page_size, latent_width]; written at each request's position, read before it
        returns  [batch, vocab_size] in the weights' dtype
        """
        if not batch.token_ids:
            return self._embed.new_zeros(0, self._config.vocab_size)
        positions = torch.tensor(batch.positions, dtype=torch.int64)
        appended = [range(position, position + 1) for position in batch.positions]
        rows = pool_rows(batch.page_tables, appended, pages.shape[1], pages.shape[2])  # [num_layers, batch]
        self._mla.plan(pages, batch.page_tables, [position + 1 for position in batch.positions])
        step = DecodeStep(pages, self._rotations.index_select(0, positions), rows.unbind(0), self._mla)
        x, residual = self._embed.index_select(0, torch.tensor(batch.token_ids, dtype=torch.int64)), None
        for layer in self._layers:
            x, residual = layer(x, residual, step)
        if residual is not None:
            x = x + residual
        return self._head(rms_norm(x, self._norm, eps=self._config.rms_norm_eps, backend=self._backend))
