import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch

import kernels.mla_prefill
from kernels.backend import BackendError
from kernels.mla_prefill import MlaPrefillShape, create_mla_prefill, merge_states, why_not_flashinfer
from kernels.numerics import relative_error
from kernels.timing import compare_us, num_sets
from tests.bench.report import Row
from tests.kernels.device import DEVICE, FLOAT, ON_GPU, generator, gpu_only, skip_unless_available

SCALE = 0.4
SHAPE = MlaPrefillShape(num_heads=3, qk_dim=6, v_dim=5, softmax_scale=SCALE)
V3 = MlaPrefillShape(num_heads=128, qk_dim=192, v_dim=128, softmax_scale=0.1352)
CPU = ["torch", "reference"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_inputs(
    num_queries: int, num_keys: int, shape: MlaPrefillShape = SHAPE, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> Tensors:
    rng = generator(f"{num_queries} {num_keys} {shape}", device)
    sizes = ((num_queries, shape.qk_dim), (num_keys, shape.qk_dim), (num_keys, shape.v_dim))
    q, k, v = (torch.randn(rows, shape.num_heads, dim, generator=rng, dtype=torch.float32, device=device).to(dtype) for rows, dim in sizes)
    return q, k, v


def attend(shape: MlaPrefillShape, tensors: Tensors, psum_q: Sequence[int], psum_k: Sequence[int], causal: bool, backend: str):
    skip_unless_available(backend, tensors[0].dtype)
    mla = create_mla_prefill(shape, backend=backend, device_type=tensors[0].device.type, dtype=tensors[0].dtype)
    mla.plan(psum_q, psum_k, causal=causal)
    return mla.run(*tensors)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float = SCALE) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = q.double(), k.double(), v.double()
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return torch.einsum("hqk,khv->qhv", scores.softmax(-1), v), scores.logsumexp(-1).t()


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("lens", [[1], [5], [3, 1, 7], [0, 4]], ids=str)
def test_causal_equals_dense_a_sequence_each(backend: str, lens: list[int]) -> None:
    psum = [0, *accumulate(lens)]
    q, k, v = make_inputs(psum[-1], psum[-1])
    out, lse = attend(SHAPE, (q, k, v), psum, psum, True, backend)
    for begin, end in pairwise(psum):
        rows = slice(begin, end)
        expected_out, expected_lse = dense(q[rows], k[rows], v[rows], causal=True)
        assert torch.allclose(out[rows], expected_out, atol=1e-12) and torch.allclose(lse[rows], expected_lse, atol=1e-12)


@pytest.mark.parametrize("backend", CPU)
def test_without_mask_and_without_keys(backend: str) -> None:
    q, k, v = make_inputs(7, 9)
    out, lse = attend(SHAPE, (q, k, v), [0, 2, 4, 7], [0, 6, 6, 9], False, backend)
    for rows, keys in ((slice(0, 2), slice(0, 6)), (slice(4, 7), slice(6, 9))):
        expected_out, expected_lse = dense(q[rows], k[keys], v[keys], causal=False)
        assert torch.allclose(out[rows], expected_out, atol=1e-12) and torch.allclose(lse[rows], expected_lse, atol=1e-12)
    assert torch.equal(out[2:4], torch.zeros_like(out[2:4])) and bool((lse[2:4] == -torch.inf).all())


@gpu_only
@pytest.mark.parametrize("backend", ["flashinfer", "torch"])
@pytest.mark.parametrize("heads", [128, 3])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_kernels_equal_dense(backend: str, heads: int, causal: bool) -> None:
    """Ragged lengths around the tile of 128, strided views of larger buffers, a sequence without keys, a NaN in a neighbour."""
    if not ON_GPU:
        pytest.skip("the published head dims, bf16")
    shape = MlaPrefillShape(heads, 192, 128, 0.1)
    lens_q = [1, 127, 128, 129, 300, 5]
    lens_k = lens_q if causal else [700, 0, 1, 129, 64, 8]
    psum_q, psum_k = [0, *accumulate(lens_q)], [0, *accumulate(lens_k)]
    q, k, v = make_inputs(psum_q[-1], psum_k[-1], shape, torch.bfloat16, DEVICE)
    v = torch.cat([torch.full_like(v, torch.nan), v], dim=2)[..., 128:]
    k = torch.cat([k, torch.full_like(k[:, :, :64], torch.nan)], dim=2)[..., :192]
    q = torch.cat([torch.full_like(q[:, :1], torch.nan), q], dim=1)[:, 1:]
    k[psum_k[-2] :], q[psum_q[-2] :] = torch.nan, torch.nan
    out, lse = attend(shape, (q, k, v), psum_q, psum_k, causal, backend)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32 and out[psum_q[-2] :].isnan().all()
    for i in range(len(lens_q) - 1):
        rows, keys = slice(*psum_q[i : i + 2]), slice(*psum_k[i : i + 2])
        if lens_k[i]:
            expected_out, expected_lse = dense(q[rows], k[keys], v[keys], causal, shape.softmax_scale)
            assert relative_error(out[rows], expected_out) < 1e-2 and relative_error(lse[rows], expected_lse) < 1e-3
        else:
            assert not out[rows].count_nonzero() and bool((lse[rows] == -torch.inf).all())


@gpu_only
def test_offsets_beyond_32_bits() -> None:
    """90,000 tokens of 128 heads: q and k hold 2.2e9 elements each."""
    if not ON_GPU:
        pytest.skip("the tensors need a GPU's memory")
    psum = [0, 45_000, 89_000, 90_000]
    q, k = (torch.empty(90_000, 128, 192, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    v = torch.empty(90_000, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    last = slice(89_000, 90_000)
    for whole, tail in zip((q, k, v), make_inputs(1000, 1000, V3, torch.bfloat16, DEVICE), strict=True):
        whole.zero_()
        whole[last] = tail
    out, lse = attend(V3, (q, k, v), psum, psum, True, "flashinfer")
    expected_out, expected_lse = dense(q[last], k[last], v[last], True, V3.softmax_scale)
    assert relative_error(out[last], expected_out) < 1e-2 and relative_error(lse[last], expected_lse) < 1e-3
    assert not out[:89_000].count_nonzero() and math.isclose(float(lse[88_999, 127]), math.log(44_000), rel_tol=1e-5)


@pytest.mark.parametrize("backend", ["flashinfer", *CPU])
def test_plans_follow_each_other(backend: str) -> None:
    """Also without queries and without keys."""
    shape, dtype = (V3, torch.bfloat16) if backend == "flashinfer" else (SHAPE, torch.float64)
    skip_unless_available(backend, dtype)
    device = DEVICE if backend == "flashinfer" else "cpu"
    mla = create_mla_prefill(shape, backend=backend, device_type=device, dtype=dtype)
    for num_queries, num_keys, causal in ((9, 9, True), (3, 8, False), (0, 0, True), (2, 0, False), (5, 5, True)):
        psum_q, psum_k = [0, num_queries], [0, num_keys]
        q, k, v = make_inputs(psum_q[-1], psum_k[-1], shape, dtype, device)
        mla.plan(psum_q, psum_k, causal=causal)
        out, lse = mla.run(q, k, v)
        assert out.shape == (psum_q[-1], shape.num_heads, shape.v_dim) and lse.shape == out.shape[:2]
        if psum_k[-1]:
            assert relative_error(out, dense(q, k, v, causal, shape.softmax_scale)[0]) < TOLERANCE[dtype]
        else:
            assert not out.count_nonzero() and bool((lse == -torch.inf).all())


@pytest.mark.parametrize("num_queries", [15, 16, 17, 100])
def test_blocks_of_queries_change_nothing(num_queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long chunks are cut into blocks: here of the smallest size."""
    monkeypatch.setattr(kernels.mla_prefill, "_MAX_SCORES", 1)
    q, k, v = make_inputs(num_queries, num_queries)
    out, lse = attend(SHAPE, (q, k, v), [0, num_queries], [0, num_queries], True, "torch")
    expected_out, expected_lse = dense(q, k, v, causal=True)
    assert torch.allclose(out, expected_out, atol=1e-12) and torch.allclose(lse, expected_lse, atol=1e-12)


@pytest.mark.parametrize("backend", ["triton", *CPU])
def test_merge_uses_natural_logarithms(backend: str) -> None:
    """B14, part A: base 2 taken for e would give 0.8299."""
    skip_unless_available(backend)
    zero = torch.zeros(1, 1, dtype=torch.float32, device=DEVICE)
    out, lse = merge_states(torch.ones_like(zero)[..., None], zero + math.log(3), zero[..., None], zero, backend=backend)
    assert math.isclose(float(out), 0.75, abs_tol=1e-6) and math.isclose(float(lse), 1.3862943611, abs_tol=1e-6)


@pytest.mark.parametrize("cuts", [[4], [1, 5], [2, 4, 6]], ids=str)
def test_merged_parts_equal_the_whole(cuts: list[int]) -> None:
    """More than two parts, and keys that are strided views."""
    q, k, v = make_inputs(3, 8)
    parts = [attend(SHAPE, (q, k[a:b], v[a:b]), [0, 3], [0, b - a], False, "torch") for a, b in pairwise([0, *cuts, 8])]
    out, lse = parts[0]
    for part in parts[1:]:
        out, lse = merge_states(out, lse, *part)
    expected_out, expected_lse = dense(q, k, v, causal=False)
    assert torch.allclose(out, expected_out, atol=1e-12) and torch.allclose(lse, expected_lse, atol=1e-12)


@gpu_only
def test_a_long_prefix_in_pieces_equals_the_whole() -> None:
    """New tokens' causal part merged with three pieces of a cached prefix, as prefill does it; base 2 somewhere would show."""
    if not ON_GPU:
        pytest.skip("FlashInfer's parts, Triton's merge")
    q, k, v = make_inputs(300, 2000, V3, torch.bfloat16, DEVICE)
    out, lse = attend(V3, (q, k[1700:], v[1700:]), [0, 300], [0, 300], True, "flashinfer")
    for begin, end in pairwise([0, 512, 1024, 1700]):
        part = attend(V3, (q, k[begin:end], v[begin:end]), [0, 300], [0, end - begin], False, "flashinfer")
        out, lse = merge_states(out, lse, *part, backend="triton")
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * V3.softmax_scale
    hidden = torch.ones(300, 2000, dtype=torch.bool, device=DEVICE).triu(1701)
    scores.masked_fill_(hidden, -torch.inf)
    assert relative_error(out, torch.einsum("hqk,khv->qhv", scores.softmax(-1), v.double())) < 1e-2
    assert relative_error(lse, scores.logsumexp(-1).t()) < 1e-3


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("rows,heads,dim", [(0, 3, 8), (1, 1, 1), (37, 3, 20), (5, 128, 128)], ids=str)
def test_merge_equals_the_definition(backend: str, rows: int, heads: int, dim: int) -> None:
    """Sides of different strides, huge and -inf log-sum-exps, poisoned memory around."""
    skip_unless_available(backend, FLOAT)
    rng = generator(f"{rows} {heads} {dim}")
    wide = torch.full((rows, heads + 1, dim + 3), torch.nan, dtype=FLOAT, device=DEVICE)
    a, b = wide[:, 1:, 3:], torch.empty(heads, rows, dim, dtype=FLOAT, device=DEVICE).transpose(0, 1)
    a.copy_(torch.randn(rows, heads, dim, generator=rng, device=DEVICE))
    b.copy_(torch.randn(rows, heads, dim, generator=rng, device=DEVICE))
    lse_a = torch.randn(heads, rows, generator=rng, device=DEVICE).t() * 20
    lse_b = torch.randn(rows, 2 * heads, generator=rng, device=DEVICE)[:, ::2] * 20
    empty = torch.randint(0, 4, (rows, heads), generator=rng, device=DEVICE)
    for bit, side, lse in ((1, a, lse_a), (2, b, lse_b)):
        lse.masked_fill_((empty & bit) > 0, -torch.inf)
        side.masked_fill_(((empty & bit) > 0)[..., None], 0)
    out, lse = merge_states(a, lse_a, b, lse_b, backend=backend)
    expected_out, expected_lse = merge_states(a.double(), lse_a.double(), b.double(), lse_b.double(), backend="reference")
    assert out.shape == a.shape and out.dtype == FLOAT and lse.dtype == torch.float32
    if rows:
        assert relative_error(out, expected_out) < TOLERANCE[FLOAT]
        assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
        assert relative_error(lse.nan_to_num(neginf=0), expected_lse.nan_to_num(neginf=0)) < 1e-5
    shifted = merge_states(a, lse_a + 1e4, b, lse_b + 1e4, backend=backend)
    assert not shifted[0].isnan().any()


@pytest.mark.parametrize("backend", ["triton"])
def test_merge_beyond_32_bits(backend: str) -> None:
    """Row offsets beyond 2^31 elements: sides are the last tokens of virtual (CPU) or real (GPU) tensors."""
    skip_unless_available(backend, FLOAT)
    stride = 1 << 30
    base = torch.empty(2 * stride + 64, dtype=FLOAT, device=DEVICE)
    a = base.as_strided((3, 2, 16), (stride, 16, 1))
    values = torch.randn(2, 3, 2, 16, generator=generator("far"), device=DEVICE).to(FLOAT)
    a.copy_(values[0])
    lse = torch.randn(2, 3, 2, generator=generator("lse"), device=DEVICE)
    out, _ = merge_states(a, lse[0], values[1], lse[1], backend=backend)
    expected, _ = merge_states(values[0].double(), lse[0].double(), values[1].double(), lse[1].double(), backend="reference")
    assert relative_error(out, expected) < TOLERANCE[FLOAT]


def test_rejects_what_the_contract_excludes() -> None:
    q, k, v = make_inputs(2, 3)
    with pytest.raises(AssertionError):
        attend(SHAPE, (q, k, v), [0, 2], [0, 3], True, "torch")
    with pytest.raises(AssertionError):
        attend(SHAPE, (q, k, v), [0, 3], [0, 3], False, "torch")
    with pytest.raises(AssertionError):
        merge_states(q, q[..., 0], k, k[..., 0])
    with pytest.raises(BackendError, match="qk_dim 192"):
        create_mla_prefill(SHAPE, backend="flashinfer", device_type="cuda", dtype=torch.bfloat16)
    assert "bfloat16" in why_not_flashinfer(V3, torch.float32) and not why_not_flashinfer(V3, torch.bfloat16)


def bench_mla_prefill() -> Iterator[Row]:
    rng = generator("bench")

    def inputs(num_tokens: int) -> Tensors:
        sizes = ((num_tokens, 128, 192), (num_tokens, 128, 192), (num_tokens, 128, 128))
        q, k, v = (torch.randn(size, generator=rng, device="cuda", dtype=torch.bfloat16) for size in sizes)
        return q, k, v

    mla = create_mla_prefill(V3, device_type="cuda", dtype=torch.bfloat16)
    sets = [inputs(16384) for _ in range(3)]
    cases = (("K8", [4096] * 4, 570, 620), ("K8-16x1024", [1024] * 16, None, None), ("K8-1x16384", [16384], None, None))
    for name, lens, base, aim in cases:
        psum = [0, *accumulate(lens)]
        mla.plan(psum, psum, causal=True)
        rows = slice(psum[1] - 256, psum[1])
        out, _ = mla.run(*sets[0])
        q, k, v = sets[0]
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k[: psum[1]].float()) * V3.softmax_scale
        scores.masked_fill_(torch.ones(256, psum[1], dtype=torch.bool, device="cuda").triu(psum[1] - 255), -torch.inf)
        assert relative_error(out[rows], torch.einsum("hqk,khv->qhv", scores.softmax(-1), v[: psum[1]].float())) < 1e-2
        del scores
        us = compare_us({"": [partial(mla.run, *tensors) for tensors in sets]}, replays=8)[""]
        rate = sum(length * length for length in lens) * 128 * 320 / us / 1e6
        yield Row(name, rate, "TFLOP/s", "higher", base, aim, f"flashinfer fa3, {len(lens)} x {lens[0]} causal, 128 heads, {us:.0f} us")
    del sets
    yield from _bench_merge(rng)


def _bench_merge(rng: torch.Generator) -> Iterator[Row]:
    """FlashInfer launches heads * dim / 8 threads a block: 64 heads of 128 are its most."""
    from flashinfer.cascade import merge_state

    def side(num_tokens: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.randn(num_tokens, heads, 128, generator=rng, device="cuda", dtype=torch.bfloat16)
        return out, torch.randn(num_tokens, heads, generator=rng, device="cuda")

    for num_tokens, heads in ((256, 64), (4096, 64), (4096, 128)):
        size = num_tokens * heads * (3 * 128 * 2 + 3 * 4)
        sides = [(*side(num_tokens, heads), *side(num_tokens, heads)) for _ in range(min(24, num_sets(size)))]
        variants = {"triton": [partial(merge_states, *both, backend="triton") for both in sides]}
        if heads == 64:
            out_a, lse_a, out_b, lse_b = sides[0]
            base2 = merge_state(out_a, lse_a / math.log(2), out_b, lse_b / math.log(2))[0]
            assert relative_error(base2, merge_states(*sides[0])[0]) < 1e-2
            variants["flashinfer"] = [partial(merge_state, *both) for both in sides]
        times = compare_us(variants)
        told = f"{heads} heads, dim 128, triton {times['triton']:.1f} us, floor {size / 4.3e6:.1f} us"
        if heads == 64:
            value, told = times["flashinfer"] / times["triton"], f"{told}, flashinfer.merge_state {times['flashinfer']:.1f} us"
            yield Row(f"K9-merge-{num_tokens}", value, "x", "higher", 0.9, 1.0, told)
        else:
            yield Row(f"merge-{num_tokens}", times["triton"], "us", "lower", None, None, told)
