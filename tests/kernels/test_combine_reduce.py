"""The weighted sum of a token's expert rows: rows that no token names and weights without a row are never read."""

from collections.abc import Iterator

import pytest
import torch

from kernels.combine_reduce import combine_add_rms_norm_quant, combine_reduce
from kernels.numerics import relative_error
from kernels.rms_norm import add_rms_norm_quant
from tests.bench.report import Row
from tests.kernels.device import DEVICE, FLOAT, ON_GPU, generator, gpu_only, skip_unless_available
from tests.kernels.poison import poison_empty

BACKENDS = ["reference", "torch", "triton"]
BOUND = 1e-2 if ON_GPU else 1e-5
CASES = [(0, 8, 128), (1, 1, 8), (5, 3, 200), (3, 6, 1152), pytest.param((4, 8, 7168), marks=pytest.mark.slow)]  # num_tokens, top_k, hidden

NORM_CASES = [(0, 8, 128), (3, 2, 384), *(pytest.param((2, 8, hidden), marks=pytest.mark.slow) for hidden in (5120, 7168))]

def make(label: str, num_tokens: int, top_k: int, hidden: int) -> tuple[torch.Tensor, ...]:
    """Rows, a third of the indices -1 with NaN weights, weights, shared rows; rows of both tensors are strided."""
    rng, num_rows = generator(f"{label}{num_tokens}{top_k}{hidden}"), 40
    rows = torch.randn(num_rows, hidden + 8, generator=rng, device=DEVICE).to(FLOAT)[:, :hidden]
    row_idx = torch.randint(0, num_rows, (num_tokens, top_k), generator=rng, device=DEVICE, dtype=torch.int32)
    row_idx[torch.rand(row_idx.shape, generator=rng, device=DEVICE) < 0.3] = -1
    weights = torch.rand(num_tokens, top_k, generator=rng, device=DEVICE)
    weights[row_idx < 0] = torch.nan
    shared = torch.randn(num_tokens, hidden + 16, generator=rng, device=DEVICE).to(FLOAT)[:, 8 : hidden + 8]
    return rows, row_idx, weights, shared


