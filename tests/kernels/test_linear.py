import pytest
import torch

from kernels.linear import create_linear, padded_rows

BACKENDS = ["onednn", "torch", "reference"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("few_rows", [True, False])
@pytest.mark.parametrize("sizes", [(8, 24), (704, 256), (260, 64)], ids=str)
def test_equals_einsum(backend: str, few_rows: bool, sizes: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(sizes, generator=generator)
    layer = create_linear(weight, few_rows=few_rows, backend=backend)
    for rows in (0, 1, 2, 7, 9, 64, 65, 300, 1025):
        x = torch.randn(rows, sizes[1], generator=generator)
        expected = torch.einsum("ri,oi->ro", x.double(), weight.double())
        got = layer(x)
        assert got.shape == expected.shape and torch.allclose(got.double(), expected, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_rows(backend: str) -> None:
    generator = torch.Generator().manual_seed(2)
    weight, wide = torch.randn(512, 128, generator=generator), torch.randn(40, 300, generator=generator)
    layer = create_linear(weight, backend=backend)
    for rows in (1, 3, 40):
        assert torch.allclose(layer(wide[:rows, 100:228]), wide[:rows, 100:228] @ weight.t(), atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_in_its_row(backend: str) -> None:
    generator = torch.Generator().manual_seed(3)
    layer = create_linear(torch.randn(512, 128, generator=generator), backend=backend)
    x = torch.randn(16, 128, generator=generator)
    clean = layer(x)
    x[5] = torch.nan
    got = layer(x)
    others = [row for row in range(16) if row != 5]
    assert got[5].isnan().all() and torch.equal(got[others], clean[others])


def test_later_changes_of_the_weight_do_not_count_with_layouts_of_its_own() -> None:
    weight = torch.ones(4, 4)
    layer = create_linear(weight)
    weight.zero_()
    assert torch.equal(layer(torch.ones(1, 4)), torch.full((1, 4), 4.0))


def test_ragged_batches_need_few_kernels() -> None:
    """oneDNN keeps a compiled kernel for every number of rows that it is given: thousands of sizes must become few."""
    given = {rows: padded_rows(rows) for rows in range(1, 4097)}
    assert len(set(given.values())) < 50
    assert all(rows <= padded < rows * 1.25 for rows, padded in given.items())
    assert all(given[rows] == rows for rows in (*range(1, 9), 64, 128, 512, 1024, 4096))


def test_float64_takes_torch() -> None:
    layer = create_linear(torch.eye(3, dtype=torch.float64))
    assert layer(torch.ones(2, 3, dtype=torch.float64)).dtype == torch.float64
