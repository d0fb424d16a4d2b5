"""The reference against transformers (same fp32 weights) and against arithmetic done by hand."""

import math
from pathlib import Path

import pytest
import torch

from services.model.config import load_config
from services.model.export import write_fp32_folder
from services.model.loader import load_tensors
from services.model.names import expert_prefix
from services.model.params import SamplingParams
from services.model.reference import Cache, Reference, gate, rms_norm, rotate
from services.model.yarn import correction_range, cos_sin, inv_freq, rope_multiplier, softmax_scale
from tests.tiny_model import YARN, random_tensors, tiny_config, tiny_raw, write_checkpoint

# Every config below is one on which transformers 5.24 has the published semantics. It differs in these, so they do not occur:
# - its latent norms always use eps 1e-6: rms_norm_eps is 1e-6;
# - YaRN with mscale_all_dim 0 and an mscale other than 1: it ignores mscale (B12's value for mscale 1 agrees);
# - ties in the gate: its top-k leaves them open.
ORACLE_CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "q_lora_null": {"q_lora_rank": None},
    "one_group": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
    "two_shared_experts": {"n_shared_experts": 2, "routed_scaling_factor": 1.0},
    "weights_not_normalised": {"norm_topk_prob": False},
    "yarn": {"rope_scaling": YARN},
    "yarn_two_mscales": {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5, "factor": 40}},
    "yarn_mscale_all_dim_0": {"rope_scaling": YARN | {"mscale_all_dim": 0, "factor": 40}},
    "all_dense": {"first_k_dense_replace": 3},
    "value_wider_than_nope": {"v_head_dim": 24, "qk_nope_head_dim": 12, "num_attention_heads": 3, "num_key_value_heads": 3},
}


def transformers_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    from transformers import DeepseekV3ForCausalLM

    model, info = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.inference_mode():
        return model.eval()(ids[None]).logits[0]


@pytest.mark.parametrize("case", ORACLE_CASES)
@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
def test_logits_equal_transformers(case: str, fp8: bool, tmp_path: Path) -> None:
    # FP8 with hidden 160: every matrix has partial last blocks
    raw = tiny_raw(**({"hidden_size": 160, "moe_intermediate_size": 136} if fp8 else {}) | ORACLE_CASES[case])
    from services.model.config import parse_config

    folder = write_checkpoint(tmp_path / "model", raw, random_tensors(parse_config(raw, "test"), seed=1), fp8=fp8)
    write_fp32_folder(folder, tmp_path / "fp32")
    ids = torch.randint(0, 260, (100,), generator=torch.Generator().manual_seed(2))  # YaRN's original length is 32
    ours = Reference(load_config(folder), load_tensors(folder)).forward(ids)
    torch.testing.assert_close(ours, transformers_logits(tmp_path / "fp32", ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}, {"rope_scaling": YARN}], ids=["plain", "q_lora_null", "yarn"])
def test_cached_steps_equal_one_forward(changes: dict[str, object]) -> None:
    config = tiny_config(**changes)
    reference = Reference(config, random_tensors(config, seed=3))
    ids = torch.randint(0, 260, (70,), generator=torch.Generator().manual_seed(4))
    whole, cache = reference.forward(ids), reference.new_cache()
    parts = [reference.forward(part, cache) for part in ids.split([40, 1, 20, 1, 8])]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=0)
    assert cache.num_tokens == 70


