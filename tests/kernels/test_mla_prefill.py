import math
from itertools import pairwise

import pytest
import torch

import kernels.mla_prefill
from kernels.mla_prefill import merge_states, mla_prefill

BACKENDS = ["torch", "reference"]
SCALE = 0.4


def make_inputs(num_queries: int, num_keys: int, heads: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_queries * 1000 + num_keys)
    sizes = ((num_queries, heads, 6), (num_keys, heads, 6), (num_keys, heads, 5))
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    return q, k, v


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    if causal:
        scores = scores.masked_fill(torch.ones(len(q), len(k), dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hqk,khv->qhv", scores.softmax(-1), v), scores.exp().sum(-1).log().t()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lens", [[1], [5], [3, 1, 7], [0, 4]], ids=str)
def test_causal_equals_dense_a_sequence_each(backend: str, lens: list[int]) -> None:
    psum = [sum(lens[:i]) for i in range(len(lens) + 1)]
    q, k, v = make_inputs(psum[-1], psum[-1])
    out, lse = mla_prefill(q, k, v, psum, psum, softmax_scale=SCALE, causal=True, backend=backend)
    for begin, end in pairwise(psum):
        rows = slice(begin, end)
        expected_out, expected_lse = dense(q[rows], k[rows], v[rows], causal=True)
        assert torch.allclose(out[rows], expected_out, atol=1e-12) and torch.allclose(lse[rows], expected_lse, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_mask_and_without_keys(backend: str) -> None:
    q, k, v = make_inputs(7, 9)
    psum_q, psum_k = [0, 2, 4, 7], [0, 6, 6, 9]
    out, lse = mla_prefill(q, k, v, psum_q, psum_k, softmax_scale=SCALE, causal=False, backend=backend)
    for rows, keys in ((slice(0, 2), slice(0, 6)), (slice(4, 7), slice(6, 9))):
        expected_out, expected_lse = dense(q[rows], k[keys], v[keys], causal=False)
        assert torch.allclose(out[rows], expected_out, atol=1e-12) and torch.allclose(lse[rows], expected_lse, atol=1e-12)
    assert torch.equal(out[2:4], torch.zeros_like(out[2:4])) and bool((lse[2:4] == -torch.inf).all())


@pytest.mark.parametrize("num_queries", [15, 16, 17, 100])
def test_blocks_of_queries_change_nothing(num_queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long chunks are cut into blocks: here of the smallest size."""
    monkeypatch.setattr(kernels.mla_prefill, "_MAX_SCORES", 1)
    q, k, v = make_inputs(num_queries, num_queries)
    psum = [0, num_queries]
    out, lse = mla_prefill(q, k, v, psum, psum, softmax_scale=SCALE, causal=True, backend="torch")
    expected_out, expected_lse = dense(q, k, v, causal=True)
    assert torch.allclose(out, expected_out, atol=1e-12) and torch.allclose(lse, expected_lse, atol=1e-12)


def test_merge_uses_natural_logarithms() -> None:
    """B14, part A: base 2 taken for e would give 0.8299."""
    zero = torch.zeros(1, 1, dtype=torch.float64)
    out, lse = merge_states(torch.ones_like(zero)[..., None], zero + math.log(3), zero[..., None], zero)
    assert math.isclose(float(out), 0.75, abs_tol=1e-10) and math.isclose(float(lse), 1.3862943611, abs_tol=1e-10)


@pytest.mark.parametrize("cuts", [[4], [1, 5], [2, 4, 6]], ids=str)
def test_merged_parts_equal_the_whole(cuts: list[int]) -> None:
    """More than two parts, and keys that are strided views."""
    q, k, v = make_inputs(3, 8)
    bounds = [0, *cuts, 8]
    parts = [mla_prefill(q, k[a:b], v[a:b], [0, 3], [0, b - a], softmax_scale=SCALE, causal=False) for a, b in pairwise(bounds)]
    out, lse = parts[0]
    for part in parts[1:]:
        out, lse = merge_states(out, lse, *part)
    expected_out, expected_lse = dense(q, k, v, causal=False)
    assert torch.allclose(out, expected_out, atol=1e-12) and torch.allclose(lse, expected_lse, atol=1e-12)


def test_an_empty_part_weighs_nothing() -> None:
    out, lse = torch.full((1, 1, 2), 3.0), torch.tensor([[-1.0]])
    merged, merged_lse = merge_states(out, lse, torch.zeros(1, 1, 2), torch.tensor([[-torch.inf]]))
    assert torch.equal(merged, out) and torch.equal(merged_lse, lse)


def test_rejects_unequal_causal_lengths() -> None:
    q, k, v = make_inputs(2, 3)
    with pytest.raises(AssertionError):
        mla_prefill(q, k, v, [0, 2], [0, 3], softmax_scale=SCALE, causal=True)
