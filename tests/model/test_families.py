"""Every family, from files as they are published to logits, against transformers on the same fp32 values.

Where transformers 5 and the code published with the weights differ, config.json is refused or no such case occurs here:
- V2 with norm_topk_prob true: the published gate then leaves out routed_scaling_factor, transformers never normalises;
- YaRN with mscale_all_dim 0 and mscale other than 1 (see tests/model/test_reference.py);
- ties among experts, which top-k leaves open there and which take the lowest index here (B66).
V2's masked groups are 0 there and -inf here: softmax scores are positive, so the same experts win.
"""

from pathlib import Path

import pytest
import torch

from kernels.topk_gate import topk_gate
from services.decode.forward import DecodeBatch, DecodeForward
from services.model.config import load_config, parse_config
from services.model.loader import load_tensors, load_weights
from services.model.names import model_shapes
from services.model.reference import Reference, gate
from services.model.split import Split
from services.prefill.forward import PrefillChunk, PrefillForward
from tests.families import FAMILY_CASES, ORIGINAL_LENGTH, transformers_logits, write_family
from tests.model.test_reference import logit, run_gate
from tests.tiny_model import tiny_config, tiny_raw

NUM_TOKENS = 120
PAGE = 64


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_logits_equal_transformers_on_every_path(case: str, tmp_path: Path) -> None:
    """Whole prompt and token by token in the reference; prefill in chunks, then decode a token at a time over its pages."""
    seed = 70 + list(FAMILY_CASES).index(case)
    print(f"seed {seed}")
    raw, values = write_family(tmp_path / "model", case, seed)
    config = load_config(tmp_path / "model")
    tensors = load_tensors(tmp_path / "model")
    assert all(torch.equal(tensors[name], values[name]) for name in model_shapes(config))
    assert NUM_TOKENS > 3 * ORIGINAL_LENGTH
    ids = torch.randint(2, config.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(seed))
    oracle = transformers_logits(tmp_path / "oracle", raw, values, ids)

    reference = Reference(config, tensors)
    assert_close(reference.forward(ids), oracle)
    cache = reference.new_cache()
    assert_close(torch.cat([reference.forward(token, cache) for token in ids.split(1)]), oracle)

    weights = load_weights(tmp_path / "model", config)
    pages = torch.full((5, config.num_hidden_layers, PAGE, config.latent_width), torch.nan)
    table, token_ids = [3, 1], ids.tolist()
    ends = [1, 30, 31, 64, 90]  # chunks of 1, 29, 1, 33 and 26 tokens, then a token a step
    prefill, decode = PrefillForward(config, weights), DecodeForward(config, weights)
    for begin, end in zip([0, *ends], ends, strict=False):
        chunk = PrefillChunk(token_ids[begin:end], begin, table[: -(-end // PAGE)], True)
        assert_close(prefill.run(pages, [chunk])[0], oracle[end - 1])
    for position in range(ends[-1], NUM_TOKENS):
        step = DecodeBatch([token_ids[position]], [position], [table[: position // PAGE + 1]])
        assert_close(decode.run(pages, step)[0], oracle[position])


def assert_close(ours: torch.Tensor, oracle: torch.Tensor) -> None:
    torch.testing.assert_close(ours, oracle, atol=1e-4, rtol=0)


def test_v2_gate_takes_a_group_by_its_best_expert_b10() -> None:
    """B10's third test: scores of its first, softmax, group maximum, no bias -> group 0, and weights as softmax gives them."""
    scores = torch.tensor(logit(0.95, 0.10, 0.10, 0.10, 0.60, 0.60, 0.05, 0.05))
    config = tiny_config(**v2_gate(2, 1), num_experts_per_tok=2, routed_scaling_factor=16.0)
    topk_idx, weights = gate(scores[None], None, config)
    assert topk_idx[0].tolist() == [0, 1]
    torch.testing.assert_close(weights[0], 16.0 * scores.softmax(-1)[:2])  # neither normalised nor scaled twice
    both = tiny_config(**v2_gate(1, 1), num_experts_per_tok=3)
    assert gate(scores[None], None, both)[0][0].tolist() == [0, 4, 5]  # greedy looks everywhere


def v2_gate(n_group: int, topk_group: int) -> dict[str, object]:
    method = "greedy" if n_group == 1 else "group_limited_greedy"
    return {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "scoring_func": "softmax", "topk_method": method,
            "norm_topk_prob": False, "num_nextn_predict_layers": 0, "n_group": n_group, "topk_group": topk_group}  # fmt: skip


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_pools_gate_is_the_reference_s_b66(case: str) -> None:
    """Logits of few values, so that experts and groups tie everywhere: same experts, same weights, none twice."""
    config = parse_config(tiny_raw(**FAMILY_CASES[case]), case)
    generator = torch.Generator().manual_seed(92)
    logits = torch.randint(-3, 4, (300, config.n_routed_experts), generator=generator).float()
    bias = torch.randint(-2, 3, (config.n_routed_experts,), generator=generator) / 4 if config.topk_method == "noaux_tc" else None
    wanted_idx, wanted_weights = gate(logits, bias, config)
    topk_idx, topk_weights = topk_gate(
        logits, bias, top_k=config.num_experts_per_tok, num_groups=config.n_group, topk_groups=config.topk_group,
        method=config.topk_method, scoring=config.scoring_func, normalize=config.norm_topk_prob, scale=config.routed_scaling_factor,
    )  # fmt: skip
    assert torch.equal(topk_idx, wanted_idx) and all(len(set(row)) == len(row) for row in topk_idx.tolist())
    torch.testing.assert_close(topk_weights, wanted_weights, rtol=1e-6, atol=0)


def test_one_group_of_many_experts_is_a_plain_top_k() -> None:
    """Kimi K2: with one group nothing is masked, however the bias lies."""
    bias = [-3.0, 0.5, 0.0, 0.0, 0.0, 0.45, 0.0, 0.0]
    chosen = run_gate(logit(0.9, 0.1, 0.2, 0.3, 0.4, 0.1, 0.6, 0.5), bias, num_experts_per_tok=3, routed_scaling_factor=2.827)
    assert chosen == pytest.approx({1: 2.827 * 0.1 / 0.8, 6: 2.827 * 0.6 / 0.8, 5: 2.827 * 0.1 / 0.8}, abs=1e-5)


@pytest.mark.parametrize("case", ["v3", "v2_lite", "kimi_k2"])
def test_experts_of_all_ranks_add_up_b11(case: str, tmp_path: Path) -> None:
    """EP 1, 2, 4: each rank's routed experts, scaled once, and one shared expert make the layer (what all-to-all will sum)."""
    write_family(tmp_path, case, 90)
    config = load_config(tmp_path)
    reference = Reference(config, load_tensors(tmp_path))
    x = torch.randn(9, config.hidden_size, generator=torch.Generator().manual_seed(91))
    wanted = reference.moe(x, 1)
    for ep in (1, 2, 4):
        out = torch.zeros_like(x)
        for rank in range(ep):
            split = Split(ep_rank=rank, ep=ep)
            moe = load_weights(tmp_path, config, split=split).layers[1].mlp
            topk_idx, topk_weights = gate(x @ moe.gate.T, moe.bias, config)
            for local, expert in enumerate(split.experts(config)):
                token, slot = (topk_idx == expert).nonzero(as_tuple=True)
                gated, up = (x[token] @ moe.gate_up[local].T).chunk(2, dim=-1)
                out.index_add_(0, token, (torch.nn.functional.silu(gated) * up) @ moe.down[local].T * topk_weights[token, slot, None])
        gated, up = (x @ moe.shared.gate_up.T).chunk(2, dim=-1)
        out += (torch.nn.functional.silu(gated) * up) @ moe.shared.down.T
        torch.testing.assert_close(out, wanted, atol=1e-4, rtol=0)
