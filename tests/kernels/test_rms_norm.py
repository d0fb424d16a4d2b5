import pytest
import torch

from kernels.rms_norm import add_rms_norm, rms_norm

SHAPES = [(0, 8), (1, 8), (3, 64), (5, 7168)]


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_the_formula(backend: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(shape[1], generator=generator, dtype=torch.float64).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).sum(-1, keepdim=True) / shape[1] + 1e-6) ** 0.5 * weight.double()
    got = rms_norm(x, weight, eps=1e-6, backend=backend)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    assert got.dtype == dtype and torch.allclose(got.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_strided_rows_and_nan_rows(backend: str) -> None:
    """A slice of a fused GEMM's output has strided rows; a NaN stays in its row (B16)."""
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))[:, 8:24]
    clean = rms_norm(x.clone(), torch.ones(16), eps=1e-6, backend=backend)
    x[2] = torch.nan
    got = rms_norm(x, torch.ones(16), eps=1e-6, backend=backend)
    assert got[2].isnan().all() and torch.equal(got[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_add_returns_the_sum_and_keeps_its_arguments(backend: str) -> None:
    x, residual = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(3))
    kept = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, torch.ones(16), eps=1e-6, backend=backend)
    assert torch.equal(total, kept[0] + kept[1]) and torch.equal(x, kept[0]) and torch.equal(residual, kept[1])
    assert torch.equal(normed, rms_norm(total, torch.ones(16), eps=1e-6, backend=backend))


def test_rejects_wrong_shapes() -> None:
    with pytest.raises(AssertionError):
        rms_norm(torch.zeros(2, 8), torch.zeros(7), eps=1e-6)
    with pytest.raises(AssertionError):
        add_rms_norm(torch.zeros(2, 8), torch.zeros(3, 8), torch.zeros(8), eps=1e-6)
