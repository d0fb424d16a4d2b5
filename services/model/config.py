"""A model folder's `config.json` as one frozen record: Hugging Face's field names, every value checked once, no torch.

Supported are the model types of `families.py` with all options that their published configs show. What is not supported
is an error that names key, value and what is; a value that is silently ignored would give another model's text.
"""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from services.model.config_fields import Fields, read_block_size, read_yarn
from services.model.families import FAMILIES, LATENT_NORM_EPS, ONLY_SUPPORTED
from services.runtime.errors import CheckpointError, ConfigError


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
    def latent_norm_eps(self) -> float:
        """Epsilon of the two norms inside MLA."""
        return LATENT_NORM_EPS

    @property
    def latent_width(self) -> int:
        """Values cached for a token and layer: the normalised latent, then the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_moe_layer(self, layer: int) -> bool:
        """Whether `layer` (0-based; an MTP layer counts on from `num_hidden_layers`) has experts."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0


def max_model_len(config: ModelConfig, wanted: int, folder: Path) -> int:
    """Tokens of prompt and output together: `wanted`, 0 = all that the model allows. Raises ConfigError for more than that."""
    if wanted > config.max_position_embeddings:
        possible = f"{folder} supports {config.max_position_embeddings} tokens"
        raise ConfigError(f"model.max_model_len is {wanted} but {possible}; lower it, or 0 for all")
    return wanted or config.max_position_embeddings


def load_config(folder: Path) -> ModelConfig:
    """Read and check `folder/config.json` (or `folder` itself, a file); raises CheckpointError in one sentence.

    A `generation_config.json` beside it adds its end tokens: Kimi K2's chat turns end with one that config.json lacks.
    """
    path = folder if os.path.isfile(folder) else folder / "config.json"  # Path.is_file raises over a name that is too long
    raw = _read_object(path)
    if raw is None:
        raise CheckpointError(f"{path} does not exist; a model folder holds config.json beside its safetensors files")
    config = parse_config(raw, str(path))
    beside = path.with_name("generation_config.json")
    generation = Fields(_read_object(beside) or {}, str(beside))
    if generation.get("eos_token_id") is None:
        return config
    eos = tuple(dict.fromkeys((*config.eos_token_ids, *generation.token_ids("eos_token_id", config.vocab_size))))
    return dataclasses.replace(config, eos_token_ids=eos)


def _read_object(path: Path) -> dict[str, object] | None:
    """The JSON object in `path`, None when there is no such file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__} but must hold a JSON object")
    return cast("dict[str, object]", raw)


def parse_config(raw: dict[str, object], source: str) -> ModelConfig:
    """Check a decoded `config.json`; `source` names it in errors, which are CheckpointErrors of one sentence."""
    fields = Fields(raw, source)
    model_type = fields.choice("model_type", tuple(FAMILIES), required=True)
    family = FAMILIES[model_type]
    if fields.get("architectures") not in (None, [family.architecture]):
        raise fields.error("architectures", f"model_type {model_type!r} goes with {[family.architecture]!r}")
    for key, value in ONLY_SUPPORTED.items():
        fields.require_only(key, value)
    theta, yarn = read_yarn(fields)
    heads, vocab_size = fields.integer("num_attention_heads"), fields.integer("vocab_size")
    if fields.integer("num_key_value_heads", default=heads) != heads:
        raise fields.error("num_key_value_heads", f"MLA has as many as num_attention_heads ({heads})")
    topk_method = fields.choice("topk_method", family.topk_methods, required=len(family.topk_methods) > 1)
    groups = 1 if topk_method == "greedy" else None  # greedy has none: configs may leave them out
    config = ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers", maximum=1024),
        num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", minimum=0, maximum=family.max_mtp_layers, default=0),
        num_attention_heads=heads,
        n_shared_experts=fields.integer("n_shared_experts", minimum=0, default=0),
        n_routed_experts=fields.integer("n_routed_experts", maximum=4096),
        num_experts_per_tok=fields.integer("num_experts_per_tok"),
        n_group=fields.integer("n_group", default=groups),
        topk_group=fields.integer("topk_group", default=groups),
        first_k_dense_replace=fields.integer("first_k_dense_replace", minimum=0),
        moe_layer_freq=1,
        norm_topk_prob=fields.choice("norm_topk_prob", family.norm_topk_probs),
        routed_scaling_factor=fields.number("routed_scaling_factor"),
        scoring_func=fields.choice("scoring_func", family.scoring_funcs),
        topk_method=topk_method,
        q_lora_rank=fields.optional_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
        rms_norm_eps=fields.number("rms_norm_eps", maximum=1.0),
        rope_theta=theta,
        rope_scaling=None if yarn is None else YarnConfig(*yarn),
        max_position_embeddings=fields.integer("max_position_embeddings", minimum=2),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        bos_token_id=fields.integer("bos_token_id", minimum=0, maximum=vocab_size - 1),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
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
    if config.topk_method == "greedy" and groups > 1:
        raise fields.error("n_group", "topk_method 'greedy' has no groups, only 1 is supported with it")
    if config.topk_method == "noaux_tc" and groups > 1 and group_size < 2:
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
