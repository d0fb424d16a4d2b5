import math

import pytest
import torch

from kernels.topk_gate import topk_gate

BACKENDS = ["triton", "torch", "reference"]
SIGMOIDS = [[0.95, 0.10, 0.10, 0.10, 0.60, 0.60, 0.05, 0.05]]


def logits_of(scores: list[list[float]]) -> torch.Tensor:
    return torch.tensor([[math.log(s / (1 - s)) for s in row] for row in scores])


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_chooses_but_does_not_weigh(backend: str) -> None:
    """B09."""
    idx, weights = topk_gate(torch.tensor([[0.0, 1, 2, -1]]), torch.tensor([5.0, 0, 0, 0]), top_k=2, scale=2.5, backend=backend)
    assert idx.tolist() == [[0, 2]]
    assert torch.allclose(weights, torch.tensor([[0.905274, 1.594726]]), atol=1e-6)
    idx, _ = topk_gate(torch.zeros(1, 4), torch.tensor([0, 0, 0.001, 0]), top_k=1, backend=backend)
    assert idx.tolist() == [[2]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_score_by_their_two_best(backend: str) -> None:
    """B10, test 1: by their best expert group 0 would win."""
    idx, weights = topk_gate(logits_of(SIGMOIDS), torch.zeros(8), top_k=2, num_groups=2, topk_groups=1, scale=2.5, backend=backend)
    assert idx.tolist() == [[4, 5]]
    assert torch.allclose(weights, torch.tensor([[1.25, 1.25]]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_groups_are_minus_infinity(backend: str) -> None:
    """B10, test 2: with a mask of 0 the other group's experts beat negative biased scores."""
    logits = logits_of([[0.9, 0.8, 0.15, 0.1, 0.5, 0.4, 0.1, 0.1]])
    idx, _ = topk_gate(logits, torch.full((8,), -1.0), top_k=3, num_groups=2, topk_groups=1, backend=backend)
    assert idx.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_v2_scores_groups_by_their_best(backend: str) -> None:
    """B10, test 3; and the softmax's weights stay as they are without normalising."""
    logits = logits_of(SIGMOIDS)
    options = {"num_groups": 2, "topk_groups": 1, "method": "group_limited_greedy", "scoring": "softmax", "normalize": False}
    idx, weights = topk_gate(logits, None, top_k=2, **options, backend=backend)
    assert idx.tolist() == [[0, 1]]
    assert torch.allclose(weights, logits.softmax(-1)[:, :2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_ignores_groups(backend: str) -> None:
    idx, _ = topk_gate(logits_of(SIGMOIDS), None, top_k=2, num_groups=2, topk_groups=1, method="greedy", scoring="softmax", backend=backend)
    assert idx.tolist() == [[0, 4]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_lowest_index_wins_ties(backend: str, num_tokens: int) -> None:
    """B66."""
    for _ in range(20):
        logits = torch.zeros(num_tokens, 8)
        idx, weights = topk_gate(logits, torch.zeros(8), top_k=2, num_groups=4, topk_groups=2, scale=2.5, backend=backend)
        assert idx.tolist() == [[0, 1]] * num_tokens and torch.equal(weights, torch.full((num_tokens, 2), 1.25))
    idx, _ = topk_gate(logits_of([[0.9, 0.5, 0.5, 0.1]]), None, top_k=2, backend=backend)
    assert idx.tolist() == [[0, 1]]
    idx, _ = topk_gate(torch.tensor([[17.0, 20.0, 0.0]]), None, top_k=1, backend=backend)  # both sigmoids are 1.0 in fp32
    assert idx.tolist() == [[0]]
    idx, _ = topk_gate(torch.zeros(1, 64), torch.zeros(64), top_k=6, num_groups=8, topk_groups=4, backend=backend)
    assert idx.tolist() == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_near_ties_are_not_ties(backend: str) -> None:
    idx, _ = topk_gate(torch.tensor([[0.0, 0.0, 0.0]]), torch.tensor([0.0, 1.2e-7, 0.0]), top_k=1, backend=backend)
    assert idx.tolist() == [[1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_chosen_experts_differ_even_at_minus_infinity(backend: str) -> None:
    bias = torch.full((8,), -torch.inf)
    bias[5] = 0
    idx, _ = topk_gate(torch.zeros(1, 8), bias, top_k=3, backend=backend)
    assert idx[0, 0] == 5 and len(set(idx[0].tolist())) == 3


@pytest.mark.parametrize("shape", [(0, 8, 1, 1), (40, 8, 4, 2), (40, 256, 8, 4), (40, 6, 1, 1)], ids=str)
@pytest.mark.parametrize("method", ["noaux_tc", "group_limited_greedy", "greedy"])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_torch_matches_reference(shape: tuple[int, int, int, int], method: str, scoring: str) -> None:
    num_tokens, num_experts, num_groups, topk_groups = shape
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(num_tokens, num_experts, generator=generator).mul(4).round().div(4)  # coarse, so that ties are common
    bias = torch.randn(num_experts, generator=generator).mul(4).round().div(16) if method == "noaux_tc" else None
    options = {"top_k": 2, "num_groups": num_groups, "topk_groups": topk_groups, "method": method, "scoring": scoring}
    idx, weights = topk_gate(logits, bias, **options, backend="torch")
    expected_idx, expected_weights = topk_gate(logits, bias, **options, backend="reference")
    assert torch.equal(idx, expected_idx) and torch.equal(weights, expected_weights)


def test_nan_stays_in_its_row() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    clean = topk_gate(logits, torch.zeros(8), top_k=2, num_groups=4, topk_groups=2)
    logits[1] = torch.nan
    idx, weights = topk_gate(logits, torch.zeros(8), top_k=2, num_groups=4, topk_groups=2)
    assert torch.equal(idx[[0, 2]], clean[0][[0, 2]]) and torch.equal(weights[[0, 2]], clean[1][[0, 2]])
    assert weights[1].isnan().all() and int(idx[1].min()) >= 0 and int(idx[1].max()) < 8


def test_rejects_unknown_rules() -> None:
    for bad in ({"method": "best"}, {"scoring": "relu"}, {"top_k": 9}, {"num_groups": 3}, {"num_groups": 2, "topk_groups": 3}):
        with pytest.raises(AssertionError):
            topk_gate(torch.zeros(1, 8), None, **{"top_k": 2, **bad})
