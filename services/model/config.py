"""A model folder's `config.json` as one frozen record: Hugging Face's field names, every value checked once, no torch.

Supported now: `model_type: deepseek_v3` with all options that published V3 configs show. What is not supported is an
error that names key, value and what is; a value that is silently ignored would give another model's text.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from services.model.config_fields import Fields, read_block_size, read_yarn
from services.runtime.errors import CheckpointError

_ONLY_SUPPORTED: dict[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
"""Keys with one supported value, which is also what an absent key means."""


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """`rope_scaling` of type yarn."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and options of one model; field names are Hugging Face's, so that a config reads the same everywhere."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    n_shared_experts: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    first_k_dense_replace: int
    moe_layer_freq: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    scoring_func: str
    topk_method: str
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: YarnConfig | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    weight_block_size: tuple[int, int] | None

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key: the part without positions and the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Values cached for a token and layer: the normalised latent, then the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_moe_layer(self, layer: int) -> bool:
        """Whether `layer` (0-based; an MTP layer counts on from `num_hidden_layers`) has experts."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0


def load_config(folder: Path) -> ModelConfig:
    """Read and check `folder/config.json`; raises CheckpointError in one sentence."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; a model folder holds config.json beside its safetensors files") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__} but must hold a JSON object")
    return parse_config(cast("dict[str, object]", raw), str(path))


def parse_config(raw: dict[str, object], source: str) -> ModelConfig:
    """Check a decoded `config.json`; `source` names it in errors, which are CheckpointErrors of one sentence."""
    fields = Fields(raw, source)
    fields.require_only("model_type", "deepseek_v3", required=True)
    for key, value in _ONLY_SUPPORTED.items():
        fields.require_only(key, value)
    theta, yarn = read_yarn(fields)
    heads = fields.integer("num_attention_heads")
    if fields.integer("num_key_value_heads", default=heads) != heads:
        raise fields.error("num_key_value_heads", f"MLA has as many as num_attention_heads ({heads})")
    config = ModelConfig(
        model_type="deepseek_v3",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers"),
        num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", minimum=0, maximum=1, default=0),
        num_attention_heads=heads,
        n_shared_experts=fields.integer("n_shared_experts", minimum=0, default=0),
        n_routed_experts=fields.integer("n_routed_experts"),
        num_experts_per_tok=fields.integer("num_experts_per_tok"),
        n_group=fields.integer("n_group"),
        topk_group=fields.integer("topk_group"),
        first_k_dense_replace=fields.integer("first_k_dense_replace", minimum=0),
        moe_layer_freq=1,
        norm_topk_prob=fields.boolean("norm_topk_prob", default=True),
        routed_scaling_factor=fields.number("routed_scaling_factor"),
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        q_lora_rank=fields.optional_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=None if yarn is None else YarnConfig(*yarn),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        bos_token_id=fields.integer("bos_token_id", minimum=0),
        eos_token_ids=fields.token_ids("eos_token_id"),
        weight_block_size=read_block_size(fields),
    )
    _check_consistent(config, fields)
    return config


def _check_consistent(config: ModelConfig, fields: Fields) -> None:
    """Refuse values that are each legal but contradict one another."""
    experts, groups = config.n_routed_experts, config.n_group
    if experts % groups:
        raise fields.error("n_group", f"it must divide n_routed_experts ({experts})")
    group_size = experts // groups
    if groups > 1 and group_size < 2:
        raise fields.error(
            "n_group", f"a group's score is the sum of two experts, so n_routed_experts ({experts}) needs at most {experts // 2} groups"
        )
    if config.topk_group > groups:
        raise fields.error("topk_group", f"only n_group ({groups}) groups exist")
    if config.num_experts_per_tok > config.topk_group * group_size:
        raise fields.error(
            "num_experts_per_tok", f"the {config.topk_group} chosen groups hold only {config.topk_group * group_size} experts"
        )
    if config.qk_rope_head_dim % 2:
        raise fields.error("qk_rope_head_dim", "rotary pairs need an even number")
    if config.first_k_dense_replace > config.num_hidden_layers:
        raise fields.error("first_k_dense_replace", f"the model has only num_hidden_layers ({config.num_hidden_layers})")
    for key, ids in (("bos_token_id", (config.bos_token_id,)), ("eos_token_id", config.eos_token_ids)):
        if max(ids) >= config.vocab_size:
            raise fields.error(key, f"ids end at vocab_size - 1 ({config.vocab_size - 1})")
