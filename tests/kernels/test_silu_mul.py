import pytest
import torch

from kernels.silu_mul import silu_mul


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_equals_the_formula_and_keeps_its_argument(backend: str, rows: int) -> None:
    gate_up = torch.randn(rows, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kept = gate_up.clone()
    expected = kept[:, :12] / (1 + (-kept[:, :12]).exp()) * kept[:, 12:]
    assert torch.allclose(silu_mul(gate_up, backend=backend), expected, atol=1e-14)
    assert torch.equal(gate_up, kept)


def test_rejects_an_odd_width() -> None:
    with pytest.raises(AssertionError):
        silu_mul(torch.zeros(1, 3))
