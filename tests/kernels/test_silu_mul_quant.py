"""SiLU, product and quantisation in one: the fp32 formula quantised by the rule, of the rows in use alone."""

from collections.abc import Iterator

import pytest
import torch

from kernels.numerics import FP8, GROUP, Fp8, dequantise_tokens, relative_error
from kernels.quant_fp8 import quant_fp8
from kernels.silu_mul_quant import silu_mul_quant, silu_mul_quant_masked
from tests.bench.report import Row
from tests.kernels import device
from tests.kernels.device import DEVICE, FLOAT, generator, gpu_only, skip_unless_available
from tests.kernels.poison import poison_empty

BACKENDS = ["reference", "triton"]
CASES = [(0, 128), (1, 128), (7, 384), (3, 1408), (2, 2048)]  # (rows, intermediate)


def make(label: str, *shape: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.randn(shape, generator=generator(label), device=DEVICE).mul(3).to(dtype)


def formula(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def check(got: Fp8, gate_up: torch.Tensor) -> None:
    """Scales as the rule says; data as close to the formula as a cast to e4m3 allows, and hardly ever another neighbour than the rule's."""
    if gate_up.shape[0] == 0:
        return
    expected = quant_fp8(formula(gate_up).float(), backend="reference")
    assert relative_error(got.scale, expected.scale) < 1e-5
    assert relative_error(dequantise_tokens(got), dequantise_tokens(expected)) < 1e-2
    assert relative_error(dequantise_tokens(got), formula(gate_up)) < 0.04
    assert (got.data.float() != expected.data.float()).float().mean() < 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_formula(backend: str, case: tuple[int, int]) -> None:
    skip_unless_available(backend, FLOAT)
    rows, intermediate = case
    gate_up = make(f"silu{case}", rows, 2 * intermediate)
    got = silu_mul_quant(gate_up, backend=backend)
    assert got.data.shape == (rows, intermediate) and got.data.is_contiguous() and got.data.dtype == FP8
    assert got.scale.shape == (rows, intermediate // GROUP) and (rows == 0 or got.scale.stride() == (1, -(-rows // 4) * 4))
    check(got, gate_up)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0], [5], [0, 5, 0]], ids=str)
