"""Dense FP8 GEMM against a product of the dequantised operands in float64."""

from collections.abc import Iterator

import pytest
import torch

from kernels.backend import BackendError, why_unavailable
from kernels.fp8_gemm import concat_blocks, fp8_gemm
from kernels.fp8_gemm._table import MEASURED, Config, Streamed, choose
from kernels.numerics import FP8, GROUP, Fp8, dequantise_blocks, dequantise_tokens, empty_fp8, relative_error
from kernels.quant_fp8 import quant_fp8, quant_fp8_block
from tests.bench.report import Row
from tests.kernels.device import DEVICE, ON_GPU, generator, gpu_only, skip_unless_available

BACKENDS = ["reference", "torch", "triton", "deep_gemm"]
SHAPES = [(1, 64, 128), (3, 192, 256), (17, 320, 384)]  # m, n, k; n that ends in half a block
SHAPES_GPU = [(m, n, k) for m in (1, 7, 16, 33, 64, 100, 128, 129, 256, 300) for n, k in ((2112, 7168), (7168, 2048), (576, 512))]
CONFIGS = [
    Config(16, 64, 1, 3, 4, True),
    Config(16, 128, 3, 3, 4, True, tma=False),
    Config(64, 64, 2, 2, 4, False),
    Config(64, 128, 5, 3, 4, False, tma=False),
]
STREAMED = [
    Streamed(16, 64, 5, 3, 4, 80, True),
    Streamed(32, 128, 7, 2, 8, 128, True),
    Streamed(64, 16, 3, 4, 4, 128, False),
    Streamed(64, 64, 21, 3, 4, 128, False),
    Streamed(64, 128, 13, 3, 4, 128, False),
    Streamed(128, 128, 2, 3, 8, 168, False),
    Streamed(256, 128, 3, 3, 4, 168, False),
]


