import math

import pytest
import torch

from kernels.rope import rope_, rotations

BACKENDS = ["torch", "reference"]


def angles(positions: list[int], rope: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    frequency = 10000.0 ** (-torch.arange(0, rope, 2, dtype=dtype) / rope)
    angle = torch.tensor(positions, dtype=dtype)[:, None] * frequency
    return rotations(angle.cos(), angle.sin())


@pytest.mark.parametrize("backend", BACKENDS)
def test_neighbours_are_pairs(backend: str) -> None:
    """B13: q = e0 at position 1, k = e1 at position 0; pairing halves would give 0."""
    q = rope_(torch.tensor([[[1.0, 0, 0, 0]]], dtype=torch.float64), angles([1], 4), backend=backend)
    k = rope_(torch.tensor([[[0, 1.0, 0, 0]]], dtype=torch.float64), angles([0], 4), backend=backend)
    assert math.isclose(float((q * k).sum()), 0.8414709848, abs_tol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_products_depend_on_distance_alone(backend: str) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 3, 8, generator=generator, dtype=torch.float64)

    def product(at_q: int, at_k: int) -> torch.Tensor:
        return (rope_(q.clone(), angles([at_q], 8), backend=backend) * rope_(k.clone(), angles([at_k], 8), backend=backend)).sum(-1)

    assert torch.allclose(product(17, 5), product(112, 100), atol=1e-12)
    assert not torch.allclose(product(17, 5), product(18, 5), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_torch_matches_reference_in_a_slice(dtype: torch.dtype) -> None:
    """The rotated part is the tail of each head's query: in place, and nothing else is touched."""
    x = torch.randn(5, 4, 24, generator=torch.Generator().manual_seed(2), dtype=dtype)
    one, two = x.clone(), x.clone()
    rotation = angles([0, 3, 64, 1000, 7], 8).to(torch.complex64 if dtype == torch.float32 else torch.complex128)
    rope_(one[..., 16:], rotation, backend="torch")
    rope_(two[..., 16:], rotation, backend="reference")
    assert torch.allclose(one, two, atol=1e-6) and torch.equal(one[..., :16], x[..., :16])
    assert not torch.allclose(one[1:, :, 16:], x[1:, :, 16:])


def test_rejects_wrong_shapes() -> None:
    with pytest.raises(AssertionError):
        rope_(torch.zeros(2, 1, 8), angles([0], 8))
