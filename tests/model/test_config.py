"""config.json: both spellings of rope settings, and every contradiction refused in one sentence with key, value and limit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.model.config import YarnConfig, load_config, parse_config
from services.model.loader import load_tensors
from services.runtime.errors import CheckpointError
from tests.tiny_model import YARN, tiny_config, tiny_raw

V2 = {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "scoring_func": "softmax", "topk_method": "greedy",
      "norm_topk_prob": False, "num_nextn_predict_layers": 0, "n_group": 1, "topk_group": 1}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def test_values_and_derived_widths() -> None:
    config = tiny_config(q_lora_rank=None, eos_token_id=[1, 5], quantization_config=FP8)
    assert (config.q_lora_rank, config.eos_token_ids, config.weight_block_size) == (None, (1, 5), (128, 128))
    assert (config.qk_head_dim, config.latent_width) == (24, 40)
    assert [config.is_moe_layer(layer) for layer in range(4)] == [False, True, True, True]
    assert tiny_config().weight_block_size is None and tiny_config().rope_scaling is None


def test_both_spellings_of_rope() -> None:
    published = tiny_config(rope_scaling=YARN, rope_theta=5000.0)
    newer = tiny_raw(rope_parameters={"rope_theta": 5000.0, "rope_type": "yarn"} | {k: v for k, v in YARN.items() if k != "type"})
    del newer["rope_theta"], newer["rope_scaling"]
    assert parse_config(newer, "test") == published
    assert published.rope_scaling == YarnConfig(4.0, 32, 32.0, 1.0, 1.0, 1.0) and published.rope_theta == 5000.0
    assert tiny_config(rope_parameters={"rope_theta": 100.0, "rope_type": "default"}).rope_scaling is None


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    from transformers import DeepseekV3Config

    raw = tiny_raw(rope_scaling=YARN)
    DeepseekV3Config(**{key: value for key, value in raw.items() if key != "model_type"}).save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    assert load_config(tmp_path) == parse_config(raw, "test")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "llama"}, "model_type is 'llama' but only 'deepseek_v2' and 'deepseek_v3' and 'kimi_k2' are supported"),
        ({"model_type": None}, "model_type is missing but only 'deepseek_v2' and 'deepseek_v3' and 'kimi_k2' are supported"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax' but only 'sigmoid' is supported"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy' but only 'noaux_tc' is supported"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures is ['LlamaForCausalLM'] but model_type 'deepseek_v3' goes with"),
        ({"model_type": "kimi_k2", "topk_method": "greedy"}, "topk_method is 'greedy' but only 'noaux_tc' is supported"),
        (V2 | {"architectures": ["DeepseekV3ForCausalLM"]}, "but model_type 'deepseek_v2' goes with ['DeepseekV2ForCausalLM']"),
        (V2 | {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid' but only 'softmax' is supported"),
        (V2 | {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc' but only 'greedy' and 'group_limited_greedy' are supported"),
        (V2 | {"topk_method": None}, "topk_method is missing but only 'greedy' and 'group_limited_greedy' are supported"),
        (V2 | {"norm_topk_prob": True}, "norm_topk_prob is True but only False is supported"),
        (V2 | {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1 but it must be a whole number of at least 0 and at most 0"),
        (V2 | {"n_group": 4}, "n_group is 4 but topk_method 'greedy' has no groups, only 1 is supported with it"),
        ({"mlp_bias": True}, "mlp_bias is True but only False is supported"),
        ({"qk_layernorm": True}, "qk_layernorm is True but only False is supported"),
        ({"rope_interleave": False}, "rope_interleave is False but only True is supported"),
        ({"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 2}}, "rope_scaling.beta_fast is 1 but it must be at least beta_slow (2)"),
        ({"quantization_config": FP8 | {"quant_method": "compressed-tensors"}}, "quant_method is 'compressed-tensors' but only 'fp8' is"),
        ({"quantization_config": FP8 | {"scale_fmt": "ue4m3"}}, "scale_fmt is 'ue4m3' but only 'float32' and 'ue8m0' are supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu' but only 'silu' is supported"),
        ({"attention_bias": True}, "attention_bias is True but only False is supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2 but only 1 is supported"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2 but it must be a whole number of at least 0 and at most 1"),
        ({"n_group": 3}, "n_group is 3 but it must divide n_routed_experts (8)"),
        ({"n_group": 8, "topk_group": 2}, "n_group is 8 but a group's score is the sum of two experts"),
        ({"topk_group": 5}, "topk_group is 5 but only n_group (4) groups exist"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5 but the 2 chosen groups hold only 4 experts"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7 but rotary pairs need an even number"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace is 4 but the model has only num_hidden_layers (3)"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2 but MLA has as many as num_attention_heads (4)"),
        ({"eos_token_id": 260}, "eos_token_id is 260 but ids end at vocab_size - 1 (259)"),
        ({"eos_token_id": []}, "eos_token_id is [] but it must be a token id or a list of token ids"),
        ({"hidden_size": 0}, "hidden_size is 0 but it must be a whole number of at least 1"),
        ({"hidden_size": None}, "hidden_size is missing but it must be a whole number of at least 1"),
        ({"vocab_size": 260.0}, "vocab_size is 260.0 but it must be a whole number of at least 1"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small' but it must be a number above 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1 but only True and False are supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type is 'linear' but only 'yarn'"),
        ({"rope_scaling": YARN | {"factor": 0.5}}, "rope_scaling.factor is 0.5 but it must be at least 1"),
        ({"rope_scaling": YARN | {"attention_factor": 1.2}}, "rope_scaling.attention_factor is 1.2 but"),
        ({"quantization_config": FP8 | {"quant_method": "awq"}}, "quantization_config.quant_method is 'awq' but only 'fp8' is supported"),
        ({"quantization_config": FP8 | {"weight_block_size": [64, 64]}}, "weight_block_size is [64, 64] but only [128, 128] is supported"),
        ({"quantization_config": 8}, "quantization_config is 8 but it must be an object"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000 but it must be a whole number of at least 1 and at most 1024"),
        ({"n_routed_experts": 10**7, "n_group": 1, "topk_group": 1}, "n_routed_experts is 10000000 but"),
        ({"hidden_size": 10**30}, "but it must be a whole number of at least 1 and at most"),
        ({"q_lora_rank": 10**30}, "but it must be a whole number of at least 1 and at most"),
        ({"max_position_embeddings": 1}, "max_position_embeddings is 1 but it must be a whole number of at least 2"),
        ({"max_position_embeddings": 10**30}, "but it must be a whole number of at least 2 and at most"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps is 1e+300 but it must be at most 1"),
        ({"routed_scaling_factor": 1e300}, "routed_scaling_factor is 1e+300 but it must be at most"),
        ({"rope_theta": 1e308}, "rope_theta is 1e+308 but it must be at most"),
        ({"rope_scaling": YARN | {"factor": 1e308}}, "rope_scaling.factor is 1e+308 but it must be at most"),
        ({"rope_scaling": YARN | {"mscale": 1e308}}, "rope_scaling.mscale is 1e+308 but it must be at most"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refuses(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        tiny_config(**changes)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_greedy_needs_no_groups_and_end_tokens_add_up(tmp_path: Path) -> None:
    """V2-Lite may leave groups out; generation_config.json ends Kimi K2's turns with a token that config.json lacks."""
    raw = tiny_raw(**V2 | {"n_group": None, "topk_group": None})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_config(tmp_path)
    assert (config.n_group, config.topk_group, config.eos_token_ids) == (1, 1, (1,))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    assert load_config(tmp_path).eos_token_ids == load_config(tmp_path / "config.json").eos_token_ids == (1, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 260}))
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id is 260 but ids end at vocab_size - 1 \(259\)"):
        load_config(tmp_path)


def test_contradictions_are_found_before_any_weight_is_looked_at(tmp_path: Path) -> None:
    """No safetensors file is there, and the sentence is about config.json all the same."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_raw(topk_group=9)))
    with pytest.raises(CheckpointError, match="topk_group is 9"):
        load_tensors(tmp_path)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        load_config(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_config(tmp_path / ("long" * 1500))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list but must hold a JSON object"):
        load_config(tmp_path)


def test_the_router_can_import_it_without_torch() -> None:
    code = "import sys, services.model.config, services.model.params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