def operands(label: str, m: int, n: int, k: int) -> tuple[Fp8, Fp8]:
    """Rows and blocks of different magnitudes, so that a scale taken from elsewhere shows."""
    rng = generator(label)
    groups = torch.randn(m, k // GROUP, generator=rng, device=DEVICE).exp2()
    x = torch.randn(m, k, generator=rng, device=DEVICE) * groups.repeat_interleave(GROUP, 1)
    w = torch.randn(n, k, generator=rng, device=DEVICE)
    blocks = torch.randn(-(-n // GROUP), k // GROUP, generator=rng, device=DEVICE).exp2()
    w *= blocks.repeat_interleave(GROUP, 0)[:n].repeat_interleave(GROUP, 1)
    return quant_fp8(x, backend="reference"), quant_fp8_block(w, backend="reference")


def expected(x: Fp8, w: Fp8) -> torch.Tensor:
    return dequantise_tokens(x).double() @ dequantise_blocks(w).double().T


def poisoned(m: int, n: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full((m, n), torch.nan, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES_GPU if ON_GPU else SHAPES, ids=str)
def test_equals_the_product(backend: str, shape: tuple[int, int, int]) -> None:
    skip_unless_available(backend, FP8)
    x, w = operands(f"{shape}", *shape)
    out = poisoned(*shape[:2])
    assert fp8_gemm(x, w, out=out, backend=backend) is out
    assert relative_error(out, expected(x, w)) < 1e-2
    assert relative_error(fp8_gemm(x, w, backend=backend), expected(x, w)) < 1e-2
    if backend != "deep_gemm" and not ON_GPU:
        assert relative_error(fp8_gemm(x, w, out=poisoned(*shape[:2], torch.float32), backend=backend), expected(x, w)) < 1e-5


@pytest.mark.parametrize("config", CONFIGS + STREAMED, ids=str)
def test_every_kind_of_configuration(config: Config | Streamed) -> None:
    """Splits of unequal length, tiles with rows and columns beyond the end; a NaN passes through the
    sums; the counters are back at 0, so a second call is right too."""
    skip_unless_available("triton", FP8)
    if isinstance(config, Streamed) and not ON_GPU:
        pytest.skip("Gluon has no interpreter")
    from kernels.fp8_gemm._triton import Workspace, fp8_gemm

    m = 199 if config.block_m == 256 else 19
    x, w = operands(f"{config}", m, 192, 896)
    workspace = Workspace(x.data.device)
    workspace.partials.fill_(torch.nan)
    x.scale[5, 2] = torch.nan
    for _ in range(2):
        out = poisoned(m, 192, torch.float32)
        fp8_gemm(x, w, out, config, workspace)
        assert out[5].isnan().all()
        out[5] = 0
        assert relative_error(out, expected(x, w).nan_to_num(0)) < (1e-3 if ON_GPU else 1e-5)
        assert not workspace.counters.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_apart(backend: str) -> None:
    """A NaN in a row stays there, a row's bits do not depend on other rows; strided data and output."""
    skip_unless_available(backend, FP8)
    m, n, k = (33, 2112, 7168) if ON_GPU else (5, 192, 256)
    x, w = operands("rows", m, n, k)
    clean = fp8_gemm(x, w, backend=backend)
    wide = torch.zeros(m, k + 256, dtype=torch.uint8, device=DEVICE).view(FP8)
    wide[:, 128:-128] = x.data
    strided = Fp8(wide[:, 128:-128], x.scale)
    out = poisoned(m, n + 64)
    fp8_gemm(strided, w, out=out[:, :n], backend=backend)
    assert torch.equal(out[:, :n], clean) and out[:, n:].isnan().all()
    strided.data[2, 128:256], strided.scale[2, 1] = torch.nan, torch.nan  # as quant_fp8 leaves them
    got = fp8_gemm(strided, w, backend=backend)
    assert got[2].isnan().all()
    got[2] = clean[2]
    assert torch.equal(got, clean)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend: str) -> None:
    skip_unless_available(backend, FP8)
    _, w = operands("none", 1, 128, 128)
    assert fp8_gemm(empty_fp8(0, 128, device=DEVICE), w, backend=backend).shape == (0, 128)


def test_fused_weights_give_both_products() -> None:
    x, w = operands("fused", 5, 320, 256)
    parts = [Fp8(w.data[:256], w.scale[:2]), Fp8(w.data[256:], w.scale[2:])]
    fused = fp8_gemm(x, concat_blocks(parts), backend="reference")
    assert torch.equal(fused, torch.cat([fp8_gemm(x, part, backend="reference") for part in parts], dim=1))
    with pytest.raises(AssertionError):
        concat_blocks(parts[::-1])


def test_rejects_what_it_does_not_take() -> None:
    x, w = operands("wrong", 5, 128, 256)
    wrong_scale = Fp8(x.data, x.scale.contiguous())
    narrow = Fp8(w.data[:100], w.scale)
    for args in ((wrong_scale, w), (x, narrow), (Fp8(x.data[:, :128], x.scale), w), (Fp8(x.data.float(), x.scale), w)):
        with pytest.raises(AssertionError):
            fp8_gemm(*args)
    with pytest.raises(AssertionError):
        fp8_gemm(x, w, out=poisoned(4, 128))
    with pytest.raises(BackendError, match="not among"):  # for no rows as for some
        fp8_gemm(empty_fp8(0, 256, device=DEVICE), w, backend="flashinfer")


def test_table_is_sound() -> None:
    """Buckets rise, tiles are what the kernel takes, splits are not more than k has blocks; shapes beyond it claim nothing."""
    for (n, k), buckets in MEASURED.items():
        assert list(buckets) == sorted(buckets) and n % 64 == 0 and k % GROUP == 0
        for m, choice in buckets.items():
            assert choose(m, n, k) == choice and GROUP % choice.config.block_n == 0
    for m, n, k in ((1, 64, 128), (300, 2112, 7168), (5000, 7168, 16384), (64, 24576, 1536)):
        config = choose(m, n, k).config
        assert isinstance(config, Streamed) or 1 <= config.splits <= k // GROUP
    assert not choose(64, 64, 128).beats_deep_gemm


@gpu_only
@pytest.mark.skipif(not ON_GPU, reason="looks at launches on a GPU")
@pytest.mark.parametrize("backend", ["triton", "deep_gemm"])
def test_is_one_launch_and_replays(backend: str) -> None:
    """No kernel beside the GEMM transforms scales or clears counters; a graph of it can be replayed."""
    skip_unless_available(backend, FP8)
    x, w = operands("launch", 64, 2112, 7168)
    out = poisoned(64, 2112)
    fp8_gemm(x, w, out=out, backend=backend)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fp8_gemm(x, w, out=out, backend=backend)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, kernels
    kept = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp8_gemm(x, w, out=out, backend=backend)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, kept)


@gpu_only
@pytest.mark.skipif(not ON_GPU, reason="needs 13 GB of GPU memory")
@pytest.mark.parametrize("backend", ["triton", "deep_gemm"])
def test_beyond_2_31_elements(backend: str) -> None:
    """Output and weight of more than 2**31 elements."""
    skip_unless_available(backend, FP8)
    x, w = operands("large", 40, 1024, 256)
    many = 2**31 // 256 + 1024
    large = Fp8(torch.zeros(many, 256, dtype=torch.uint8, device=DEVICE).view(FP8), torch.ones(many // 128, 2, device=DEVICE))
    large.data[-1024:], large.scale[-8:] = w.data, w.scale
    x = Fp8(x.data, x.scale)
    assert relative_error(fp8_gemm(x, large, backend=backend)[:, -1024:], expected(x, w)) < 1e-2
    rows = 2**31 // 1024 + 64
    tall = empty_fp8(rows, 256, device=DEVICE)
    tall.data.copy_(x.data[0].expand(rows, -1)), tall.scale.copy_(x.scale[0].expand(rows, -1))
    got = fp8_gemm(tall, w, backend=backend)
    assert relative_error(got[-1:], expected(x, w)[:1]) < 1e-2 and torch.equal(got[-1], got[0])


SHAPES_V3 = {
    "qkv_a": (2112, 7168),
    "o_proj": (7168, 16384),
    "q_b": (24576, 1536),
    "shared_gate_up": (4096, 7168),
    "shared_down": (7168, 2048),
    "dense_gate_up": (36864, 7168),
    "dense_down": (7168, 18432),
    "kv_b": (32768, 512),
}
GOALS = {
    ("qkv_a", 256): ("K2-M256", 16, 9.3),
    ("qkv_a", 64): ("K2-M64", 10, 6.5),
    ("o_proj", 64): ("K3-M64", 42, 37),
    ("o_proj", 256): ("K3-M256", 58, 46),
}


def bench_fp8_gemm() -> Iterator[Row]:
    """What "auto" takes, against DeepGEMM by name in the same run."""
    from kernels import launch
    from kernels.timing import cold_us, compare_us, num_sets

    library = not why_unavailable("deep_gemm", "cuda", FP8)
    for name, (n, k) in SHAPES_V3.items():
        w = [random_weight(n, k) for _ in range(num_sets(n * k))]
        for m in (64, 256):
            sets = [(quant_fp8(torch.randn(m, k, dtype=torch.bfloat16, device="cuda")), each) for each in w]
            assert relative_error(fp8_gemm(*sets[0]), fp8_gemm(*sets[0], backend="torch")) < 1e-2
            backends = ["auto", "deep_gemm"] if library else ["auto"]
            calls = {backend: [lambda s=s, b=backend: fp8_gemm(*s, backend=b) for s in sets] for backend in backends}
            us = compare_us(calls)
            launch.DEPENDENT = False
            plain = cold_us(calls["auto"])
            launch.DEPENDENT = True
            floor = max((n * k + m * k + 2 * m * n) / 4.3e6, 2 * m * n * k / 1979e6)
            taken = "triton" if choose(m, n, k).beats_deep_gemm else "deep_gemm"
            how = f"{n} x {k}, m {m}, cold L2, {taken}, floor {floor:.1f} us, launched plainly {plain:.1f} us"
            if (name, m) in GOALS:
                row_id, base, aim = GOALS[name, m]
                yield Row(row_id, us["auto"], "us", "lower", base, aim, f"{name} {how}")
            if library:
                how += f", ours {us['auto']:.1f} us, DeepGEMM {us['deep_gemm']:.1f} us"
                yield Row(f"K9-fp8_gemm-{name}-M{m}", us["deep_gemm"] / us["auto"], "x", "higher", 0.9, 1.0, how)


def random_weight(n: int, k: int) -> Fp8:
    """Any bits but NaN, any scales: made on the GPU in no time."""
    data = torch.randint(0, 127, (n, k), dtype=torch.uint8, device="cuda")
    data |= torch.randint(0, 2, (n, k), dtype=torch.uint8, device="cuda") << 7
    return Fp8(data.view(FP8), torch.rand(-(-n // GROUP), k // GROUP, device="cuda") * 1e-4)
