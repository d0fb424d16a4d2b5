"""Hugging Face tensor names of a DeepSeek checkpoint with the shape that the config gives each: a literal table.

The MTP layer follows the decoder layers as `model.layers.{num_hidden_layers}`: an ordinary layer plus two input norms,
the projection of both inputs and its own final norm. Its embedding and head are the model's, which a checkpoint may repeat.
"""

from services.model.config import ModelConfig

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
SCALE_SUFFIX = "_scale_inv"

Shapes = dict[str, tuple[int, ...]]


def layer_prefix(layer: int) -> str:
    """`model.layers.3.`; the MTP layer is `num_hidden_layers`."""
    return f"model.layers.{layer}."


def expert_prefix(layer: int, expert: int) -> str:
    """`model.layers.3.mlp.experts.7.`"""
    return f"model.layers.{layer}.mlp.experts.{expert}."


def model_shapes(config: ModelConfig) -> Shapes:
    """Every tensor that the model without its MTP layer must have."""
    shapes: Shapes = {EMBED: (config.vocab_size, config.hidden_size), NORM: (config.hidden_size,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        shapes |= _layer_shapes(config, layer)
    return shapes


def mtp_shapes(config: ModelConfig) -> Shapes:
    """Every tensor that the MTP layer must have; empty when the config has none."""
    hidden, shapes = config.hidden_size, Shapes()
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers):
        prefix = layer_prefix(layer)
        shapes |= _layer_shapes(config, layer)
        shapes |= {f"{prefix}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
        shapes[f"{prefix}eh_proj.weight"] = (hidden, 2 * hidden)
    return shapes


def repeated_shapes(config: ModelConfig) -> Shapes:
    """Tensors that a checkpoint may hold though they say nothing new: the model has them once, or computes them from the config."""
    shapes: Shapes = {HEAD: (config.vocab_size, config.hidden_size)} if config.tie_word_embeddings else {}
    for layer in range(config.num_hidden_layers):  # Moonlight and Kimi K2 have these
        shapes[f"{layer_prefix(layer)}self_attn.rotary_emb.inv_freq"] = (config.qk_rope_head_dim // 2,)
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers):
        for name in ("embed_tokens", "shared_head.head"):
            shapes[f"{layer_prefix(layer)}{name}.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def mlp_shapes(prefix: str, hidden: int, intermediate: int) -> Shapes:
    """The three matrices of one gated MLP."""
    return {
        f"{prefix}gate_proj.weight": (intermediate, hidden),
        f"{prefix}up_proj.weight": (intermediate, hidden),
        f"{prefix}down_proj.weight": (hidden, intermediate),
    }


def _layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    prefix, hidden = layer_prefix(layer), config.hidden_size
    shapes: Shapes = {f"{prefix}input_layernorm.weight": (hidden,), f"{prefix}post_attention_layernorm.weight": (hidden,)}
    shapes |= _attention_shapes(config, f"{prefix}self_attn.")
    if not config.is_moe_layer(layer):
        return shapes | mlp_shapes(f"{prefix}mlp.", hidden, config.intermediate_size)
    shapes[f"{prefix}mlp.gate.weight"] = (config.n_routed_experts, hidden)
    if config.topk_method == "noaux_tc":
        shapes[f"{prefix}mlp.gate.e_score_correction_bias"] = (config.n_routed_experts,)
    for expert in range(config.n_routed_experts):
        shapes |= mlp_shapes(expert_prefix(layer, expert), hidden, config.moe_intermediate_size)
    if config.n_shared_experts:
        shapes |= mlp_shapes(f"{prefix}mlp.shared_experts.", hidden, config.n_shared_experts * config.moe_intermediate_size)
    return shapes


def _attention_shapes(config: ModelConfig, prefix: str) -> Shapes:
    heads, hidden, latent = config.num_attention_heads, config.hidden_size, config.kv_lora_rank
    shapes: Shapes = {
        f"{prefix}kv_a_proj_with_mqa.weight": (latent + config.qk_rope_head_dim, hidden),
        f"{prefix}kv_a_layernorm.weight": (latent,),
        f"{prefix}kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), latent),
        f"{prefix}o_proj.weight": (hidden, heads * config.v_head_dim),
    }
    if config.q_lora_rank is None:
        return shapes | {f"{prefix}q_proj.weight": (heads * config.qk_head_dim, hidden)}
    return shapes | {
        f"{prefix}q_a_proj.weight": (config.q_lora_rank, hidden),
        f"{prefix}q_a_layernorm.weight": (config.q_lora_rank,),
        f"{prefix}q_b_proj.weight": (heads * config.qk_head_dim, config.q_lora_rank),
    }
