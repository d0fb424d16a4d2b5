"""Rig T: random DeepSeek-V3-shaped checkpoints of a few thousand weights, plain or FP8, one file or sharded."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.model.config import ModelConfig, parse_config
from services.model.names import SCALE_SUFFIX, model_shapes, mtp_shapes

YARN = {
    "type": "yarn",
    "factor": 4,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def tiny_raw(**changes: object) -> dict[str, object]:
    """A `config.json` of rig T: 1 dense and 2 MoE layers, 8 experts in 4 groups, YaRN off; `changes` replace keys."""
    raw: dict[str, object] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return raw | changes


def tiny_config(**changes: object) -> ModelConfig:
    """`tiny_raw` checked and parsed."""
    return parse_config(tiny_raw(**changes), "rig T")


def random_tensors(config: ModelConfig, seed: int = 0, *, mtp: bool = True) -> dict[str, torch.Tensor]:
    """Random fp32 weights under Hugging Face names, scaled so that activations and gates are lively."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in (model_shapes(config) | (mtp_shapes(config) if mtp else {})).items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            tensors[name] = 0.1 * values
        elif len(shape) == 1:
            tensors[name] = 1.0 + 0.1 * values
        else:
            tensors[name] = values / math.sqrt(shape[1])
    return tensors


def quantise(tensor: torch.Tensor, *, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, columns] -> e4m3 values and fp32 scales of 128 x 128 blocks, the last ones partial; scales as V3 or V3.1 have them."""
    rows, columns = tensor.shape
    scale = torch.empty(math.ceil(rows / 128), math.ceil(columns / 128))
    stored = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = tensor[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
            scale[i, j] = block.abs().max() / 448
            if power_of_two:  # before anything is divided by it
                scale[i, j] = 2.0 ** math.ceil(math.log2(float(scale[i, j])))
            stored[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] = (block / scale[i, j]).to(torch.float8_e4m3fn)
    return stored, scale


def write_checkpoint(
    folder: Path,
    raw: dict[str, object],
    tensors: dict[str, torch.Tensor],
    *,
    fp8: bool = False,
    power_of_two: bool = False,
    num_shards: int = 1,
) -> Path:
    """Write config.json and the tensors (projections of layers as FP8 blocks when asked), in `num_shards` files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = dict(tensors)
    if fp8:
        quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        raw = raw | {"quantization_config": quantization | ({"scale_fmt": "ue8m0"} if power_of_two else {})}
        for name, tensor in tensors.items():
            if name.endswith("_proj.weight") or "_proj_with_mqa" in name:
                stored[name], stored[name + SCALE_SUFFIX] = quantise(tensor, power_of_two=power_of_two)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    if num_shards == 1:
        save_file(stored, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{i % num_shards + 1:05}-of-{num_shards:05}.safetensors" for i, name in enumerate(sorted(stored))}
    for file in sorted(set(weight_map.values())):
        save_file({name: stored[name] for name, place in weight_map.items() if place == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    return folder
