"""Where each checkpoint tensor ends up in a rank's `ModelWeights`: destinations are slices of tensors that stay.

Gate and up projections become one matrix and the experts of a layer one stack, so the pools run one GEMM each.
"""

from dataclasses import dataclass

import torch

from services.model.config import ModelConfig
from services.model.names import EMBED, HEAD, NORM, expert_prefix, layer_prefix
from services.model.split import Region, kept_region
from services.model.weights import AttentionWeights, LayerWeights, MlpWeights, MoeWeights


@dataclass(frozen=True, slots=True)
class Destination:
    """The memory for a region of a stored tensor."""

    out: torch.Tensor  # [rows of the region, its columns] fp32, contiguous
    region: Region


class Placement:
    """Makes the memory for a rank with `experts` and `heads`; `destinations[name]` is where that tensor is to be written."""

    def __init__(self, config: ModelConfig, experts: range, heads: range) -> None:
        self._config, self._experts, self._heads = config, experts, heads
        self.destinations: dict[str, Destination] = {}

    def ends(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Embedding, final norm and head."""
        config = self._config
        embed = self._new(EMBED, config.vocab_size, config.hidden_size)
        head = embed if config.tie_word_embeddings else self._new(HEAD, config.vocab_size, config.hidden_size)
        return embed, self._new(NORM, config.hidden_size), head

    def _new(self, name: str, *shape: int) -> torch.Tensor:
        """Memory for what the rank keeps of the tensor `name` of `shape`."""
        region = kept_region(self._config, name, shape, self._experts, self._heads)
        assert region is not None, name
        out = _empty(len(region.rows), len(region.columns))
        self.destinations[name] = Destination(out, region)
        return out.flatten() if len(shape) == 1 else out

    def _put(self, name: str, out: torch.Tensor) -> None:
        """All of the tensor `name` goes to `out` [rows, columns]."""
        self.destinations[name] = Destination(out, Region(range(out.shape[0]), range(out.shape[1])))

    def layer(self, layer: int) -> LayerWeights:
        """One decoder layer."""
        config, prefix = self._config, layer_prefix(layer)
        return LayerWeights(
            input_norm=self._new(f"{prefix}input_layernorm.weight", config.hidden_size),
            attention=self._attention(f"{prefix}self_attn."),
            post_attention_norm=self._new(f"{prefix}post_attention_layernorm.weight", config.hidden_size),
            mlp=self._moe(layer) if config.is_moe_layer(layer) else self._mlp(f"{prefix}mlp.", config.intermediate_size),
        )

    def _attention(self, prefix: str) -> AttentionWeights:
        config = self._config
        heads, hidden, latent, rank = config.num_attention_heads, config.hidden_size, config.kv_lora_rank, config.q_lora_rank
        q_b_name, q_b_in = (f"{prefix}q_proj.weight", hidden) if rank is None else (f"{prefix}q_b_proj.weight", rank)
        return AttentionWeights(
            q_a=None if rank is None else self._new(f"{prefix}q_a_proj.weight", rank, hidden),
            q_a_norm=None if rank is None else self._new(f"{prefix}q_a_layernorm.weight", rank),
            q_b=self._new(q_b_name, heads * config.qk_head_dim, q_b_in),
            kv_a=self._new(f"{prefix}kv_a_proj_with_mqa.weight", config.latent_width, hidden),
            kv_a_norm=self._new(f"{prefix}kv_a_layernorm.weight", latent),
            kv_b=self._new(f"{prefix}kv_b_proj.weight", heads * (config.qk_nope_head_dim + config.v_head_dim), latent),
            o=self._new(f"{prefix}o_proj.weight", hidden, heads * config.v_head_dim),
        )

    def _mlp(self, prefix: str, intermediate: int) -> MlpWeights:
        hidden = self._config.hidden_size
        mlp = MlpWeights(gate_up=_empty(2 * intermediate, hidden), down=_empty(hidden, intermediate))
        self._place_mlp(prefix, mlp.gate_up, mlp.down)
        return mlp

    def _place_mlp(self, prefix: str, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """gate_up [2 * intermediate, hidden], down [hidden, intermediate]."""
        gate, up = gate_up.chunk(2)
        for name, out in (("gate", gate), ("up", up), ("down", down)):
            self._put(f"{prefix}{name}_proj.weight", out)

    def _moe(self, layer: int) -> MoeWeights:
        config, prefix = self._config, f"{layer_prefix(layer)}mlp."
        hidden, intermediate = config.hidden_size, config.moe_intermediate_size
        gate_up = _empty(len(self._experts), 2 * intermediate, hidden)
        down = _empty(len(self._experts), hidden, intermediate)
        for local, expert in enumerate(self._experts):
            self._place_mlp(expert_prefix(layer, expert), gate_up[local], down[local])
        has_bias = config.topk_method == "noaux_tc"
        return MoeWeights(
            gate=self._new(f"{prefix}gate.weight", config.n_routed_experts, hidden),
            bias=self._new(f"{prefix}gate.e_score_correction_bias", config.n_routed_experts) if has_bias else None,
            gate_up=gate_up,
            down=down,
            shared=self._mlp(f"{prefix}shared_experts.", config.n_shared_experts * intermediate) if config.n_shared_experts else None,
        )


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32)