def formula(rows: torch.Tensor, row_idx: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    """A matrix of weights [num_tokens, num_rows] times the rows, in fp64."""
    dense = torch.zeros(row_idx.shape[0], rows.shape[0] + 1, dtype=torch.float64, device=DEVICE)
    dense.scatter_add_(1, torch.where(row_idx < 0, rows.shape[0], row_idx.long()), weights.double().nan_to_num(0))
    total = dense[:, :-1] @ rows.double().nan_to_num(0)
    return total if shared is None else total + shared.double()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_a_product_with_a_matrix_of_weights(backend: str, case: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_available(backend, FLOAT)
    poison_empty(monkeypatch)
    rows, row_idx, weights, shared = make("combine", *case)
    for with_shared in (shared, None):
        got = combine_reduce(rows, row_idx, weights, with_shared, backend=backend)
        assert got.dtype == FLOAT and got.is_contiguous()
        assert relative_error(got, formula(rows, row_idx, weights, with_shared)) < BOUND


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_token_are_not_read_and_a_nan_stays_with_its_tokens(backend: str) -> None:
    skip_unless_available(backend, FLOAT)
    rows, row_idx, weights, shared = make("nan", 6, 4, 256)
    row_idx[4] = -1
    clean = combine_reduce(rows, row_idx, weights, shared, backend=backend)
    assert torch.equal(clean[4], shared[4]) and not combine_reduce(rows, row_idx, weights, None, backend=backend)[4].any()
    unnamed = torch.ones(rows.shape[0], dtype=torch.bool, device=DEVICE)
    unnamed[row_idx[row_idx >= 0].long()] = False
    rows[unnamed] = torch.nan
    assert torch.equal(combine_reduce(rows, row_idx, weights, shared, backend=backend), clean)
    row_idx[2, 0], weights[2, 0] = int(unnamed.nonzero()[0]), 0.5
    got = combine_reduce(rows, row_idx, weights, shared, backend=backend)
    assert got[2].isnan().all() and torch.equal(got[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("case", NORM_CASES, ids=str)
def test_with_the_norm_it_gives_the_bits_of_its_parts(backend: str, case: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_available(backend, FLOAT)
    poison_empty(monkeypatch)
    rows, row_idx, weights, shared = make("norm", *case)
    residual, weight = make("residual", *case)[3], make("weight", *case)[0][0].contiguous()
    for with_shared in (shared, None):
        combined = combine_reduce(rows, row_idx, weights, with_shared, backend=backend)
        expected, _, total = add_rms_norm_quant(combined, residual, weight, eps=1e-6, keep_normed=False, backend=backend)
        got, got_total = combine_add_rms_norm_quant(rows, row_idx, weights, with_shared, residual, weight, eps=1e-6, backend=backend)
        assert torch.equal(got_total, total) and torch.equal(got.scale, expected.scale)
        assert torch.equal(got.data.float(), expected.data.float()) and got.scale.stride() == expected.scale.stride()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_at_all(backend: str) -> None:
    """An empty buffer and nobody who names a row: what a rank without tokens has."""
    skip_unless_available(backend, FLOAT)
    rows, row_idx = torch.empty(0, 64, dtype=FLOAT, device=DEVICE), torch.full((2, 3), -1, dtype=torch.int32, device=DEVICE)
    assert not combine_reduce(rows, row_idx, torch.ones(2, 3, device=DEVICE), None, backend=backend).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_beyond_2_31_elements(backend: str) -> None:
    """On CPU no page is touched but the rows read."""
    skip_unless_available(backend, FLOAT)
    rows = torch.empty(2**31 // 128 + 4, 128, dtype=FLOAT, device=DEVICE)
    near = torch.randn(2, 128, generator=generator("far"), device=DEVICE).to(FLOAT)
    rows[0], rows[-1] = near[0], near[1]
    weights = torch.tensor([[0.5, 0.25], [1.0, 2.0]], device=DEVICE)
    far_idx = torch.tensor([[0, rows.shape[0] - 1], [rows.shape[0] - 1, -1]], dtype=torch.int32, device=DEVICE)
    near_idx = torch.tensor([[0, 1], [1, -1]], dtype=torch.int32, device=DEVICE)
    expected = combine_reduce(near, near_idx, weights, None, backend=backend)
    assert torch.equal(combine_reduce(rows, far_idx, weights, None, backend=backend), expected)


@gpu_only
@pytest.mark.skipif(not ON_GPU, reason="needs 9 GB of GPU memory")
def test_more_than_2_31_outputs() -> None:
    rows, row_idx, weights, _ = make("many", 8, 2, 4096)
    num_tokens = 2**31 // 4096 + 8
    many_idx = torch.full((num_tokens, 2), -1, dtype=torch.int32, device=DEVICE)
    many_weights = torch.zeros(num_tokens, 2, device=DEVICE)
    many_idx[-8:], many_weights[-8:] = row_idx, weights
    got = combine_reduce(rows, many_idx, many_weights, None, backend="triton")
    assert torch.equal(got[-8:], combine_reduce(rows, row_idx, weights, None, backend="triton")) and not got[:8].any()


def test_rejects_wrong_shapes() -> None:
    rows, row_idx, weights, shared = torch.zeros(3, 8), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2), torch.zeros(2, 8)
    for wrong in (
        (rows.t(), row_idx, weights, None), (rows, row_idx.long(), weights, shared), (rows, row_idx, weights[:1], shared),
        (rows, row_idx, weights, shared[:1]), (rows, row_idx.t(), weights, shared),
    ):
        with pytest.raises(AssertionError):
            combine_reduce(*wrong)
    wide = torch.zeros(2, 128)
    with pytest.raises(AssertionError):
        combine_add_rms_norm_quant(wide, row_idx, weights, None, wide, torch.zeros(256)[::2], eps=1e-6)


def bench_inputs(num_tokens: int, num_rows: int, top_k: int, hidden: int) -> tuple[torch.Tensor, ...]:
    """Every token names top_k different rows, as after a combine that left the rows where they arrived."""
    rows = torch.randn(num_rows, hidden, dtype=torch.bfloat16, device="cuda")
    row_idx = torch.randperm(num_rows, device="cuda")[: num_tokens * top_k].view(num_tokens, top_k).int()
    return rows, row_idx, torch.rand(num_tokens, top_k, device="cuda"), torch.randn(num_tokens, hidden, dtype=torch.bfloat16, device="cuda")


def bench_combine_reduce() -> Iterator[Row]:
    """Against torch.compile of the gather and sum: no library has this op alone."""
    from kernels.combine_reduce import combine_reduce_torch
    from kernels.timing import compare_us, num_sets

    compiled = torch.compile(combine_reduce_torch)
    for num_tokens, top_k, hidden in ((256, 8, 7168), (4096, 8, 7168)):
        size = num_tokens * hidden * 2 * (top_k + 2)
        sets = [bench_inputs(num_tokens, num_tokens * top_k, top_k, hidden) for _ in range(num_sets(size))]
        assert relative_error(combine_reduce(*sets[0], backend="triton"), formula(*sets[0])) < 1e-2
        us = compare_us({
            "ours": [lambda s=s: combine_reduce(*s, backend="triton") for s in sets],
            "torch": [lambda s=s: compiled(*s) for s in sets],
        })
        yield Row(
            f"K9-combine_reduce-{num_tokens}x{top_k}x{hidden}", us["torch"] / us["ours"], "x", "higher", 0.9, 1.0,
            f"torch.compile {us['torch']:.2f} us, ours {us['ours']:.2f}, floor {size / 4.3e6:.1f}",
        )