def test_cache_holds_normalised_latent_and_rotated_key() -> None:
    config = tiny_config()
    tensors = random_tensors(config, seed=5)
    reference, ids = Reference(config, tensors), torch.arange(10, 20)
    cache = reference.new_cache()
    reference.forward(ids, cache)
    x = rms_norm(tensors["model.embed_tokens.weight"][ids], tensors["model.layers.0.input_layernorm.weight"], 1e-6)
    raw = x @ tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].T
    latent = rms_norm(raw[:, :32], tensors["model.layers.0.self_attn.kv_a_layernorm.weight"], 1e-6)
    torch.testing.assert_close(cache.latent[0], latent, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(cache.k_rope[0], rotate(raw[:, 32:], *cos_sin(config, torch.arange(10))), atol=1e-6, rtol=1e-5)


def test_absorbed_form_equals_mha_form_b58() -> None:
    """float64, nope 16 and value 12, YaRN, q_lora null: absorbing kv_b into query and output changes nothing."""
    config = tiny_config(q_lora_rank=None, rope_scaling=YARN, v_head_dim=12, first_k_dense_replace=3, num_hidden_layers=3)
    tensors = {name: tensor.double() for name, tensor in random_tensors(config, seed=6).items()}
    reference, ids = Reference(config, tensors), torch.arange(64)
    cache = Cache(1)
    prefix, heads = "model.layers.0.self_attn.", 4
    x = tensors["model.embed_tokens.weight"][ids]
    mha = reference._attention(x, prefix, 0, cache, 0)
    latent, k_rope = cache.latent[0], cache.k_rope[0]
    assert latent is not None and k_rope is not None
    kv_b = tensors[f"{prefix}kv_b_proj.weight"].view(heads, 16 + 12, 32)
    for position in (0, 1, 17, 63):
        q_nope, q_rope = (x[position] @ tensors[f"{prefix}q_proj.weight"].T).view(1, heads, 24).split((16, 8), dim=-1)
        q_rope = rotate(q_rope, *cos_sin(config, torch.tensor([position])))
        q_latent = torch.einsum("hd,hdc->hc", q_nope[0], kv_b[:, :16])
        seen = position + 1
        scores = (q_latent @ latent[:seen].T + q_rope[0] @ k_rope[:seen].T) * softmax_scale(config)
        value = torch.einsum("hc,hdc->hd", scores.softmax(-1) @ latent[:seen], kv_b[:, 16:])
        torch.testing.assert_close(value.flatten() @ tensors[f"{prefix}o_proj.weight"].T, mha[position], atol=1e-10, rtol=0)


def v3_gate_config(**changes: object) -> object:
    return tiny_config(**{"n_group": 1, "topk_group": 1} | changes)


def run_gate(logits: list[float], bias: list[float] | None = None, **changes: object) -> dict[int, float]:
    """Expert -> weight for one token."""
    config = tiny_config(**{"n_routed_experts": len(logits), "n_group": 1, "topk_group": 1} | changes)
    topk_idx, weights = gate(torch.tensor([logits]), None if bias is None else torch.tensor(bias), config)
    return dict(zip(topk_idx[0].tolist(), weights[0].tolist(), strict=True))


def logit(*scores: float) -> list[float]:
    return [math.log(score / (1 - score)) for score in scores]


def test_bias_chooses_but_does_not_weigh_b09() -> None:
    assert run_gate([0, 1, 2, -1], [5, 0, 0, 0]) == pytest.approx({0: 0.905274, 2: 1.594726}, abs=1e-6)
    assert 1 in run_gate([0.0, 0.0, -9, -9], [0.0, 0.001, 0, 0], num_experts_per_tok=1)


def test_bf16_bias_is_used_as_fp32_b09(tmp_path: Path) -> None:
    config = tiny_config()
    tensors, name = random_tensors(config), "model.layers.1.mlp.gate.e_score_correction_bias"
    folder = write_checkpoint(tmp_path, tiny_raw(), tensors | {name: torch.full((8,), 0.001).bfloat16()})
    bias = load_tensors(folder)[name]
    assert bias.dtype == torch.float32
    # 0.5 + 0.001 would be 0.5 again in bf16
    bias[1:] = 0
    assert gate(torch.tensor([[-9.0, -9, 0, 0, -9, -9, -9, -9]]), bias.roll(3), config)[0][0].tolist()[0] == 3


def test_group_score_is_the_sum_of_two_b10() -> None:
    chosen = run_gate(logit(0.95, 0.10, 0.10, 0.10, 0.60, 0.60, 0.05, 0.05), n_group=2, topk_group=1)
    assert chosen == pytest.approx({4: 1.25, 5: 1.25})
    negative = run_gate(logit(0.9, 0.8, 0.15, 0.1, 0.5, 0.4, 0.1, 0.1), [-1.0] * 8, n_group=2, topk_group=1, num_experts_per_tok=3)
    assert set(negative) == {0, 1, 2}


@pytest.mark.parametrize("with_mtp_layer", [False, True])
def test_scaling_applies_once_and_to_routed_experts_only_b11(with_mtp_layer: bool) -> None:
    """Routed experts return x, the shared one 10 x (via large gates that silu leaves alone): 2.5 x + 10 x."""
    config = tiny_config(moe_intermediate_size=64, first_k_dense_replace=1)
    layer = 3 if with_mtp_layer else 1
    tensors = {name: tensor.double() for name, tensor in random_tensors(config, seed=7).items()}
    big = 50.0
    for prefix, factor in [(f"model.layers.{layer}.mlp.shared_experts.", 10.0), *((expert_prefix(layer, e), 1.0) for e in range(8))]:
        tensors[f"{prefix}gate_proj.weight"] = big * torch.ones(64, 64).double()  # every gate = 50 * sum(x) = 50 for our x
        tensors[f"{prefix}up_proj.weight"] = torch.eye(64).double() / big
        tensors[f"{prefix}down_proj.weight"] = factor * torch.eye(64).double()
    x = torch.rand(5, 64, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    x = x / x.sum(-1, keepdim=True)
    torch.testing.assert_close(Reference(config, tensors).moe(x, layer), 12.5 * x, atol=1e-9, rtol=0)


def test_ties_take_the_lowest_index_b66() -> None:
    for _ in range(20):
        chosen = run_gate([0.0] * 8, [0.0] * 8, n_group=4, topk_group=2)
        assert list(chosen) == [0, 1] and list(chosen.values()) == pytest.approx([1.25, 1.25])
    assert set(run_gate(logit(0.9, 0.5, 0.5, 0.1))) == {0, 1}
    assert set(run_gate([0.0, 3.0, 1e-6, 0.0])) == {1, 2}  # close is no tie
    only_one = run_gate([0.0] * 4, [-math.inf, -math.inf, 0.0, -math.inf], num_experts_per_tok=3)
    assert list(only_one) == [2, 0, 1]
    assert list(run_gate([17.0, 20.0, -1, -1], num_experts_per_tok=1)) == [0]  # both sigmoids are 1.0 in fp32


V3 = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
V3_YARN = YARN | {"factor": 40, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("scaling", "expected_softmax", "expected_multiplier"),
    [
        (V3_YARN, 0.1352337789, 1.0),
        (V3_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, 0.1147213868, 1.0),
        (None, 0.0721687836, 1.0),
        (V3_YARN | {"mscale_all_dim": 0}, 0.0721687836, 1.3688879454),
    ],
    ids=["v3", "v2_lite", "none", "mscale_only"],
)
def test_yarn_scales_b12(scaling: object, expected_softmax: float, expected_multiplier: float) -> None:
    config = tiny_config(**V3, rope_scaling=scaling)
    assert softmax_scale(config) == pytest.approx(expected_softmax, abs=1e-10)
    assert rope_multiplier(config) == pytest.approx(expected_multiplier, abs=1e-10)


def test_yarn_ramp_b12() -> None:
    config = tiny_config(**V3, rope_scaling=V3_YARN)
    assert config.rope_scaling is not None and correction_range(config.rope_scaling, 64, 10000.0) == (10, 23)
    plain, ramped = inv_freq(tiny_config(**V3)), inv_freq(config)
    torch.testing.assert_close(ramped[:11], plain[:11])
    torch.testing.assert_close(ramped[23:], plain[23:] / 40)
    assert bool((ramped[11:23] < plain[11:23]).all()) and bool((ramped[11:23] > plain[11:23] / 40).all())


def test_rope_turns_neighbours_b13() -> None:
    config = tiny_config(qk_rope_head_dim=4)
    cos, sin = cos_sin(config, torch.tensor([1, 0]))
    q = rotate(torch.tensor([[1.0, 0, 0, 0]]), cos[:1], sin[:1])
    k = rotate(torch.tensor([[0.0, 1, 0, 0]]), cos[1:], sin[1:])
    assert float((q * k).sum()) == pytest.approx(0.8414709848, abs=1e-7)


def test_mtp_rows_b60() -> None:
    """Row i joins h_i with token i + 1, row 0 too; in parts or at once the logits are the same; MTP's own norm ends it."""
    config = tiny_config()
    tensors = random_tensors(config, seed=9)
    reference, ids = Reference(config, tensors), torch.arange(30, 42)
    hidden, next_ids = reference.hidden(ids), torch.arange(31, 43)
    whole = reference.mtp_logits(hidden, next_ids, Cache(1))
    cache = Cache(1)
    parts = [reference.mtp_logits(h, t, cache) for h, t in zip(hidden.split([5, 1, 6]), next_ids.split([5, 1, 6]), strict=True)]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=0)
    other = reference.mtp_logits(hidden, torch.cat((torch.tensor([7]), next_ids[1:])), Cache(1))
    assert not torch.allclose(other[0], whole[0])
    scaled = tensors | {"model.layers.3.shared_head.norm.weight": 2 * tensors["model.layers.3.shared_head.norm.weight"]}
    torch.testing.assert_close(Reference(config, scaled).mtp_logits(hidden, next_ids, Cache(1)), 2 * whole)


def test_generate_greedy_is_the_argmax_of_each_forward() -> None:
    config = tiny_config()
    reference, prompt = Reference(config, random_tensors(config, seed=10)), [3, 5, 7]
    out = reference.generate(prompt, SamplingParams(max_tokens=8, seed=0, temperature=0.0, ignore_eos=True))
    ids = list(prompt)
    for token, logprob in zip(out.token_ids, out.logprobs, strict=True):
        row = reference.forward(torch.tensor(ids))[-1]
        assert token == int(row.argmax()) and logprob == pytest.approx(float(row.log_softmax(-1)[token]), abs=1e-5)
        ids.append(token)
    assert out.finish_reason == "length" and len(out.token_ids) == 8 == len(out.scores)


def test_generate_stops_at_limits_b07() -> None:
    config = tiny_config()
    reference, greedy = Reference(config, random_tensors(config, seed=10)), SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    first = reference.generate([3, 5, 7], greedy)
    assert len(first.token_ids) == 1 and first.finish_reason == "length"
    stop = SamplingParams(max_tokens=9, seed=0, temperature=0.0, stop_token_ids=tuple(first.token_ids))
    stopped = reference.generate([3, 5, 7], stop)
    assert (stopped.token_ids, stopped.finish_reason) == (first.token_ids, "stop")
