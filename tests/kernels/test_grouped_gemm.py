"""Both layouts against a loop over groups; their benchmark, alone and in the chain of an expert's MLP, is K5 and K6."""

from collections.abc import Iterator

import pytest
import torch

from kernels.backend import BackendError
from kernels.grouped_gemm import grouped_gemm_contiguous, grouped_gemm_masked
from kernels.numerics import FP8, GROUP, Fp8, dequantise_blocks, dequantise_tokens, empty_token_scales, relative_error
from kernels.quant_fp8 import quant_fp8
from tests.bench.report import Row
from tests.kernels.device import DEVICE, ON_GPU, generator, gpu_only, skip_unless_available

BACKENDS = ["reference", "triton", "deep_gemm"]
MASKED = [  # rows of each group, max_m, n, k
    ([3, 0, 128, 17], 128, 128, 256),
    ([0, 0], 128, 64, 128),
    ([130, 1], 256, 192, 128),
]
GPU_MASKED = [  # V2-Lite's experts, V3's, one group alone, V3's at EP8
    ([5, 64, 0, 33], 4096, 2816, 2048),
    ([300, 1024], 2048, 2048, 1408),
    ([700], 1024, 7168, 2048),
    ([8, 3, 0, 40] * 8, 128, 4096, 7168),
]


