"""Small random checkpoints of every supported family, written with the names, types and quantisation of the published ones.

`published` values that matter to the arithmetic (gate, scaling, norms, YaRN, what is null) are kept; sizes are not.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.model.config import ModelConfig, parse_config
from services.model.families import FAMILIES
from services.model.names import model_shapes
from tests.tiny_model import YARN, quantise, random_tensors, tiny_raw, write_checkpoint

ORIGINAL_LENGTH = 32  # YARN's: every test here goes well beyond it

_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_nextn_predict_layers": 0,
    "n_shared_experts": 2,
    "n_routed_experts": 16,
    "num_experts_per_tok": 6,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_ODD = {"hidden_size": 160, "moe_intermediate_size": 136}  # partial FP8 blocks in rows and columns

FAMILY_CASES: dict[str, dict[str, object]] = {
    "v3": _ODD | {"rope_scaling": YARN | {"factor": 40}},
    "v3_1": _ODD | {"rope_scaling": YARN | {"factor": 40}},
    "v2": _V2 | {"n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0,
                 "rope_scaling": YARN | {"factor": 40}},
    "v2_lite": _V2 | _ONE_GROUP | {"topk_method": "greedy", "routed_scaling_factor": 1.0, "q_lora_rank": None,
                                   "rope_scaling": YARN | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}},
    "v2_lite_tied": _V2 | _ONE_GROUP | {"topk_method": "greedy", "routed_scaling_factor": 16.0, "q_lora_rank": None,
                                        "tie_word_embeddings": True, "rope_scaling": YARN},
    "moonlight": _ONE_GROUP | {"num_nextn_predict_layers": 0, "n_routed_experts": 16, "num_experts_per_tok": 6, "n_shared_experts": 2,
                               "q_lora_rank": None, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "routed_scaling_factor": 2.446},
    "kimi_k2": _ONE_GROUP | {"model_type": "kimi_k2", "num_nextn_predict_layers": 0, "n_routed_experts": 384, "num_experts_per_tok": 8,
                             "moe_intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
                             "rope_theta": 50000.0, "routed_scaling_factor": 2.827,
                             "rope_scaling": YARN | {"factor": 32, "beta_fast": 1.0, "beta_slow": 1.0}},
}  # fmt: skip
_FP8 = ("v3", "v3_1", "kimi_k2")


def write_family(folder: Path, case: str, seed: int, **changes: object) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Write `case` as it is published and return its config.json and, computed apart, the fp32 values that its tensors stand for."""
    raw = tiny_raw(**FAMILY_CASES[case] | changes)
    config = parse_config(raw, case)
    tensors = random_tensors(config, seed)
    if case == "moonlight":  # latents so small that the epsilon of their norm shows
        tensors |= {name: 1e-3 * tensor for name, tensor in tensors.items() if "kv_a_proj" in name}
    if case in _FP8:
        power_of_two = case == "v3_1"
        write_checkpoint(folder, raw, extras(config) | plain(tensors), fp8=True, power_of_two=power_of_two, num_shards=4)
        return raw, {name: through_fp8(name, tensor, power_of_two=power_of_two) for name, tensor in plain(tensors).items()}
    stored = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    write_checkpoint(folder, raw, extras(config) | stored, num_shards=3)
    return raw, {name: tensor.float() for name, tensor in stored.items()}


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As fp32, with the values of bf16 where an FP8 checkpoint has bf16."""
    kept = ("_proj.weight", "_proj_with_mqa.weight", "e_score_correction_bias")
    return {name: tensor if name.endswith(kept) else tensor.bfloat16().float() for name, tensor in tensors.items()}


def extras(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Moonlight and Kimi K2 store rotary frequencies, which nothing needs."""
    if config.n_group > 1 or config.scoring_func == "softmax":
        return {}
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    return {name.format(layer): torch.zeros(config.qk_rope_head_dim // 2) for layer in range(config.num_hidden_layers)}


def through_fp8(name: str, tensor: torch.Tensor, *, power_of_two: bool) -> torch.Tensor:
    """What the stored blocks of a projection stand for, element by element."""
    if not name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
        return tensor
    stored, scale = quantise(tensor, power_of_two=power_of_two)
    rows, columns = (torch.arange(size) // 128 for size in tensor.shape)
    return stored.float() * scale[rows][:, columns]


def transformers_logits(folder: Path, raw: dict[str, object], values: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """The oracle: logits [n, vocab] of the same fp32 values in `transformers`, whose folder is written to `folder`."""
    from transformers import AutoModelForCausalLM

    config = parse_config(raw, "oracle")
    theirs = {key: value for key, value in raw.items() if key != "quantization_config"} | {"num_nextn_predict_layers": 0}
    if FAMILIES[config.model_type].architecture == "DeepseekV3ForCausalLM":
        theirs["model_type"] = "deepseek_v3"  # it has no class of its own for kimi_k2
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(theirs), encoding="utf-8")
    save_file({name: values[name] for name in model_shapes(config)}, folder / "model.safetensors", metadata={"format": "pt"})
    load = AutoModelForCausalLM.from_pretrained
    model, info = load(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert type(model).__name__ == FAMILIES[config.model_type].architecture
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    assert set(info["missing_keys"]) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    with torch.inference_mode():
        return model.eval()(ids[None]).logits[0]
