"""The gate's rules by hand, its backends against the reference, and the router's GEMM before it."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from kernels.numerics import relative_error
from kernels.timing import compare_us, num_sets
from kernels.topk_gate import gate, gate_logits, router_torch
from kernels.topk_gate import topk_gate as on_device
from tests.bench.report import Row
from tests.kernels.builds import Build
from tests.kernels.device import DEVICE, FLOAT, generator, skip_unless_available

BACKENDS = ["triton", "torch", "reference"]
SIGMOIDS = [[0.95, 0.10, 0.10, 0.10, 0.60, 0.60, 0.05, 0.05]]


def topk_gate(logits: torch.Tensor, bias: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.topk_gate.topk_gate` where kernels run here; results come back."""
    skip_unless_available(options.get("backend", "torch"))
    idx, weights = on_device(logits.to(DEVICE), None if bias is None else bias.to(DEVICE), **options)
    return idx.cpu(), weights.cpu()


def router_inputs(label: str, num_tokens: int, num_experts: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(num_tokens, hidden, generator=generator(label + "x"), device=DEVICE)
    w = torch.randn(num_experts, hidden, generator=generator(label + "w"), device=DEVICE) / math.sqrt(hidden)
    return x.to(FLOAT), w.to(FLOAT)


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
@pytest.mark.parametrize("num_tokens", [1, 12])
def test_lowest_index_wins_ties(backend: str, num_tokens: int) -> None:
    """B66."""
    for _ in range(1 if backend == "triton" else 20):
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
    ruled_out = torch.tensor([0.0, 0.0, 10.0, -torch.inf])  # in the chosen group, yet no better than those of the other one
    rule = {"num_groups": 2, "topk_groups": 1, "method": "group_limited_greedy"}
    assert topk_gate(torch.zeros(1, 4), ruled_out, top_k=4, backend=backend, **rule)[0].tolist() == [[2, 0, 1, 3]]


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("shape", [(0, 8, 1, 1), (9, 8, 4, 2), (40, 256, 8, 4), (5, 6, 1, 1), (40, 160, 8, 3), (40, 384, 1, 1)], ids=str)
@pytest.mark.parametrize(
    ("method", "scoring"),
    [
        ("noaux_tc", "sigmoid"),
        ("group_limited_greedy", "softmax"),
        *(pytest.param(*rule, marks=pytest.mark.slow) for rule in (("noaux_tc", "softmax"), ("group_limited_greedy", "sigmoid"))),
        *(pytest.param("greedy", scoring, marks=pytest.mark.slow) for scoring in ("sigmoid", "softmax")),
    ],
)
def test_backends_match_reference(backend: str, shape: tuple[int, int, int, int], method: str, scoring: str) -> None:
    """V3, V2, Kimi K2, Mixtral and odd ones; coarse logits, so that ties are common and near ties are not."""
    num_tokens, num_experts, num_groups, topk_groups = shape
    logits = torch.randn(num_tokens, num_experts, generator=generator("match", "cpu")).mul(4).round().div(4)
    bias = torch.randn(num_experts, generator=generator("bias", "cpu")).mul(4).round().div(16) if method == "noaux_tc" else None
    options = {"num_groups": num_groups, "topk_groups": topk_groups, "method": method, "scoring": scoring, "scale": 2.5}
    if backend == "triton" and DEVICE == "cpu":
        num_tokens = min(num_tokens, 512 // num_experts)  # the interpreter is slow
    logits = logits[:num_tokens]
    for top_k in (2, 6):
        idx, weights = topk_gate(logits, bias, top_k=top_k, **options, backend=backend)
        expected_idx, expected_weights = topk_gate(logits, bias, top_k=top_k, **options, backend="reference")
        assert torch.equal(idx, expected_idx) and torch.allclose(weights, expected_weights, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("num_experts", [8, 256, 384])
def test_triton_matches_torch_on_fine_logits(num_experts: int) -> None:
    """Experts may swap places only where their scores lie within 2 ulp."""
    num_tokens = 5000 if DEVICE == "cuda" else 20
    logits = torch.randn(num_tokens, num_experts, generator=generator("fine", "cpu")).mul(3)
    bias = torch.randn(num_experts, generator=generator("fine bias", "cpu")).mul(0.1)
    options = {
        "top_k": min(8, num_experts // 2),
        "num_groups": 8 if num_experts == 256 else 1,
        "topk_groups": 4 if num_experts == 256 else 1,
    }
    (idx, weights), (expected_idx, expected_weights) = (topk_gate(logits, bias, **options, backend=name) for name in ("triton", "torch"))
    biased = logits.sigmoid() + bias
    gaps = (biased.gather(1, idx) - biased.gather(1, expected_idx)).abs()
    assert float(gaps.max()) <= 2 * torch.finfo(torch.float32).eps and torch.allclose(weights, expected_weights, rtol=1e-5)


def test_strided_logits_and_poisoned_outputs() -> None:
    skip_unless_available("triton")
    wide = torch.randn(5, 40, generator=generator("strided", "cpu")).mul(4).round().div(4)
    torch.full((1 << 16,), torch.nan, device=DEVICE)  # what the outputs will lie in
    options = {"top_k": 3, "num_groups": 4, "topk_groups": 2}
    on = wide.to(DEVICE)[:, 7:31]
    idx, weights = on_device(on, None, **options, backend="triton")
    expected = on_device(on.contiguous(), None, **options, backend="reference")
    assert torch.equal(idx, expected[0]) and torch.allclose(weights, expected[1])


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("shape", [(0, 8, 64), (3, 8, 200), (17, 24, 1000), (70, 130, 448)], ids=str)
def test_gate_logits_match_fp64(backend: str, shape: tuple[int, int, int]) -> None:
    skip_unless_available(backend, FLOAT)
    x, w = router_inputs(f"logits {shape}", *shape)
    got = gate_logits(x, w, backend=backend)
    expected = x.double() @ w.double().T
    assert got.dtype == torch.float32 and got.shape == expected.shape and torch.allclose(got.double(), expected, atol=2e-5)
    assert torch.equal(got, gate_logits(x, w, backend=backend))


@pytest.mark.parametrize("hidden", [256, 7168])
def test_gate_is_the_choice_of_its_logits(hidden: int) -> None:
    """One call equals two, strided rows of x and a NaN row included."""
    skip_unless_available("triton", FLOAT)
    x, w = router_inputs(f"gate {hidden}", 5, 32, hidden + 8)
    x, w = x[:, 8:], w[:, 8:]
    x[3] = torch.nan
    bias = torch.randn(32, generator=generator("gate bias"), device=DEVICE).mul(0.1)
    options = {"top_k": 4, "num_groups": 4, "topk_groups": 2, "scale": 2.5}
    idx, weights = gate(x, w, bias, **options, backend="triton")
    again = on_device(gate_logits(x, w, backend="triton"), bias, **options, backend="triton")
    assert torch.equal(idx, again[0]) and torch.equal(weights[[0, 1, 2, 4]], again[1][[0, 1, 2, 4]]) and weights[3].isnan().all()
    expected_idx, expected_weights = gate(x, w, bias, **options, backend="torch")
    kept = [0, 1, 2, 4]
    assert torch.equal(idx[kept], expected_idx[kept]) and relative_error(weights[kept], expected_weights[kept]) < 1e-5


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_nan_stays_in_its_row(backend: str) -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    clean = topk_gate(logits, torch.zeros(8), top_k=2, num_groups=4, topk_groups=2, backend=backend)
    logits[1] = torch.nan
    idx, weights = topk_gate(logits, torch.zeros(8), top_k=2, num_groups=4, topk_groups=2, backend=backend)
    assert torch.equal(idx[[0, 2]], clean[0][[0, 2]]) and torch.equal(weights[[0, 2]], clean[1][[0, 2]])
    assert weights[1].isnan().all() and int(idx[1].min()) >= 0 and int(idx[1].max()) < 8


def test_rejects_unknown_rules() -> None:
    for bad in ({"method": "best"}, {"scoring": "relu"}, {"top_k": 9}, {"num_groups": 3}, {"num_groups": 2, "topk_groups": 3}):
        with pytest.raises(AssertionError):
            on_device(torch.zeros(1, 8), None, **{"top_k": 2, **bad})


def bench_topk_gate() -> Iterator[Row]:
    """DeepSeek-V3's choice alone, and its whole gate, router GEMM included."""
    from flashinfer.fused_moe import fused_topk_deepseek
    from flashinfer.fused_moe.fused_routing_dsv3 import get_dsv3_fused_routing_module

    rule = {"top_k": 8, "num_groups": 8, "topk_groups": 4, "scale": 2.5}
    bias = torch.randn(256, generator=generator("bench bias"), device=DEVICE).mul(0.1)
    logits = [torch.randn(256, 256, generator=generator(f"bench logits {i}"), device=DEVICE) for i in range(64)]
    values, places = torch.empty(256, 8, device=DEVICE), torch.empty(256, 8, device=DEVICE, dtype=torch.int32)
    theirs = [partial(fused_topk_deepseek, each, bias, 8, 4, 8, 2.5, values, places) for each in logits]
    calls = {"ours": [partial(on_device, each, bias, **rule) for each in logits]}
    if Build(get_dsv3_fused_routing_module).is_there(theirs[0]):
        calls["FlashInfer"] = theirs
    else:
        calls["torch (sorts)"] = [partial(on_device, each, bias, **rule, backend="torch") for each in logits]
    times = compare_us(calls, replays=20)
    library = next(name for name in calls if name != "ours")
    conditions = f"{library} {times[library]:.2f} us, ours {times['ours']:.2f}; 256 tokens, 256 experts, 4 of 8 groups"
    yield Row("K9-topk_gate-M256", times[library] / times["ours"], "x", "higher", 0.9, 1.0, conditions)
    for num_tokens in (16, 64, 256):
        size = (num_tokens + 256) * 7168 * 2
        sets = [router_inputs(f"bench {num_tokens} {i}", num_tokens, 256, 7168) for i in range(num_sets(size))]
        got, expected = (gate(*sets[0], bias, **rule, backend=name) for name in ("triton", "torch"))
        same = float((got[0].sort().values == expected[0].sort().values).float().mean())
        assert same > 0.99 and relative_error(got[1], expected[1]) < 1e-2, f"{same=}"
        calls = {name: [partial(gate, x, w, bias, **rule, backend=name) for x, w in sets] for name in ("triton", "torch")}
        calls["cuBLAS"] = [partial(router_torch, x, w) for x, w in sets]
        times = compare_us(calls, replays=20)
        conditions = (
            f"cuBLAS' GEMM alone {times['cuBLAS']:.2f} us, with sorts by torch {times['torch']:.1f}, ours whole {times['triton']:.2f}, "
            f"floor {size / 4.3e6:.1f}; 7168 -> 256 bf16"
        )
        yield Row(f"K9-gate-M{num_tokens}", times["cuBLAS"] / times["triton"], "x", "higher", 0.9, 1.0, conditions)
