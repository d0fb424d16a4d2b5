"""Quantisation to FP8: all backends give the reference's bits, which are those of a plain loop."""

from collections.abc import Iterator

import pytest
import torch

from kernels.numerics import FP8, FP8_MAX, GROUP, MIN_AMAX, dequantise_blocks, dequantise_tokens, relative_error
from kernels.quant_fp8 import quant_fp8, quant_fp8_block
from tests.bench.report import Row
from tests.kernels.device import DEVICE, generator, gpu_only, skip_unless_available

BACKENDS = ["reference", "triton"]
TOKENS = [(0, 256), (1, 128), (5, 384), (33, 1024), (3, 7, 256), (2, 0, 128)]
WEIGHTS = [(0, 128), (64, 128), (192, 384), (2, 320, 256)]


def random(label: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of very different magnitudes, some elements 0."""
    rng = generator(label)
    x = torch.randn(shape, generator=rng, device=DEVICE) * torch.randn((*shape[:-1], 1), generator=rng, device=DEVICE).mul(4).exp2()
    return (x * (torch.rand(shape, generator=rng, device=DEVICE) > 0.05)).to(dtype)


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    """A true division, on the CPU: on GPUs torch multiplies with a number's reciprocal."""
    return (amax.cpu().clamp(min=MIN_AMAX) / FP8_MAX).to(amax.device)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", TOKENS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tokens_equal_the_formula(backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    skip_unless_available(backend, dtype)
    x = random(f"{shape}{dtype}", *shape, dtype=dtype)
    got = quant_fp8(x, backend=backend)
    assert got.data.shape == x.shape and got.data.is_contiguous() and got.data.dtype == FP8
    assert got.scale.shape == (*shape[:-1], shape[-1] // GROUP) and got.scale.dtype == torch.float32
    assert shape[-2] == 0 or got.scale.stride()[-2:] == (1, -(-shape[-2] // 4) * 4)
    groups = x.float().reshape(-1, GROUP)
    scale = scale_of(groups.abs().amax(dim=1, keepdim=True))
    assert torch.equal(got.scale.reshape(-1, 1), scale)
    assert same(got.data.reshape(-1, GROUP), (groups / scale).to(FP8))
    assert x.numel() == 0 or relative_error(dequantise_tokens(got), x) < 0.04


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
def test_blocks_equal_the_formula(backend: str, shape: tuple[int, ...]) -> None:
    skip_unless_available(backend, torch.bfloat16)
    w = random(f"w{shape}", *shape)
    got = quant_fp8_block(w, backend=backend)
    assert got.data.is_contiguous() and got.scale.is_contiguous() and got.scale.dtype == torch.float32
    experts = [w] if w.ndim == 2 else list(w)
    datas, scales = got.data.view(len(experts), *shape[-2:]), got.scale.view(len(experts), -(-shape[-2] // 128), shape[-1] // 128)
    for expert, data, scale in zip(experts, datas, scales, strict=True):
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                part = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                assert scale[i, j] == scale_of(expert[part].float().abs().max())
                assert same(data[part], (expert[part].float() / scale[i, j]).to(FP8))
    assert w.numel() == 0 or relative_error(dequantise_blocks(got), w) < 0.04


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_inputs_zeros_and_nan(backend: str) -> None:
    """A slice of a fused GEMM's output; a NaN stays in its row and group, a group of zeros has no scale 0."""
    skip_unless_available(backend, torch.bfloat16)
    wide = random("wide", 2, 6, 768)
    x = wide[:, 1:4, 128:512]
    clean = quant_fp8(x.clone(), backend=backend)
    assert same(quant_fp8(x, backend=backend).data, clean.data) and torch.equal(quant_fp8(x, backend=backend).scale, clean.scale)
    assert same(quant_fp8(x[1], backend=backend).data, clean.data[1])
    assert same(quant_fp8_block(x, backend=backend).data, quant_fp8_block(x.clone(), backend=backend).data)
    x[1, 2, 128] = torch.nan
    x[0, 0] = 0
    got = quant_fp8(x, backend=backend)
    assert got.scale[1, 2, 1].isnan() and got.data[1, 2, 128:256].float().isnan().all()
    assert (got.scale[0, 0] == scale_of(torch.zeros((), device=DEVICE))).all() and not got.data[0, 0].float().any()
    got.scale[1, 2, 1] = clean.scale[1, 2, 1]
    got.data[1, 2, 128:256] = clean.data[1, 2, 128:256]
    got.scale[0, 0], got.data[0, 0] = clean.scale[0, 0], clean.data[0, 0]
    assert same(got.data, clean.data) and torch.equal(got.scale, clean.scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_infinity_makes_its_group_nan_and_no_other(backend: str) -> None:
    """Once dequantised: a scale or the data may hold it."""
    skip_unless_available(backend, torch.bfloat16)
    x = random("infinite", 3, 384)
    clean = dequantise_tokens(quant_fp8(x, backend=backend))
    x[1, 130], x[2, 383] = torch.inf, -torch.inf
    clean[1, 128:256], clean[2, 256:] = torch.nan, torch.nan
    torch.testing.assert_close(dequantise_tokens(quant_fp8(x, backend=backend)), clean, rtol=0, atol=0, equal_nan=True)
    blocks = dequantise_blocks(quant_fp8_block(x, backend=backend))
    assert blocks[:, 128:].isnan().all() and blocks[:, :128].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_beyond_2_31_elements(backend: str) -> None:
    skip_unless_available(backend, torch.bfloat16)
    far = torch.empty((2**31 // 128 + 4, 128), dtype=torch.bfloat16, device=DEVICE)  # on CPU no page is touched but the rows read
    x = far[:: far.shape[0] - 1]
    x.copy_(random("far", 2, 128))
    assert same(quant_fp8(x, backend=backend).data, quant_fp8(x.clone(), backend="reference").data)
    assert same(quant_fp8_block(x, backend=backend).data, quant_fp8_block(x.clone(), backend="reference").data)


@gpu_only
@pytest.mark.skipif(DEVICE == "cpu", reason="needs 7 GB of GPU memory")
def test_more_than_2_31_elements() -> None:
    x = random("many", 4096, 128).repeat(1, 4224)
    got = quant_fp8(x, backend="triton")
    assert same(got.data[:, -128:], quant_fp8(x[:, -128:], backend="reference").data)
    block = quant_fp8_block(x, backend="triton")
    assert same(block.data[:, -128:], quant_fp8_block(x[:, -128:], backend="reference").data)


def test_rejects_wrong_shapes() -> None:
    for function in (quant_fp8, quant_fp8_block):
        for x in (torch.zeros(128), torch.zeros(2, 100), torch.zeros(128, 128).t(), torch.zeros(1, 1, 2, 128)):
            if x.shape == (128, 128):
                x[0, 0] = 1
            with pytest.raises(AssertionError):
                function(x.to(torch.bfloat16))


def bench_quant_fp8() -> Iterator[Row]:
    """Against the bandwidth: the library has no such kernel that gives DeepGEMM's layout."""
    from kernels.timing import cold_us, num_sets

    for rows, k in ((256, 7168), (256, 16384), (4096, 7168)):
        size = rows * k * 3
        sets = [torch.randn(rows, k, dtype=torch.bfloat16, device="cuda") for _ in range(num_sets(size))]
        us = cold_us([lambda x=x: quant_fp8(x, backend="triton") for x in sets])
        yield Row(f"quant-{rows}x{k}", us, "us", "lower", None, None, f"1x128, cold L2, floor {size / 4.3e6:.1f} us")
