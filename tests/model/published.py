"""Values of published config.json files (facts), as far as this code reads them."""

_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": False}  # fmt: skip
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}

V3: dict[str, object] = _MLA | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_nextn_predict_layers": 1,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "q_lora_rank": 1536, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "max_position_embeddings": 163840, "bos_token_id": 0,
    "eos_token_id": 1, "quantization_config": _FP8,
}  # fmt: skip

V3_1: dict[str, object] = V3 | {"quantization_config": _FP8 | {"scale_fmt": "ue8m0"}}

V2: dict[str, object] = _MLA | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 5120,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 60, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 2, "n_routed_experts": 160, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3,
    "first_k_dense_replace": 1, "norm_topk_prob": False, "routed_scaling_factor": 16.0, "scoring_func": "softmax",
    "topk_method": "group_limited_greedy", "q_lora_rank": 1536, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "max_position_embeddings": 163840, "bos_token_id": 100000,
    "eos_token_id": 100001,
}  # fmt: skip

V2_LITE: dict[str, object] = V2 | {
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_routed_experts": 64, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "topk_method": "greedy",
    "q_lora_rank": None, "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip

MOONLIGHT: dict[str, object] = _MLA | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 163840, "hidden_size": 2048,
    "intermediate_size": 11264, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_nextn_predict_layers": 0,
    "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.446,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "q_lora_rank": None, "rms_norm_eps": 1e-05, "rope_theta": 50000.0,
    "max_position_embeddings": 8192, "bos_token_id": 163584, "eos_token_id": 163586,
}  # fmt: skip

KIMI_K2: dict[str, object] = V3 | {
    "model_type": "kimi_k2", "vocab_size": 163840, "num_nextn_predict_layers": 0, "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827,
    "rope_theta": 50000.0, "max_position_embeddings": 131072, "bos_token_id": 163584, "eos_token_id": 163585,
    "rope_scaling": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0,
                     "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip

PUBLISHED = {"v3": V3, "v3_1": V3_1, "v2": V2, "v2_lite": V2_LITE, "moonlight": MOONLIGHT, "kimi_k2": KIMI_K2}
