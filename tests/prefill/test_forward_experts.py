"""Both pools' expert halves by hand arithmetic: the scaling factor is applied once, to routed experts only."""

from collections.abc import Callable

import pytest
import torch

from services.decode.experts import DecodeExperts
from services.model.weights import MlpWeights, MoeWeights
from services.prefill.experts import PrefillExperts
from tests.tiny_model import tiny_config

Pool = Callable[..., PrefillExperts | DecodeExperts]
POOLS = [PrefillExperts, DecodeExperts]
HIDDEN = 64


def scaling_mlp(factor: float) -> MlpWeights:
    """x -> factor * x for every x whose first value is 1: that value drives all gates to silu(g) = 1."""
    gate = torch.tensor(1.27846, dtype=torch.float64)
    for _ in range(8):  # Newton's steps to silu(gate) = 1
        sigmoid = gate.sigmoid()
        gate = gate - (gate * sigmoid - 1) / (sigmoid + gate * sigmoid * (1 - sigmoid))
    gate_rows = torch.zeros(HIDDEN, HIDDEN, dtype=torch.float64)
    gate_rows[:, 0] = gate
    identity = torch.eye(HIDDEN, dtype=torch.float64)
    return MlpWeights(gate_up=torch.cat((gate_rows, identity)), down=identity * factor)


def moe(gate: torch.Tensor, bias: torch.Tensor | None, shared: MlpWeights | None) -> MoeWeights:
    one = scaling_mlp(1.0)
    return MoeWeights(gate=gate, bias=bias, gate_up=one.gate_up.expand(8, -1, -1), down=one.down.expand(8, -1, -1), shared=shared)


def make_x(num_tokens: int) -> torch.Tensor:
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[:, 0] = 1
    return x


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("num_tokens", [1, 7, 40])
@pytest.mark.parametrize(("shared", "factor"), [(10.0, 12.5), (None, 2.5)])
def test_scaling_once_and_not_on_the_shared_expert(pool: Pool, num_tokens: int, shared: float | None, factor: float) -> None:
    """B11: identity experts and a shared expert of 10 x give 12.5 x."""
    generator = torch.Generator().manual_seed(2)
    gate = torch.randn(8, HIDDEN, generator=generator, dtype=torch.float64)
    bias = torch.randn(8, generator=generator, dtype=torch.float64)
    experts = pool(tiny_config(), moe(gate, bias, None if shared is None else scaling_mlp(shared)), "auto")
    x = make_x(num_tokens)
    assert torch.allclose(experts(x), factor * x, atol=1e-11)


@pytest.mark.parametrize("pool", POOLS)
def test_ties_take_the_lowest_experts(pool: Pool) -> None:
    """B66: all logits 0 -> experts 0 and 1, weight 1.25 each, so all other experts may be NaN."""
    weights = moe(torch.zeros(8, HIDDEN, dtype=torch.float64), torch.zeros(8, dtype=torch.float64), None)
    down = weights.down.clone()
    down[1] *= 3
    down[2:] = torch.nan
    weights = MoeWeights(gate=weights.gate, bias=weights.bias, gate_up=weights.gate_up, down=down, shared=None)
    x = make_x(20)
    assert torch.allclose(pool(tiny_config(), weights, "auto")(x), (1.25 + 3 * 1.25) * x, atol=1e-11)


@pytest.mark.parametrize("pool", POOLS)
def test_group_of_the_two_best_is_taken(pool: Pool) -> None:
    """B10: group 1's pair (0.60, 0.60) beats group 0's single 0.95; every other expert may be NaN."""
    scores = torch.tensor([0.95, 0.10, 0.10, 0.10, 0.60, 0.60, 0.05, 0.05], dtype=torch.float64)
    gate = torch.zeros(8, HIDDEN, dtype=torch.float64)
    gate[:, 0] = scores.logit()
    weights = moe(gate, torch.zeros(8, dtype=torch.float64), None)
    down = torch.full_like(weights.down.clone(), torch.nan)
    down[4:6] = weights.down[4:6]
    weights = MoeWeights(gate=gate, bias=weights.bias, gate_up=weights.gate_up, down=down, shared=None)
    x = make_x(3)
    assert torch.allclose(pool(tiny_config(n_group=2, topk_group=1), weights, "auto")(x), 2.5 * x, atol=1e-11)
