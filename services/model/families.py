"""The published models that one code covers, and what each family's config may say: a literal table, no torch.

Where the published code and transformers disagree about a value, that value is refused rather than guessed:
DeepSeek-V2's own gate drops `routed_scaling_factor` when `norm_topk_prob` is true, transformers' never normalises.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """What `config.json` of one `model_type` may hold, each first value the default of an absent key."""

    architecture: str  # the class that `architectures` names
    scoring_funcs: tuple[str, ...]
    topk_methods: tuple[str, ...]
    norm_topk_probs: tuple[bool, ...]
    max_mtp_layers: int


_V3 = Family("DeepseekV3ForCausalLM", ("sigmoid",), ("noaux_tc",), (True, False), 1)

FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family("DeepseekV2ForCausalLM", ("softmax",), ("greedy", "group_limited_greedy"), (False,), 0),  # V2, V2-Lite, V2.5
    "deepseek_v3": _V3,  # V3, R1, V3.1, Moonlight
    "kimi_k2": _V3,
}

ONLY_SUPPORTED: dict[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "qk_layernorm": False,
    "rope_interleave": True,
    "moe_layer_freq": 1,
}
"""Keys with one supported value in every family, which is also what an absent key means."""

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms inside MLA (q_a and kv_a), whatever `rms_norm_eps` says: so have the published code and transformers.
Moonlight's `rms_norm_eps` is 1e-5."""
