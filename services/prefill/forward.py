"""One prefill step of one rank: a ragged batch of prompt chunks in, latents into the pages, logits of the last tokens out."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.backend import Backend
from kernels.latent_store import pool_rows
from kernels.linear import create_linear
from kernels.mla_prefill import MlaPrefill, MlaPrefillShape, create_mla_prefill
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import rotations
from services.model.config import ModelConfig
from services.model.weights import LayerWeights, MlpWeights, ModelWeights
from services.model.yarn import cos_sin_table, softmax_scale
from services.prefill.attention import PREFIX_PIECE_PAGES, PrefillAttention, PrefillStep, PrefixPiece
from services.prefill.experts import PrefillExperts, PrefillMlp


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive tokens of one prompt.

    token_ids    at least one
    start        absolute position of the first; the positions before it are read from the pages
    page_table   page numbers covering the positions 0 .. start + len(token_ids) - 1
    want_logits  whether the logits after the chunk's last token are returned
    """

    token_ids: Sequence[int]
    start: int
    page_table: Sequence[int]
    want_logits: bool

    @property
    def positions(self) -> range:
        """Absolute positions of the chunk's tokens."""
        return range(self.start, self.start + len(self.token_ids))


class PrefillLayer:
    """One decoder layer; the residual's addition is left to the next norm."""

    def __init__(self, config: ModelConfig, weights: LayerWeights, layer: int, backend: Backend) -> None:
        self._eps = config.rms_norm_eps
        self._backend: Backend = backend
        self._input_norm, self._post_attention_norm = weights.input_norm, weights.post_attention_norm
        self._attention = PrefillAttention(config, weights.attention, layer, backend)
        mlp = weights.mlp
        self._mlp = PrefillMlp(mlp, backend) if isinstance(mlp, MlpWeights) else PrefillExperts(config, mlp, backend)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, step: PrefillStep) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, residual), each [num_tokens, hidden] and summing to the stream before the layer -> the same after it."""
        if residual is None:
            normed, residual = rms_norm(x, self._input_norm, eps=self._eps, backend=self._backend), x
        else:
            normed, residual = add_rms_norm(x, residual, self._input_norm, eps=self._eps, backend=self._backend)
        attended = self._attention(normed, step)
        normed, residual = add_rms_norm(attended, residual, self._post_attention_norm, eps=self._eps, backend=self._backend)
        return self._mlp(normed), residual


class PrefillForward:
    """The model as prefill runs it; weights are laid out once here, the ones given may be dropped afterwards."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, *, backend: Backend = "auto") -> None:
        self._config = config
        self._backend: Backend = backend
        self._embed, self._norm = weights.embed, weights.norm
        qk_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        self._mla_shape = MlaPrefillShape(config.num_attention_heads, qk_dim, config.v_head_dim, softmax_scale(config))
        with torch.inference_mode():
            cos, sin = cos_sin_table(config, config.max_position_embeddings)
            self._rotations = rotations(cos.to(weights.embed.dtype), sin.to(weights.embed.dtype))  # [positions, rope / 2]
            # `map` holds no layer while the next one is read, as a loop's variable would
            self._layers = list(map(lambda layer, i: PrefillLayer(config, layer, i, backend), weights.layers, itertools.count()))
            self._head = create_linear(weights.head, few_rows=False, backend=backend)

    @torch.inference_mode()
    def run(self, pages: torch.Tensor, batch: Sequence[PrefillChunk]) -> torch.Tensor:
        """Compute the chunks, writing their latents into their pages.

        pages    [num_pages, num_layers, page_size, latent_width]
        batch    chunks of different requests, none empty
        returns  [num_wanted, vocab_size] in the weights' dtype: logits after the last token of each chunk that wants them,
                 in the batch's order
        """
        psum = [0]
        for chunk in batch:
            psum.append(psum[-1] + len(chunk.token_ids))
        wanted = [end - 1 for end, chunk in zip(psum[1:], batch, strict=True) if chunk.want_logits]
        if not batch:
            return self._embed.new_zeros(0, self._config.vocab_size)
        ids = torch.tensor([token for chunk in batch for token in chunk.token_ids], dtype=torch.int64)
        x, residual, step = self._embed.index_select(0, ids), None, self._plan(pages, batch, psum)
        for layer in self._layers:
            x, residual = layer(x, residual, step)
        last = torch.tensor(wanted, dtype=torch.int64)
        x = x.index_select(0, last)
        if residual is not None:
            x = x + residual.index_select(0, last)
        return self._head(rms_norm(x, self._norm, eps=self._config.rms_norm_eps, backend=self._backend))

    def _plan(self, pages: torch.Tensor, batch: Sequence[PrefillChunk], psum: Sequence[int]) -> PrefillStep:
        """Everything that the layers share: where entries go, where prefixes lie, how positions rotate."""
        positions = torch.cat([torch.arange(chunk.start, chunk.positions.stop) for chunk in batch])
        rows = pool_rows([chunk.page_table for chunk in batch], [chunk.positions for chunk in batch], pages.shape[1], pages.shape[2])
        prefixes = [self._prefix_pieces(chunk, pages.shape[2]) for chunk in batch]
        mla = self._planned(psum, psum, causal=True)
        return PrefillStep(pages, self._rotations.index_select(0, positions), rows.unbind(0), psum, prefixes, mla)

    def _prefix_pieces(self, chunk: PrefillChunk, page_size: int) -> list[PrefixPiece]:
        """Cut the cached positions 0 .. start - 1 into pieces of whole pages (the last page may be part full)."""
        tokens, pieces = PREFIX_PIECE_PAGES * page_size, list[PrefixPiece]()
        for begin in range(0, chunk.start, tokens):
            num = min(tokens, chunk.start - begin)
            table = torch.tensor(chunk.page_table[begin // page_size : -(-(begin + num) // page_size)], dtype=torch.int64)
            pieces.append(PrefixPiece(table, num, self._planned((0, len(chunk.token_ids)), (0, num), causal=False)))
        return pieces

    def _planned(self, psum_q: Sequence[int], psum_k: Sequence[int], *, causal: bool) -> MlaPrefill:
        mla = create_mla_prefill(self._mla_shape, backend=self._backend, dtype=self._embed.dtype)
        mla.plan(psum_q, psum_k, causal=causal)
        return mla
