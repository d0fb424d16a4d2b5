from collections.abc import Iterator

import pytest
import torch

from kernels.numerics import FP8, dequantise_tokens, relative_error
from kernels.quant_fp8 import quant_fp8
from kernels.rms_norm import add_rms_norm, add_rms_norm_quant, rms_norm, rms_norm_quant
from tests.bench.report import Row
from tests.kernels.device import DEVICE, FLOAT, ON_GPU, generator, gpu_only, skip_unless_available
from tests.kernels.poison import poison_empty

SHAPES = [(0, 8), (1, 8), (3, 64), (5, 7168)]
HIDDEN = [128, 1536, *(pytest.param(hidden, marks=pytest.mark.slow) for hidden in (2048, 5120, 7168))]
BACKENDS = ["torch", "reference", "triton"]
FUSED = ["reference", "triton"]


def make(label: str, *shape: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.randn(shape, generator=generator(label), device=DEVICE).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal values, NaN included."""
    return torch.equal(*(x.float().nan_to_num(nan=12345.0) for x in (a, b)))


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [*SHAPES[:3], (2, 48), (3, 1536), pytest.param((5, 7168), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("dtype", sorted({torch.float32, FLOAT}, key=str), ids=str)
def test_every_backend_equals_the_reference_in_fp64(
    backend: str, shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_unless_available(backend, dtype)
    poison_empty(monkeypatch)
    x, residual = make(f"{shape}{dtype}", 2, *shape, dtype=dtype)
    weight = make(f"w{shape}", shape[1], dtype=dtype)
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    got = rms_norm(x, weight, eps=1e-6, backend=backend)
    assert got.dtype == dtype
    assert relative_error(got, rms_norm(x.double(), weight.double(), eps=1e-6, backend="reference")) < bound
    normed, total = add_rms_norm(x, residual, weight, eps=1e-6, backend=backend)
    assert same(total, x + residual) and same(normed, rms_norm(total, weight, eps=1e-6, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_rows_and_nan_rows(backend: str) -> None:
    """A slice of a fused GEMM's output has strided rows; a NaN stays in its row (B16)."""
    skip_unless_available(backend, torch.float32)
    x = torch.randn(4, 32, generator=generator("strided"), device=DEVICE)[:, 8:24]
    ones = torch.ones(16, device=DEVICE)
    clean = rms_norm(x.clone(), ones, eps=1e-6, backend=backend)
    x[2] = torch.nan
    got = rms_norm(x, ones, eps=1e-6, backend=backend)
    assert got[2].isnan().all() and torch.equal(got[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_add_returns_the_sum_and_keeps_its_arguments(backend: str) -> None:
    skip_unless_available(backend, torch.float32)
    x, residual = torch.randn(2, 3, 16, generator=generator("add"), device=DEVICE)
    ones, kept = torch.ones(16, device=DEVICE), (x.clone(), residual.clone())
    normed, total = add_rms_norm(x, residual, ones, eps=1e-6, backend=backend)
    assert torch.equal(total, kept[0] + kept[1]) and torch.equal(x, kept[0]) and torch.equal(residual, kept[1])
    assert torch.equal(normed, rms_norm(total, ones, eps=1e-6, backend=backend))


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_fused_gives_the_bits_of_its_parts(backend: str, hidden: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_available(backend, FLOAT)
    poison_empty(monkeypatch)
    x, residual = make(f"fused{hidden}{rows}", 2, rows, hidden + 64)[..., 32 : hidden + 32]  # rows are strided
    weight = make(f"weight{hidden}", hidden)
    normed, total = add_rms_norm(x, residual, weight, eps=1e-6, backend=backend)
    for keep_normed in (True, False):
        got, got_normed, got_total = add_rms_norm_quant(x, residual, weight, eps=1e-6, keep_normed=keep_normed, backend=backend)
        expected = quant_fp8(normed, backend=backend)
        assert same(got.data, expected.data) and same(got.scale, expected.scale) and same(got_total, total)
        assert got.scale.stride() == expected.scale.stride()
        assert same(got_normed, normed) if keep_normed and got_normed is not None else got_normed is None
    got = rms_norm_quant(x, weight, eps=1e-6, backend=backend)
    expected = quant_fp8(rms_norm(x, weight, eps=1e-6, backend=backend), backend=backend)
    assert same(got.data, expected.data) and same(got.scale, expected.scale)


@pytest.mark.parametrize("hidden", [128, 7168])
def test_fused_is_close_to_the_fp64_formula(hidden: int) -> None:
    skip_unless_available("triton", FLOAT)
    x, residual = make(f"close{hidden}", 2, 4, hidden)
    weight = make(f"close_weight{hidden}", hidden)
    got, normed, _ = add_rms_norm_quant(x, residual, weight, eps=1e-6, keep_normed=True, backend="triton")
    expected = rms_norm((x + residual).double(), weight.double(), eps=1e-6, backend="reference")
    assert normed is not None and relative_error(normed, expected) < (1e-2 if ON_GPU else 1e-5)
    reference = quant_fp8(rms_norm(x + residual, weight, eps=1e-6, backend="reference"), backend="reference")
    assert relative_error(dequantise_tokens(got), dequantise_tokens(reference)) < 1e-2


@pytest.mark.parametrize("backend", FUSED)
def test_a_nan_stays_in_its_row_of_a_fused_norm(backend: str) -> None:
    skip_unless_available(backend, FLOAT)
    x, residual = make("nan", 2, 4, 256)
    weight = make("nan_weight", 256)
    clean = add_rms_norm_quant(x, residual, weight, eps=1e-6, keep_normed=False, backend=backend)
    residual[1, 7] = torch.nan
    quantised, _, total = add_rms_norm_quant(x, residual, weight, eps=1e-6, keep_normed=False, backend=backend)
    assert quantised.data[1].float().isnan().all() and int(total[1].isnan().sum()) == 1
    others = [0, 2, 3]
    assert same(quantised.data[others], clean[0].data[others]) and same(quantised.scale[others], clean[0].scale[others])


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_rows_beyond_2_31_elements(backend: str) -> None:
    """On CPU no page is touched but the rows read."""
    skip_unless_available(backend, FLOAT)
    far = torch.empty((2**31 // 128 + 4, 128), dtype=FLOAT, device=DEVICE)
    apart = far[:: far.shape[0] - 1]
    apart.copy_(make("far", 2, 128))
    weight = make("far_weight", 128)
    assert same(rms_norm(apart, weight, eps=1e-6, backend=backend), rms_norm(apart.clone(), weight, eps=1e-6, backend=backend))
    near = add_rms_norm_quant(apart.clone(), apart.clone(), weight, eps=1e-6, keep_normed=False, backend=backend)
    got = add_rms_norm_quant(apart, apart, weight, eps=1e-6, keep_normed=False, backend=backend)
    assert same(got[0].data, near[0].data) and same(got[2], near[2])


@gpu_only
@pytest.mark.skipif(not ON_GPU, reason="needs 25 GB of GPU memory")
def test_outputs_beyond_2_31_elements() -> None:
    rows, weight = 2**31 // 7168 + 8, make("many_weight", 7168)
    x = torch.empty(rows, 7168, dtype=FLOAT, device=DEVICE)
    x[-8:] = make("many", 8, 7168)
    got, normed, total = add_rms_norm_quant(x, x, weight, eps=1e-6, keep_normed=True, backend="triton")
    last = add_rms_norm_quant(x[-8:], x[-8:], weight, eps=1e-6, keep_normed=True, backend="triton")
    assert normed is not None and last[1] is not None
    assert same(got.data[-8:], last[0].data) and same(got.scale[-8:], last[0].scale) and same(normed[-8:], last[1])
    assert same(total[-8:], last[2])


def test_rejects_wrong_shapes() -> None:
    with pytest.raises(AssertionError):
        rms_norm(torch.zeros(2, 8), torch.zeros(7), eps=1e-6)
    with pytest.raises(AssertionError):
        rms_norm(torch.zeros(2, 8), torch.zeros(16)[::2], eps=1e-6)
    with pytest.raises(AssertionError):
        add_rms_norm(torch.zeros(2, 8), torch.zeros(3, 8), torch.zeros(8), eps=1e-6)
    with pytest.raises(AssertionError):
        rms_norm_quant(torch.zeros(2, 8), torch.zeros(8), eps=1e-6)
    with pytest.raises(AssertionError):
        add_rms_norm_quant(torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(8), eps=1e-6, keep_normed=True)


def bench_rms_norm() -> Iterator[Row]:
    """Against FlashInfer's norms, of which one quantises, with one scale that it is given."""
    from flashinfer.norm import fused_add_rmsnorm, fused_add_rmsnorm_quant, rmsnorm

    from kernels.timing import compare_us, num_sets

    one = torch.ones(1, device="cuda")
    for rows, hidden in ((256, 7168), (4096, 7168), (256, 1536)):
        weight = torch.randn(hidden, dtype=torch.bfloat16, device="cuda")
        sets = [torch.randn(2, rows, hidden, dtype=torch.bfloat16, device="cuda") for _ in range(num_sets(rows * hidden * 4))]
        outs = [torch.empty(rows, hidden, dtype=FP8, device="cuda") for _ in sets]
        expected = rms_norm(sets[0][0].double(), weight.double(), eps=1e-6, backend="reference")
        assert relative_error(rms_norm(sets[0][0], weight, eps=1e-6, backend="triton"), expected) < 1e-2
        us = compare_us({
            "ours": [lambda s=s, w=weight: rms_norm(s[0], w, eps=1e-6, backend="triton") for s in sets],
            "flashinfer": [lambda s=s, w=weight: rmsnorm(s[0], w, 1e-6) for s in sets],
        })
        yield _against(f"rms_norm-{rows}x{hidden}", "FlashInfer rmsnorm", us, rows * hidden * 4)
        us = compare_us({
            "ours": [lambda s=s, w=weight: add_rms_norm(s[0], s[1], w, eps=1e-6, backend="triton") for s in sets],
            "flashinfer": [lambda s=s, w=weight: fused_add_rmsnorm(s[0], s[1], w, 1e-6) for s in sets],
        })
        yield _against(f"add_rms_norm-{rows}x{hidden}", "FlashInfer fused_add_rmsnorm, in place,", us, rows * hidden * 8)
        us = compare_us({
            "ours": [lambda s=s, w=weight: add_rms_norm_quant(s[0], s[1], w, eps=1e-6, keep_normed=False) for s in sets],
            "flashinfer": [
                lambda s=s, q=q, w=weight: fused_add_rmsnorm_quant(q, s[0], s[1], w, one, 1e-6) for s, q in zip(sets, outs, strict=True)
            ],
        })
        peer = "FlashInfer fused_add_rmsnorm_quant, one given scale for all,"
        yield _against(f"add_rms_norm_quant-{rows}x{hidden}", peer, us, rows * hidden * 7)

        def parts(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor = weight) -> object:
            fused_add_rmsnorm(x, residual, weight, 1e-6)
            return quant_fp8(x)

        us = compare_us({
            "ours": [lambda s=s, w=weight: add_rms_norm_quant(s[0], s[1], w, eps=1e-6, keep_normed=True) for s in sets],
            "flashinfer": [lambda s=s, parts=parts: parts(s[0], s[1]) for s in sets],
        })
        peer = "FlashInfer fused_add_rmsnorm, in place, then our quant_fp8"
        yield _against(f"add_rms_norm_quant-normed-{rows}x{hidden}", peer, us, rows * hidden * 9)


def _against(name: str, peer: str, us: dict[str, float], size: int) -> Row:
    conditions = f"{peer} {us['flashinfer']:.2f} us, ours {us['ours']:.2f}, floor {size / 4.3e6:.1f}"
    return Row(f"K9-{name}", us["flashinfer"] / us["ours"], "x", "higher", 0.9, 1.0, conditions)
