"""Both forwards on many random small shapes against the reference: prefill in random chunks, then decode."""

import random
from pathlib import Path

import pytest
import torch

from services.model.reference import Reference
from tests.forward_rig import ForwardRig
from tests.tiny_model import YARN


def random_shape(rng: random.Random) -> dict[str, object]:
    """Changes of rig T's config that fit each other."""
    groups, group_size = rng.choice([(1, 4), (1, 6), (2, 4), (4, 2), (8, 4)])
    topk_group = rng.randint(1, groups)
    heads = rng.choice([1, 2, 3, 4, 8])
    return {
        "hidden_size": rng.choice([24, 64, 96]),
        "num_hidden_layers": rng.randint(1, 3),
        "first_k_dense_replace": rng.randint(0, 1),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "qk_nope_head_dim": rng.choice([6, 16, 48]),
        "qk_rope_head_dim": rng.choice([2, 8, 16]),
        "v_head_dim": rng.choice([5, 12, 16, 40]),
        "kv_lora_rank": rng.choice([16, 32, 80]),
        "q_lora_rank": rng.choice([None, 12, 24, 100]),
        "n_routed_experts": groups * group_size,
        "n_group": groups,
        "topk_group": topk_group,
        "num_experts_per_tok": rng.randint(1, min(4, topk_group * group_size)),
        "n_shared_experts": rng.randint(0, 2),
        "norm_topk_prob": rng.random() < 0.7,
        "rope_scaling": rng.choice([None, YARN]),
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_shapes_equal_reference(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng)
    print(f"seed {seed}: {shape}")
    rig = ForwardRig(tmp_path, seed=seed, requests=2, **shape)
    prompts = [rig.ids(rng.randint(1, 140)) for _ in range(2)]
    tails = [rig.ids(3) for _ in range(2)]
    model = Reference(rig.config, rig.tensors)
    references = [model.forward(torch.tensor(ids + tail)) for ids, tail in zip(prompts, tails, strict=True)]
    for request, ids in enumerate(prompts):
        chunk = rng.randint(1, len(ids))
        got = rig.prefill_all(ids, chunk, request)
        ends = [min(start + chunk, len(ids)) - 1 for start in range(0, len(ids), chunk)]
        assert (got - references[request][ends]).abs().max() < 1e-4
    for step in range(3):
        got = rig.decode_step({i: (tails[i][step], len(prompts[i]) + step) for i in range(2)})
        for i, expected in enumerate(references):
            assert (got[i] - expected[len(prompts[i]) + step]).abs().max() < 1e-4
