import pytest
import torch

from kernels.grouped_experts import grouped_experts
from kernels.linear import Linear, create_linear

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 5, 16, 6


def make_experts(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, list[Linear], list[Linear]]:
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator, dtype=dtype)
    down = torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE, generator=generator, dtype=dtype)
    return gate_up, down, [create_linear(w) for w in gate_up], [create_linear(w) for w in down]


def dense(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """All experts on all tokens, weighted by a dense matrix with zeros."""
    both = torch.einsum("th,eih->tei", x, gate_up)
    gate, up = both[..., :INTERMEDIATE], both[..., INTERMEDIATE:]
    outputs = torch.einsum("tei,ehi->teh", gate * gate.sigmoid() * up, down)
    mix = torch.zeros(len(x), NUM_EXPERTS, dtype=x.dtype).scatter_(1, idx, weights)
    return torch.einsum("te,teh->th", mix, outputs)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 17])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_equals_dense(backend: str, num_tokens: int, top_k: int) -> None:
    gate_up, down, gate_up_layers, down_layers = make_experts()
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, HIDDEN, generator=generator, dtype=torch.float64)
    idx = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :top_k]
    weights = torch.rand(num_tokens, top_k, generator=generator, dtype=torch.float64)
    got = grouped_experts(x, idx, weights, gate_up_layers, down_layers, backend=backend)
    assert torch.allclose(got, dense(x, idx, weights, gate_up, down), atol=1e-11)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("num_tokens", [1, 6])
def test_unused_experts_are_never_read(backend: str, num_tokens: int) -> None:
    """B16: all tokens go to experts 2 and 0, the weights of the others are NaN."""
    gate_up, down, _, _ = make_experts()
    gate_up[[1, 3, 4]], down[[1, 3, 4]] = torch.nan, torch.nan
    layers = [create_linear(w) for w in gate_up], [create_linear(w) for w in down]
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    idx = torch.tensor([[2, 0]]).expand(num_tokens, 2).contiguous()
    weights = torch.full((num_tokens, 2), 0.5, dtype=torch.float64)
    got = grouped_experts(x, idx, weights, *layers, backend=backend)
    assert torch.allclose(got, dense(x, idx, weights, gate_up.nan_to_num(), down.nan_to_num()), atol=1e-12)


@pytest.mark.parametrize("num_tokens", [1, 8])
def test_nan_stays_in_its_token(num_tokens: int) -> None:
    _, _, gate_up, down = make_experts(torch.float32)
    x = torch.randn(num_tokens + 1, HIDDEN, generator=torch.Generator().manual_seed(4))
    idx = torch.tensor([[0, 1]]).expand(num_tokens + 1, 2).contiguous()
    weights = torch.full((num_tokens + 1, 2), 0.5)
    clean = grouped_experts(x, idx, weights, gate_up, down)
    x[-1] = torch.nan
    got = grouped_experts(x, idx, weights, gate_up, down)
    assert got[-1].isnan().all() and torch.equal(got[:-1], clean[:-1])


def test_rejects_wrong_shapes() -> None:
    _, _, gate_up, down = make_experts()
    x = torch.zeros(2, HIDDEN, dtype=torch.float64)
    with pytest.raises(AssertionError):
        grouped_experts(x, torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 1), gate_up, down)
    with pytest.raises(AssertionError):
        grouped_experts(x, torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1), gate_up, down[:-1])
