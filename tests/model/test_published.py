"""Published configs are read as they are, and their real rotary frequencies are those of transformers."""

import pytest
import torch

from services.model.config import parse_config
from services.model.names import model_shapes, mtp_shapes
from services.model.yarn import correction_range, inv_freq, rope_multiplier, softmax_scale
from tests.model.published import KIMI_K2, PUBLISHED


@pytest.mark.parametrize("case", PUBLISHED)
def test_is_read(case: str) -> None:
    raw = PUBLISHED[case]
    config = parse_config(raw, case)
    for key in ("topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor", "q_lora_rank", "n_group", "rms_norm_eps"):
        assert getattr(config, key) == raw[key]
    shapes = model_shapes(config)
    assert (f"model.layers.{config.num_hidden_layers - 1}.mlp.gate.e_score_correction_bias" in shapes) == (raw["topk_method"] == "noaux_tc")
    assert ("model.layers.0.self_attn.q_proj.weight" in shapes) == (raw["q_lora_rank"] is None)
    assert all(name.startswith("model.layers.61.") for name in mtp_shapes(config)) and bool(mtp_shapes(config)) == case.startswith("v3")


@pytest.mark.parametrize("case", PUBLISHED)
def test_rotary_numbers_are_those_of_transformers_b12(case: str) -> None:
    """At the sizes and thetas of the real models, softmax scale included."""
    from transformers import DeepseekV2Config, DeepseekV3Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention, DeepseekV2RotaryEmbedding
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    raw, config = PUBLISHED[case], parse_config(PUBLISHED[case], case)
    v2 = config.model_type == "deepseek_v2"
    theirs = (DeepseekV2Config if v2 else DeepseekV3Config)(**{key: value for key, value in raw.items() if key != "model_type"})
    rotary = (DeepseekV2RotaryEmbedding if v2 else DeepseekV3RotaryEmbedding)(theirs)
    with torch.device("meta"):
        attention = (DeepseekV2Attention if v2 else DeepseekV3Attention)(theirs, layer_idx=0)
    torch.testing.assert_close(inv_freq(config), rotary.inv_freq, rtol=1e-6, atol=0)
    assert rope_multiplier(config) == pytest.approx(rotary.attention_scaling, abs=1e-12)
    assert softmax_scale(config) == pytest.approx(attention.scaling, abs=1e-12)


def test_equal_betas_ramp_over_one_pair_b12() -> None:
    """Kimi K2: both betas 1, theta 50000, 64 dimensions: pair 19.2 is where one rotation ends, so 19 is kept and 20 divided by 32."""
    config = parse_config(KIMI_K2, "kimi")
    assert config.rope_scaling is not None and correction_range(config.rope_scaling, 64, 50000.0) == (19, 20)
    kept = 50000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    wanted = torch.where(torch.arange(32) <= 19, kept, kept / 32).float()
    torch.testing.assert_close(inv_freq(config), wanted, rtol=1e-5, atol=0)