def test_rows_in_use_alone_are_read_and_written(backend: str, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows are NaN: they stay where they are, and what they would have given is never written."""
    skip_unless_available(backend, FLOAT)
    poison_empty(monkeypatch)
    wide = make(f"masked{counts}", len(counts), 5, 2 * 256 + 128)
    gate_up = wide[:, :, 64 : 64 + 2 * 256]  # neither rows nor groups are contiguous
    for group, count in enumerate(counts):
        gate_up[group, count:] = torch.nan
    got = silu_mul_quant_masked(gate_up, torch.tensor(counts, dtype=torch.int32, device=DEVICE), backend=backend)
    for group, count in enumerate(counts):
        check(Fp8(got.data[group, :count], got.scale[group, :count]), gate_up[group, :count])
        assert got.data[group, count:].float().isnan().all() and got.scale[group, count:].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_total_read_on_the_device(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_available(backend, FLOAT)
    poison_empty(monkeypatch)
    gate_up = make("total", 6, 512)
    gate_up[4:] = torch.nan
    got = silu_mul_quant(gate_up, torch.tensor([4], dtype=torch.int32, device=DEVICE), backend=backend)
    check(Fp8(got.data[:4], got.scale[:4]), gate_up[:4])
    assert got.data[4:].float().isnan().all() and got.scale[4:].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_stays_in_its_row(backend: str) -> None:
    skip_unless_available(backend, FLOAT)
    gate_up = make("nan", 4, 512)
    clean = silu_mul_quant(gate_up, backend=backend)
    gate_up[2] = torch.nan
    got = silu_mul_quant(gate_up, backend=backend)
    assert got.data[2].float().isnan().all()
    assert torch.equal(got.data[[0, 1, 3]].float(), clean.data[[0, 1, 3]].float())
    assert torch.equal(got.scale[[0, 1, 3]], clean.scale[[0, 1, 3]])


def test_large_gates_give_zero_or_the_gate_itself() -> None:
    """exp(-gate) overflows or vanishes: neither may become NaN."""
    skip_unless_available("triton", FLOAT)
    gate_up = torch.ones(1, 256, device=DEVICE, dtype=FLOAT)
    gate_up[0, :4] = torch.tensor([-3e4, -100.0, 100.0, 0.0], device=DEVICE)
    got = dequantise_tokens(silu_mul_quant(gate_up, backend="triton"))[0, :4]
    assert got.tolist() == pytest.approx([0, 0, 100, 0], abs=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_beyond_2_31_elements(backend: str) -> None:
    """Offsets of a row and of a group; on CPU no page is touched but the rows read."""
    skip_unless_available(backend, FLOAT)
    far = torch.empty((2**31 // 256 + 4, 256), dtype=FLOAT, device=DEVICE)
    apart = far[:: far.shape[0] - 1]
    apart.copy_(make("far", 2, 256))
    check(silu_mul_quant(apart, backend=backend), apart)
    got = silu_mul_quant_masked(apart.unsqueeze(1), torch.tensor([1, 1], dtype=torch.int32, device=DEVICE), backend=backend)
    check(Fp8(got.data[:, 0], got.scale[:, 0]), apart)


@gpu_only
@pytest.mark.skipif(not device.ON_GPU, reason="needs 17 GB of GPU memory")
def test_outputs_beyond_2_31_elements() -> None:
    rows = 2**31 // 2048 + 8
    gate_up = torch.empty(rows, 4096, dtype=FLOAT, device=DEVICE)
    gate_up[-8:] = make("many", 8, 4096)
    gate_up[:8] = gate_up[-8:]
    got = silu_mul_quant(gate_up, backend="triton")
    check(Fp8(got.data[-8:], got.scale[-8:]), gate_up[-8:])
    check(Fp8(got.data[:8], got.scale[:8]), gate_up[:8])


@pytest.mark.slow
@pytest.mark.parametrize("groups", [32, 256])
def test_many_groups(groups: int) -> None:
    skip_unless_available("triton", FLOAT)
    counts = torch.randint(0, 3, (groups,), generator=generator("counts"), device=DEVICE, dtype=torch.int32)
    gate_up = make(f"groups{groups}", groups, 3, 256)
    got = silu_mul_quant_masked(gate_up, counts, backend="triton")
    used = torch.arange(3, device=DEVICE) < counts[:, None]
    check(Fp8(got.data[used], got.scale[used]), gate_up[used])


def test_rejects_wrong_shapes() -> None:
    counts = torch.zeros(2, dtype=torch.int32)
    for gate_up in (torch.zeros(2, 130), torch.zeros(256, 2).t(), torch.zeros(256)):
        with pytest.raises(AssertionError):
            silu_mul_quant(gate_up)
    every_second = torch.zeros(4, dtype=torch.int32)[::2]
    groups = torch.zeros(2, 2, 256)
    for gate_up, num_rows in ((groups[0], counts), (torch.zeros(3, 2, 256), counts), (groups, counts.long()), (groups, every_second)):
        with pytest.raises(AssertionError):
            silu_mul_quant_masked(gate_up, num_rows)


def bench_silu_mul_quant() -> Iterator[Row]:
    """Against FlashInfer's silu_and_mul and a quantisation: no library does both on Hopper with a scale for 128 columns."""
    from flashinfer.activation import silu_and_mul

    from kernels.timing import cold_us, compare_us, num_sets

    for rows, intermediate in ((2048, 2048), (256, 2048), (16384, 2048)):
        sets = [torch.randn(rows, 2 * intermediate, dtype=torch.bfloat16, device="cuda") for _ in range(num_sets(rows * intermediate * 5))]
        check(silu_mul_quant(sets[0][:64], backend="triton"), sets[0][:64])
        us = compare_us({
            "ours": [lambda x=x: silu_mul_quant(x, backend="triton") for x in sets],
            "flashinfer": [lambda x=x: quant_fp8(silu_and_mul(x)) for x in sets],
            "half": [lambda x=x: silu_and_mul(x) for x in sets],
        })
        yield Row(
            f"K9-silu_mul_quant-{rows}x{intermediate}", us["flashinfer"] / us["ours"], "x", "higher", 0.9, 1.0,
            f"FlashInfer silu_and_mul, then our quant_fp8 {us['flashinfer']:.2f} us (the first alone {us['half']:.2f}), "
            f"ours {us['ours']:.2f}, floor {rows * intermediate * 5 / 4.3e6:.1f}",
        )
    for groups, used in ((2, 1024), (32, 64)):
        max_m, intermediate = 4096 // groups, 2048
        counts = torch.full((groups,), used, dtype=torch.int32, device="cuda")
        size = groups * used * intermediate * 5
        masked = [torch.randn(groups, max_m, 2 * intermediate, dtype=torch.bfloat16, device="cuda") for _ in range(num_sets(size))]
        us = cold_us([lambda x=x, counts=counts: silu_mul_quant_masked(x, counts, backend="triton") for x in masked])
        yield Row(
            f"silu_mul_quant_masked-{groups}x{used}", us, "us", "lower", None, None, f"of {max_m} rows each, floor {size / 4.3e6:.1f} us"
        )