def random_weights(groups: int, n: int, k: int, random: torch.Generator) -> Fp8:
    """Random bytes without NaN, and scales that differ by block."""
    data = torch.randn(groups, n, k, generator=random, device=random.device, dtype=torch.bfloat16).mul_(64).to(FP8)
    return Fp8(data, torch.rand(groups, -(-n // GROUP), k // GROUP, generator=random, device=random.device) / 64 + 1e-3)


def make_masked(rows: list[int], max_m: int, n: int, k: int) -> tuple[Fp8, Fp8, torch.Tensor]:
    """Rows that do not count hold NaN, scales too."""
    random = generator(f"masked{rows, n, k}")
    x = Fp8(
        torch.full((len(rows), max_m, k), 0x7F, dtype=torch.uint8, device=DEVICE).view(FP8),
        empty_token_scales(len(rows), max_m, k, device=DEVICE),
    )
    x.scale.fill_(torch.nan)
    for group, count in enumerate(rows):
        filled = quant_fp8(torch.randn(count, k, generator=random, device=DEVICE))
        x.data[group, :count] = filled.data
        x.scale[group, :count] = filled.scale
    return x, random_weights(len(rows), n, k, random), torch.tensor(rows, dtype=torch.int32, device=DEVICE)


def make_contiguous(rows: list[int], n: int, k: int, *, spare: int = 0) -> tuple[Fp8, Fp8, torch.Tensor]:
    """Groups padded to 128 rows and `spare` rows of padding behind them, all of it NaN."""
    random = generator(f"contiguous{rows, n, k}")
    group_of_row = [group if row < count else -1 for group, count in enumerate(rows) for row in range(-(-count // GROUP) * GROUP)]
    group_of_row += [-1] * spare
    x = quant_fp8(torch.randn(len(group_of_row), k, generator=random, device=DEVICE))
    padding = torch.tensor(group_of_row, device=DEVICE) < 0
    x.data.view(torch.uint8)[padding] = 0x7F
    x.scale[padding] = torch.nan
    return x, random_weights(len(rows), n, k, random), torch.tensor(group_of_row, dtype=torch.int32, device=DEVICE)


def product(x: Fp8, w: Fp8, group: int) -> torch.Tensor:
    return dequantise_tokens(x).double() @ dequantise_blocks(Fp8(w.data[group], w.scale[group])).double().T


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [*MASKED, *(GPU_MASKED if ON_GPU else [])], ids=lambda case: f"{case[1:]}")
def test_masked(backend: str, case: tuple[list[int], int, int, int]) -> None:
    skip_unless_available(backend, torch.bfloat16)
    x, w, num_rows = make_masked(*case)
    out = grouped_gemm_masked(x, w, num_rows, expected_m=max(1, sum(case[0]) // len(case[0])), backend=backend)
    assert out.shape == (*x.data.shape[:2], w.data.shape[1]) and out.dtype == torch.bfloat16
    for group, rows in enumerate(case[0]):
        if rows:
            assert relative_error(out[group, :rows], product(Fp8(x.data[group, :rows], x.scale[group, :rows]), w, group)) < 1e-2


@pytest.mark.parametrize("expected_m", [1, 20, 64, 128])
def test_tiles_of_any_size_change_nothing(expected_m: int) -> None:
    """expected_m may be wrong either way."""
    skip_unless_available("triton", torch.bfloat16)
    rows = [70, 0, 129]
    x, w, num_rows = make_masked(rows, 256, 192, 256)
    out = grouped_gemm_masked(x, w, num_rows, expected_m=expected_m, backend="triton")
    for group in (0, 2):
        count = rows[group]
        assert relative_error(out[group, :count], product(Fp8(x.data[group, :count], x.scale[group, :count]), w, group)) < 1e-2


@pytest.mark.parametrize("config", [(64, 256, False), (16, 256, True)], ids=str)
def test_tiles_wider_than_a_block_of_scales(config: tuple[int, int, bool]) -> None:
    skip_unless_available("triton", torch.bfloat16)
    from kernels.grouped_gemm._triton import launch_masked

    x, w, num_rows = make_masked([20, 90], 128, 448, 256)  # the last tile's second half lies beyond n
    out = torch.full((2, 128, 448), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    block_m, block_n, swap = config
    launch_masked(
        x,
        w,
        num_rows,
        1,
        out,
        {"BLOCK_M": block_m, "BLOCK_N": block_n, "SWAP": swap, "STAGES": 3, "FLATTEN": True, "num_warps": 8, "PER_SM": 1},
    )
    for group, count in enumerate((20, 90)):
        assert relative_error(out[group, :count], product(Fp8(x.data[group, :count], x.scale[group, :count]), w, group)) < 1e-2


def test_masked_writes_no_further_than_the_last_block() -> None:
    skip_unless_available("triton", torch.bfloat16)
    from kernels.grouped_gemm._triton import launch_masked

    x, w, num_rows = make_masked([5, 0, 129], 384, 64, 128)
    out = torch.full((3, 384, 64), 7.0, dtype=torch.bfloat16, device=DEVICE)
    launch_masked(x, w, num_rows, 128, out)
    assert (out[0, 128:] == 7).all() and (out[1] == 7).all() and (out[2, 256:] == 7).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case",
    [([3, 0, 130], 192, 256), ([128], 64, 128), *([([700, 1024, 0, 5], 4096, 7168), ([300, 200], 2816, 1408)] if ON_GPU else [])],
    ids=str,
)
def test_contiguous(backend: str, case: tuple[list[int], int, int]) -> None:
    skip_unless_available(backend, torch.bfloat16)
    rows, n, k = case
    x, w, group_of_row = make_contiguous(rows, n, k, spare=128)
    out = grouped_gemm_contiguous(x, w, group_of_row, backend=backend)
    start = 0
    for group, count in enumerate(rows):
        if count:
            part = Fp8(x.data[start : start + count], x.scale[start : start + count])
            assert relative_error(out[start : start + count], product(part, w, group)) < 1e-2
        start += -(-count // GROUP) * GROUP


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_no_groups(backend: str) -> None:
    skip_unless_available(backend, torch.bfloat16)
    x, w, num_rows = make_masked([0, 0], 128, 64, 128)
    empty = Fp8(x.data[:, :0].contiguous(), empty_token_scales(2, 0, 128, device=DEVICE))
    assert grouped_gemm_masked(empty, w, num_rows, expected_m=1, backend=backend).shape == (2, 0, 64)
    none = Fp8(x.data[0, :0], empty_token_scales(0, 128, device=DEVICE))
    rows = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert grouped_gemm_contiguous(none, w, rows, backend=backend).shape == (0, 64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_beyond_2_31(backend: str) -> None:
    """The last group begins beyond 2^31 elements of x; on CPU such memory is only reserved."""
    skip_unless_available(backend, torch.bfloat16)
    if backend == "reference" and not ON_GPU:
        pytest.skip("the reference indexes by torch, which is tested elsewhere")
    groups, max_m, k, n = (33, 32768, 2048, 128) if ON_GPU else (3, 1 << 23, 128, 64)
    data = torch.empty(groups, max_m, k, dtype=FP8, device=DEVICE)
    x = Fp8(data, empty_token_scales(groups, max_m, k, device=DEVICE))
    small = quant_fp8(torch.randn(9, k, generator=generator("far"), device=DEVICE))
    x.data[-1, :9], x.scale[-1, :9] = small
    w = random_weights(groups, n, k, generator("far weights"))
    num_rows = torch.zeros(groups, dtype=torch.int32, device=DEVICE)
    num_rows[-1] = 9
    out = grouped_gemm_masked(x, w, num_rows, expected_m=9, backend=backend)
    assert relative_error(out[-1, :9], product(small, w, groups - 1)) < 1e-2


@gpu_only
def test_counts_are_read_when_a_graph_is_replayed() -> None:
    if not ON_GPU:
        pytest.skip("CUDA graphs need a GPU")
    x, w, num_rows = make_masked([64, 64], 128, 256, 256)
    counts = num_rows.zero_().clone()
    for backend in ("triton", "deep_gemm"):
        grouped_gemm_masked(x, w, counts, expected_m=64, backend=backend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = grouped_gemm_masked(x, w, counts, expected_m=64, backend=backend)
        counts.fill_(64)
        graph.replay()
        for group in range(2):
            assert relative_error(out[group, :64], product(Fp8(x.data[group, :64], x.scale[group, :64]), w, group)) < 1e-2
        counts.zero_()


def test_rejects_what_the_contract_forbids() -> None:
    x, w, num_rows = make_masked([1, 2], 128, 64, 256)
    for bad_x, bad_w, counts in (
        (x, w, num_rows.long()),
        (x, w, num_rows.repeat_interleave(2)[::2]),
        (x, Fp8(w.data[:, :60].contiguous(), w.scale), num_rows),
        (x, Fp8(w.data[:1], w.scale[:1]), num_rows),
        (Fp8(x.data[:, :100].contiguous(), x.scale[:, :100]), w, num_rows),
        (Fp8(x.data, x.scale.contiguous()), w, num_rows),
    ):
        with pytest.raises(AssertionError):
            grouped_gemm_masked(bad_x, bad_w, counts, expected_m=1)
    with pytest.raises(AssertionError):
        row = quant_fp8(torch.zeros(128, 256, dtype=torch.bfloat16, device=DEVICE))
        grouped_gemm_contiguous(row, w, torch.zeros(256, dtype=torch.int32, device=DEVICE)[::2])


def test_no_rows_are_refused_by_a_backend_that_is_not_here() -> None:
    x, w, num_rows = make_masked([0, 0], 128, 64, 128)
    none = Fp8(x.data[:, :0].contiguous().cpu(), empty_token_scales(2, 0, 128, device="cpu"))
    w = Fp8(w.data.cpu(), w.scale.cpu())
    with pytest.raises(BackendError, match="deep_gemm"):
        grouped_gemm_masked(none, w, num_rows.cpu(), expected_m=1, backend="deep_gemm")
    with pytest.raises(BackendError, match="deep_gemm"):
        grouped_gemm_contiguous(Fp8(none.data[0], empty_token_scales(0, 128, device="cpu")), w, num_rows[:0].cpu(), backend="deep_gemm")


GATE_UP, DOWN = (4096, 7168), (7168, 2048)  # n, k of V3's experts


def bench_masked(groups: int, rows: int, n: int, k: int) -> tuple[list[tuple[Fp8, Fp8, torch.Tensor]], float]:
    """Input sets with every group `rows` rows full, and the floor in us."""
    from kernels.timing import num_sets

    moved, max_m = groups * (n * k + rows * (k + 2 * n)), max(rows, 1024)
    counts = torch.full((groups,), rows, dtype=torch.int32, device=DEVICE)
    random = generator(f"bench{groups, rows, n, k}")
    sets = []
    for _ in range(num_sets(moved)):
        x = quant_fp8(torch.randn(groups, max_m, k, generator=random, device=DEVICE))
        sets.append((x, random_weights(groups, n, k, random), counts))
    return sets, max(moved / 4.3e6, 2 * groups * rows * n * k / 1979e6)


def bench_grouped_gemm() -> Iterator[Row]:
    """K5 and K6: an expert's MLP as one chain. K9: what runs by "auto" against DeepGEMM."""
    from kernels.silu_mul_quant import silu_mul_quant_masked
    from kernels.timing import compare_us

    for row, groups, rows, base, aim in (("K5", 2, 1024, 175.0, 155.0), ("K6", 32, 64, 400.0, 385.0), ("", 2, 64, 0, 0), ("", 32, 8, 0, 0)):
        first, first_floor = bench_masked(groups, rows, *GATE_UP)
        second, second_floor = bench_masked(groups, rows, *DOWN)

        def gemm(inputs: tuple[Fp8, Fp8, torch.Tensor], backend: str, rows: int = rows) -> torch.Tensor:
            return grouped_gemm_masked(*inputs, expected_m=rows, backend=backend)

        def mlp(one: tuple[Fp8, Fp8, torch.Tensor], two: tuple[Fp8, Fp8, torch.Tensor], backend: str, rows: int = rows) -> torch.Tensor:
            x = silu_mul_quant_masked(gemm(one, backend, rows), one[2])
            return gemm((x, two[1], two[2]), backend, rows)

        for shape, sets, floor in ((GATE_UP, first, first_floor), (DOWN, second, second_floor)):
            x, w, _ = sets[0]
            assert relative_error(gemm(sets[0], "auto")[1, :rows], product(Fp8(x.data[1, :rows], x.scale[1, :rows]), w, 1)) < 1e-2
            us = compare_us(
                {name: [lambda one=one, name=name: gemm(one, name) for one in sets] for name in ("auto", "deep_gemm")}, replays=20
            )
            conditions = f"n {shape[0]}, k {shape[1]}; DeepGEMM {us['deep_gemm']:.1f} us, ours {us['auto']:.1f}, floor {floor:.1f}"
            yield Row(f"K9-grouped-{groups}x{rows}-n{shape[0]}", us["deep_gemm"] / us["auto"], "x", "higher", 0.9, 1.0, conditions)
        if row:
            pairs = list(zip(first * 3, second * 3, strict=False))[: max(len(first), len(second))]
            us = compare_us(
                {name: [lambda a=a, b=b, name=name: mlp(a, b, name) for a, b in pairs] for name in ("auto", "deep_gemm")}, replays=20
            )
            library = f"by DeepGEMM alone {us['deep_gemm']:.1f} us"
            conditions = f"{groups} x {rows} rows, max_m 1024; GEMMs {library}; floor {first_floor + second_floor:.1f}"
            yield Row(row, us["auto"], "us", "lower", base, aim, conditions)
    yield from bench_contiguous()


def bench_contiguous() -> Iterator[Row]:
    """8 groups of 1024 rows, as prefill has them."""
    from kernels.timing import compare_us

    for n, k in (GATE_UP, DOWN):
        sets = [make_contiguous([1024] * 8, n, k) for _ in range(3)]
        x, w, group_of_row = sets[0]
        out = grouped_gemm_contiguous(x, w, group_of_row)
        assert relative_error(out[1024:2048], product(Fp8(x.data[1024:2048], x.scale[1024:2048]), w, 1)) < 1e-2
        us = compare_us(
            {
                name: [lambda one=one, name=name: grouped_gemm_contiguous(*one, backend=name) for one in sets]
                for name in ("auto", "deep_gemm", "triton")
            },
            replays=20,
        )
        times = f"DeepGEMM {us['deep_gemm']:.1f} us, ours {us['auto']:.1f}, our Triton {us['triton']:.1f}"
        conditions = f"n {n}, k {k}; {times}, floor {2 * 8192 * n * k / 1979e6:.1f}"
        yield Row(f"K9-grouped-contiguous-8x1024-n{n}", us["deep_gemm"] / us["auto"], "x", "higher", 0.9, 1.0, conditions)
