"""DeepSeek V2 and V3 in plain torch, fp32, beside the papers: what all else is tested against. It shares no forward code with the pools.

Read `Reference.hidden` for the layer, `attention` for MLA in its multi-head form, `gate` for the routing, `generate` for Mono.
All norms use `rms_norm_eps` but for the two inside MLA, whose epsilon the published code fixes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from services.model.config import ModelConfig
from services.model.names import EMBED, HEAD, NORM, expert_prefix, layer_prefix
from services.model.params import SamplingParams
from services.model.penalties import PenaltyState
from services.model.sampling import RowState, sample
from services.model.yarn import cos_sin, softmax_scale

Tensor = torch.Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., width], weight [width]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn neighbour pairs (2i, 2i + 1) of x [n, ..., rope] by each token's angles, cos and sin [n, rope / 2]."""
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (cos.shape[-1],)
    cos, sin = cos.view(shape), sin.view(shape)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def gate(logits: Tensor, bias: Tensor | None, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Choose experts; of equal scores the lowest index wins, everywhere.

    logits   [n, n_routed_experts] fp32
    bias     [n_routed_experts] fp32 or None: part of the choice, never of a weight
    returns  indices [n, k] int64 by falling biased score, weights [n, k] with routed_scaling_factor applied
    """
    n, k = logits.shape[0], config.num_experts_per_tok
    scores = logits.softmax(-1) if config.scoring_func == "softmax" else logits.sigmoid()
    biased = scores if bias is None else scores + bias
    groups = biased.view(n, config.n_group, -1)  # [n, n_group, experts of a group]
    num_best = 2 if config.topk_method == "noaux_tc" else 1  # V3 judges a group by its two best, V2 by its best
    group_scores = groups.sort(dim=-1, descending=True).values[..., :num_best].sum(-1)
    chosen = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, : config.topk_group]
    masked = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, chosen, False)
    order = groups.masked_fill(masked[..., None], -torch.inf).flatten(1).sort(dim=-1, descending=True, stable=True)
    topk_idx = order.indices[:, :k]
    weights = scores.gather(1, topk_idx)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return topk_idx, weights * config.routed_scaling_factor


class Cache:
    """Plain KV cache of some layers: for each, the normalised latent [n, kv_lora_rank] and the rotated key [n, rope] of all tokens."""

    def __init__(self, num_layers: int) -> None:
        self.latent: list[Tensor | None] = [None] * num_layers
        self.k_rope: list[Tensor | None] = [None] * num_layers

    @property
    def num_tokens(self) -> int:
        """Tokens whose entries are held."""
        first = self.latent[0]
        return 0 if first is None else first.shape[0]

    def append(self, layer: int, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens' entries and return those of all tokens."""
        old_latent, old_k_rope = self.latent[layer], self.k_rope[layer]
        if old_latent is not None and old_k_rope is not None:
            latent, k_rope = torch.cat((old_latent, latent)), torch.cat((old_k_rope, k_rope))
        self.latent[layer], self.k_rope[layer] = latent, k_rope
        return latent, k_rope


@dataclass(slots=True)
class Generated:
    """What Mono says for one choice."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])  # of the raw logits, for every token
    finish_reason: str = ""  # "stop" (EOS or a stop id, which is the last token) or "length"
    scores: list[Tensor] = field(default_factory=list[Tensor])  # each [vocab]: after filters and noise


class Reference:
    """The model over Hugging Face's tensor names, fp32 on CPU (`load_tensors`)."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
        self.config, self._tensors = config, tensors
        self._embed = tensors[EMBED]
        self._head = self._embed if config.tie_word_embeddings else tensors[HEAD]

    def new_cache(self) -> Cache:
        """An empty cache of the decoder layers."""
        return Cache(self.config.num_hidden_layers)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """ids [n] int64, following what `cache` holds -> logits [n, vocab]; row i is for the token after ids[i]."""
        return self.logits(self.hidden(ids, cache))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden], after a final norm -> [n, vocab]."""
        return F.linear(hidden, self._head)

    @torch.inference_mode()
    def hidden(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """As `forward`, up to and including the final norm: [n, hidden]. This is the h_i that the MTP layer takes."""
        cache = self.new_cache() if cache is None else cache
        start = cache.num_tokens
        x = self._embed[ids]  # [n, hidden]
        for layer in range(self.config.num_hidden_layers):
            x = self._layer(x, layer, start, cache, layer)
        return rms_norm(x, self._tensors[NORM], self.config.rms_norm_eps)

    @torch.inference_mode()
    def mtp_logits(self, hidden: Tensor, next_ids: Tensor, cache: Cache) -> Tensor:
        """Drafts of the first MTP layer.

        hidden    [n, hidden]  h_i of `Reference.hidden`, tokens in order after what `cache` holds
        next_ids  [n] int64    the token after each: row i is (h_i, embedding of token i + 1), rotated by position i
        cache     Cache(1), the MTP layer's own; slot i is row i
        returns   [n, vocab]; row i is for token i + 2: the layer's own final norm, then the shared head
        """
        layer, eps = self.config.num_hidden_layers, self.config.rms_norm_eps
        prefix = layer_prefix(layer)
        embedded = rms_norm(self._embed[next_ids], self._tensors[f"{prefix}enorm.weight"], eps)
        previous = rms_norm(hidden, self._tensors[f"{prefix}hnorm.weight"], eps)
        x = F.linear(torch.cat((embedded, previous), dim=-1), self._tensors[f"{prefix}eh_proj.weight"])
        x = self._layer(x, layer, cache.num_tokens, cache, 0)
        return self.logits(rms_norm(x, self._tensors[f"{prefix}shared_head.norm.weight"], eps))

    def generate(self, prompt_ids: Sequence[int], params: SamplingParams, choice: int = 0) -> Generated:
        """Mono: one token at a time, one request, fp32; scores are kept a step for the rule of equality."""
        config, out, cache = self.config, Generated(), self.new_cache()
        penalties = PenaltyState(prompt_ids) if params.has_penalties else None
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(config.eos_token_ids))
        ids = torch.tensor(prompt_ids)
        while not out.finish_reason:
            logits = self.forward(ids, cache)[-1:]
            row = RowState(
                params=params,
                choice=choice,
                position=len(prompt_ids) + len(out.token_ids),
                num_output_tokens=len(out.token_ids),
                eos_token_ids=config.eos_token_ids,
                penalties=penalties,
            )
            sampled = sample(logits, [row], return_scores=True)
            token = int(sampled.token_ids[0])
            out.token_ids.append(token)
            out.logprobs.append(float(logits.log_softmax(-1)[0, token]))
            assert sampled.scores is not None
            out.scores.append(sampled.scores[0])
            if penalties is not None:
                penalties.add(token)
            ids = torch.tensor([token])
            out.finish_reason = "stop" if token in ends else "length" if len(out.token_ids) == params.max_tokens else ""
        return out

    def _layer(self, x: Tensor, layer: int, start: int, cache: Cache, slot: int) -> Tensor:
        """x [n, hidden] at positions start.. -> [n, hidden]; `slot` is the layer's place in `cache`."""
        prefix, eps = layer_prefix(layer), self.config.rms_norm_eps
        normed = rms_norm(x, self._tensors[f"{prefix}input_layernorm.weight"], eps)
        x = x + self._attention(normed, f"{prefix}self_attn.", start, cache, slot)
        normed = rms_norm(x, self._tensors[f"{prefix}post_attention_layernorm.weight"], eps)
        return x + (self.moe(normed, layer) if self.config.is_moe_layer(layer) else self._mlp(normed, f"{prefix}mlp."))

    def _attention(self, x: Tensor, prefix: str, start: int, cache: Cache, slot: int) -> Tensor:
        """MLA, multi-head form: x [n, hidden] -> [n, hidden]."""
        config, n, heads = self.config, x.shape[0], self.config.num_attention_heads
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        cos, sin = cos_sin(config, torch.arange(start, start + n))

        q_nope, q_rope = self._query(x, prefix).view(n, heads, nope + rope).split((nope, rope), dim=-1)  # [n, heads, ...]
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), dim=-1)

        latent, k_rope = self._linear(x, f"{prefix}kv_a_proj_with_mqa").split((config.kv_lora_rank, rope), dim=-1)
        latent = rms_norm(latent, self._tensors[f"{prefix}kv_a_layernorm.weight"], config.latent_norm_eps)
        latent, k_rope = cache.append(slot, latent, rotate(k_rope, cos, sin))  # [total, ...]: all that is cached

        total = latent.shape[0]
        kv = self._linear(latent, f"{prefix}kv_b_proj").view(total, heads, nope + config.v_head_dim)
        k_nope, v = kv.split((nope, config.v_head_dim), dim=-1)
        k = torch.cat((k_nope, k_rope[:, None].expand(-1, heads, -1)), dim=-1)  # [total, heads, nope + rope]

        scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale(config)
        future = torch.ones(n, total, dtype=torch.bool).triu(diagonal=start + 1)
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)
        return self._linear(attended.flatten(1), f"{prefix}o_proj")

    def _query(self, x: Tensor, prefix: str) -> Tensor:
        """x [n, hidden] -> [n, heads * (nope + rope)], through the low rank where the config has one."""
        if self.config.q_lora_rank is None:
            return self._linear(x, f"{prefix}q_proj")
        low = rms_norm(self._linear(x, f"{prefix}q_a_proj"), self._tensors[f"{prefix}q_a_layernorm.weight"], self.config.latent_norm_eps)
        return self._linear(low, f"{prefix}q_b_proj")

    def moe(self, x: Tensor, layer: int) -> Tensor:
        """x [n, hidden] -> [n, hidden]: the chosen experts, weighted, plus the shared expert as it is."""
        prefix = f"{layer_prefix(layer)}mlp."
        bias = self._tensors.get(f"{prefix}gate.e_score_correction_bias")
        topk_idx, topk_weights = gate(self._linear(x, f"{prefix}gate"), bias, self.config)
        out = self._mlp(x, f"{prefix}shared_experts.") if self.config.n_shared_experts else torch.zeros_like(x)
        for expert in topk_idx.unique().tolist():
            token, slot = (topk_idx == expert).nonzero(as_tuple=True)
            out.index_add_(0, token, self._mlp(x[token], expert_prefix(layer, expert)) * topk_weights[token, slot, None])
        return out

    def _mlp(self, x: Tensor, prefix: str) -> Tensor:
        return self._linear(F.silu(self._linear(x, f"{prefix}gate_proj")) * self._linear(x, f"{prefix}up_proj"), f"{prefix}down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"])
