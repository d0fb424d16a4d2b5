import math
from collections.abc import Iterator

import pytest
import torch

from kernels.numerics import relative_error
from kernels.rope import rope_, rotations
from tests.bench.report import Row
from tests.kernels.device import DEVICE, FLOAT, ON_GPU, generator, skip_unless_available

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


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
@pytest.mark.parametrize("shape", [(0, 2, 64), (3, 1, 64), (2, 5, 16), (2, 3, 12), (2, 128, 64)], ids=str)
def test_every_backend_in_place_and_into_a_slice(backend: str, shape: tuple[int, int, int]) -> None:
    """Of half types the same as in fp64; what surrounds x and out stays; a NaN stays in its head."""
    skip_unless_available(backend, FLOAT)
    num_tokens, num_heads, rope = shape
    wide = torch.randn(num_tokens, num_heads, rope + 128, generator=generator(f"rope{shape}"), device=DEVICE).to(FLOAT)
    x, kept = wide[..., 128:], wide.clone()
    rotation = angles([7 * token + 1 for token in range(num_tokens)], rope).to(DEVICE)
    expected = rope_(x.double(), rotation, backend="reference")
    out = torch.full((num_tokens, num_heads, rope + 8), torch.nan, dtype=FLOAT, device=DEVICE)
    got = rope_(x, rotation.to(torch.complex64), out=out[..., 8:], backend=backend)
    bound = 1e-2 if ON_GPU else 1e-5
    assert relative_error(got, expected) < bound and got.data_ptr() == out[..., 8:].data_ptr()
    assert torch.equal(wide, kept) and out[..., :8].isnan().all()
    if num_tokens:
        x[0, 0] = torch.nan
    assert rope_(x, rotation.to(torch.complex64), backend=backend) is x
    if num_tokens:
        assert x[0, 0].isnan().all()
        x[0, 0] = expected[0, 0]
    assert relative_error(x, expected) < bound and torch.equal(wide[..., :128], kept[..., :128])


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
def test_rows_beyond_2_31_elements(backend: str) -> None:
    """On CPU no page is touched but the rows read."""
    skip_unless_available(backend, FLOAT)
    far = torch.empty((2**31 // 64 + 4, 1, 64), dtype=FLOAT, device=DEVICE)
    x = far[:: far.shape[0] - 1]
    x.copy_(torch.randn(2, 1, 64, generator=generator("far"), device=DEVICE))
    rotation = angles([3, 4], 64).to(torch.complex64).to(DEVICE)
    expected = rope_(x.clone(), rotation, backend=backend)
    assert torch.equal(rope_(x, rotation, backend=backend), expected)


def test_rejects_wrong_shapes() -> None:
    with pytest.raises(AssertionError):
        rope_(torch.zeros(2, 1, 8), angles([0], 8))
    with pytest.raises(AssertionError):
        rope_(torch.zeros(1, 1, 8), angles([0], 8), out=torch.zeros(1, 2, 8))


@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
def test_rejects_strides_that_split_pairs(backend: str) -> None:
    skip_unless_available(backend, FLOAT)
    x, odd = torch.zeros(2, 3, 8, dtype=FLOAT, device=DEVICE), torch.zeros(2, 3, 9, dtype=FLOAT, device=DEVICE)[..., :8]
    turned, rotation = torch.zeros(2, 8, 3, dtype=FLOAT, device=DEVICE).transpose(1, 2), angles([0, 1], 8).to(torch.complex64).to(DEVICE)
    for source, turn, out in (
        (odd, rotation, None), (turned, rotation, x), (x, rotation, odd), (x, rotation, turned),
        (x, rotation.repeat_interleave(2, dim=1)[:, ::2], None),
    ):
        with pytest.raises(AssertionError):
            rope_(source, turn, out=out, backend=backend)


def bench_rope() -> Iterator[Row]:
    """The rotary part of 128 heads' queries into the buffer that attention reads; torch's complex product as the peer."""
    from kernels.timing import compare_us, num_sets

    for rows in (256, 4096):
        size = rows * 128 * 64 * 4
        count = num_sets(size)
        rotation = angles(list(range(rows)), 64).to(torch.complex64).to("cuda")
        queries = [torch.randn(rows, 128, 192, dtype=torch.bfloat16, device="cuda")[..., 128:] for _ in range(count)]
        outs = [torch.empty(rows, 128, 576, dtype=torch.bfloat16, device="cuda")[..., 512:] for _ in range(count)]
        expected = rope_(queries[0].double(), rotation.to(torch.complex128), backend="reference")
        assert relative_error(rope_(queries[0], rotation, out=outs[0], backend="triton"), expected) < 1e-2
        us = compare_us({
            backend: [lambda q=q, o=o, r=rotation, b=backend: rope_(q, r, out=o, backend=b) for q, o in zip(queries, outs, strict=True)]
            for backend in ("triton", "torch")
        })
        yield Row(
            f"K9-rope-{rows}x128x64", us["torch"] / us["triton"], "x", "higher", 0.9, 1.0,
            f"torch's complex product {us['torch']:.2f} us, ours {us['triton']:.2f}, floor {size / 4.3e6:.1f}",
        )
