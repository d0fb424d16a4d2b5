"""fp8_bmm against einsum on dequantised weights; its benchmark is K4."""

from collections.abc import Iterator

import pytest
import torch

from kernels.backend import BackendError
from kernels.fp8_bmm import fp8_bmm, fp8_bmm_quant, split_fp8_kv_b
from kernels.numerics import FP8, FP8_MAX, GROUP, Fp8, dequantise_blocks, dequantise_tokens, relative_error
from kernels.quant_fp8 import quant_fp8_block
from tests.bench.report import Row
from tests.kernels.device import DEVICE, FLOAT, ON_GPU, generator, skip_unless_available

BACKENDS = ["reference", "triton"]
QUANT_SHAPES = [(1, 2, 128, 512), (37, 3, 256, 128)]
SHAPES = [(1, 2, 512, 128), (37, 3, 128, 256), (5, 2, 128, 512), (70, 2, 208, 128), (70, 2, 192, 128)]  # m, batch, n, k
GPU_SHAPES = [(m, batch, n, k) for m in (2, 16, 33, 64, 128, 256) for batch, n, k in ((128, 512, 128), (16, 128, 512))]
CONFIGS = [
    {"KIND": "plain", "BLOCK_M": 16, "BLOCK_N": 64, "SWAP": False, "STAGES": 2, "num_warps": 4},
    {"KIND": "plain", "BLOCK_M": 64, "BLOCK_N": 256, "SWAP": True, "STAGES": 1, "num_warps": 8},
    {"KIND": "deep", "BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "SWAP": True, "STAGES": 3, "num_warps": 4},
    {"KIND": "deep", "BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 128, "SWAP": False, "STAGES": 3, "num_warps": 8},
    {"KIND": "wide", "BLOCK_M": 64, "BLOCK_N": 128, "WIDTH": 256, "SWAP": False, "STAGES": 2, "num_warps": 4},
    {"KIND": "wide", "BLOCK_M": 64, "BLOCK_N": 64, "WIDTH": 128, "SWAP": True, "STAGES": 2, "num_warps": 4},
]


def make_inputs(m: int, batch: int, n: int, k: int, *, x_pitch: int = 0) -> tuple[torch.Tensor, Fp8]:
    """x with heads `x_pitch` elements apart (0: k), and weights of different magnitude a block."""
    random = generator(f"bmm{m, batch, n, k}")
    x = torch.randn(m, batch, x_pitch or k, generator=random, device=DEVICE).to(FLOAT)[..., :k]
    w = torch.randn(batch, n, k, generator=random, device=DEVICE)
    spread = torch.rand(batch, -(-n // GROUP), k // GROUP, generator=random, device=DEVICE) + 0.1
    w *= spread.repeat_interleave(GROUP, 1)[:, :n].repeat_interleave(GROUP, 2)
    return x, quant_fp8_block(w, backend="reference")


def expected(x: torch.Tensor, w: Fp8) -> torch.Tensor:
    return torch.einsum("mbk,bnk->mbn", x.double(), dequantise_blocks(w).double())


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=FLOAT, device=DEVICE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [*SHAPES, *(GPU_SHAPES if ON_GPU else [])], ids=str)
def test_equals_einsum_between_strided_views(backend: str, shape: tuple[int, int, int, int]) -> None:
    """x is a slice of q (nope of nope + rope), out one of the query as attention reads it; what lies beside is not written."""
    skip_unless_available(backend, FLOAT)
    m, batch, n, k = shape
    x, w = make_inputs(*shape, x_pitch=k + 64)
    whole = poisoned(m, batch, n + 64)
    fp8_bmm(x, w, out=whole[..., :n], backend=backend)
    assert relative_error(whole[..., :n], expected(x, w)) < (1e-2 if ON_GPU else 1e-5) and whole[..., n:].isnan().all()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_kind_of_tile(config: dict[str, int | bool | str]) -> None:
    skip_unless_available("triton", FLOAT)
    from kernels.fp8_bmm._triton import launch

    x, w = make_inputs(70, 2, 256, 128 if config["KIND"] == "wide" else 256)
    out = poisoned(70, 2, 256)
    launch(x, w, out, None, config)
    assert relative_error(out, expected(x, w)) < (1e-2 if ON_GPU else 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [*QUANT_SHAPES, *(GPU_SHAPES if ON_GPU else [])], ids=str)
def test_quantised_result(backend: str, shape: tuple[int, int, int, int]) -> None:
    skip_unless_available(backend, FLOAT)
    m, batch, n, _ = shape
    x, w = make_inputs(*shape)
    reference = fp8_bmm_quant(x, w, backend="reference")
    got = fp8_bmm_quant(x, w, backend=backend)
    assert got.data.shape == (m, batch * n) and got.scale.stride() == (1, -(-m // 4) * 4)
    whole = expected(x, w).flatten(1)
    scale = whole.unflatten(1, (-1, GROUP)).abs().amax(-1) / FP8_MAX
    assert relative_error(got.scale, scale) < (1e-2 if ON_GPU else 1e-5)
    assert relative_error(dequantise_tokens(got), whole) < 3e-2  # e4m3 has three bits
    assert relative_error(dequantise_tokens(got), dequantise_tokens(reference)) < 1e-2


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_weight_that_fp8_has_is_exact(config: dict[str, int | bool | str]) -> None:
    """x picks one weight a row."""
    skip_unless_available("triton", FLOAT)
    from kernels.fp8_bmm._triton import launch

    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(FP8)
    codes = torch.where(codes.float().isnan(), torch.zeros(256, device=DEVICE), codes.float()).view(2, 128)
    w = Fp8(codes.repeat(1, 128, 1).view(1, 256, 128).to(FP8), torch.ones(1, 2, 1, device=DEVICE))
    x = torch.eye(128, dtype=FLOAT, device=DEVICE).unsqueeze(1)
    out = poisoned(128, 1, 256)
    launch(x, w, out, None, config)
    assert torch.equal(out[:, 0].float(), w.data[0].float().T)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_do_not_touch_each_other(backend: str) -> None:
    skip_unless_available(backend, FLOAT)
    x, w = make_inputs(20, 2, 128, 128)
    clean, clean_quant = fp8_bmm(x, w, backend=backend), fp8_bmm_quant(x, w, backend=backend)
    x[7] = torch.nan
    got, got_quant = fp8_bmm(x, w, backend=backend), fp8_bmm_quant(x, w, backend=backend)
    others = [row for row in range(20) if row != 7]
    assert got[7].isnan().all() and torch.equal(got[others], clean[others])
    assert torch.equal(got_quant.data[others].float(), clean_quant.data[others].float())
    assert torch.equal(got_quant.scale[others], clean_quant.scale[others]) and got_quant.scale[7].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_and_a_row_of_zeros(backend: str) -> None:
    skip_unless_available(backend, FLOAT)
    x, w = make_inputs(1, 2, 128, 128)
    assert fp8_bmm(x[:0], w, backend=backend).shape == (0, 2, 128) and fp8_bmm_quant(x[:0], w, backend=backend).data.shape == (0, 256)
    zero = fp8_bmm_quant(torch.zeros_like(x), w, backend=backend)
    assert not zero.data.float().any() and (zero.scale > 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_beyond_2_31(backend: str) -> None:
    """Rows 2^30 elements apart in x and out: on CPU, where memory is only reserved, halves of one buffer."""
    skip_unless_available(backend, FLOAT)
    half = torch.bfloat16 if ON_GPU else torch.float16
    x, w = make_inputs(3, 2, 128, 128)
    whole = torch.empty((2 << 30) + 512, dtype=half, device=DEVICE)
    far_x, far_out = (whole[start:].as_strided((3, 2, 128), (1 << 30, 128, 1)) for start in (0, 256))
    far_x.copy_(x)
    far_out.fill_(torch.nan)
    fp8_bmm(far_x, w, out=far_out, backend=backend)
    assert relative_error(far_out, expected(far_x, w)) < 1e-2


def test_split_kv_b_is_the_absorbed_form() -> None:
    """(q @ k_b.T) @ latent = q @ (kv_b's key rows @ latent), and likewise for the values, head by head."""
    heads, nope, value, kv_lora = 3, 128, 256, 256
    random = torch.randn(heads * (nope + value), kv_lora, generator=generator("kv_b"), device=DEVICE)
    kv_b = quant_fp8_block(random, backend="reference")
    k_b, v_b = split_fp8_kv_b(kv_b, heads, nope)
    dense = dequantise_blocks(kv_b).unflatten(0, (heads, nope + value))
    assert k_b.data.shape == (heads, kv_lora, nope) and torch.equal(dequantise_blocks(k_b), dense[:, :nope].transpose(1, 2))
    assert v_b.data.shape == (heads, value, kv_lora) and torch.equal(dequantise_blocks(v_b), dense[:, nope:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_of_zeros_may_have_a_scale_of_0_in_a_checkpoint(backend: str) -> None:
    skip_unless_available(backend, FLOAT)
    kv_b = quant_fp8_block(torch.randn(2 * 256, 256, generator=generator("zeros", "cpu")).bfloat16(), backend="reference")
    kv_b.data.view(torch.uint8)[128:256, :128] = 0
    kv_b.scale[1, 0] = 0
    _, v_b = split_fp8_kv_b(kv_b, 2, 128)
    v_b = Fp8(v_b.data.to(DEVICE), v_b.scale.to(DEVICE))
    for m in (5, 130):
        x = torch.randn(m, 2, 256, generator=generator(f"zeros{m}"), device=DEVICE).to(FLOAT)
        assert relative_error(fp8_bmm(x, v_b, backend=backend), expected(x, v_b)) < 1e-2


def test_rejects_what_the_contract_forbids() -> None:
    x, w = make_inputs(2, 2, 128, 128)
    for bad_x, bad_w in ((x[:, :1], w), (x.transpose(1, 2), w), (x, Fp8(w.data.transpose(1, 2), w.scale)), (x, Fp8(w.data, w.scale[:1]))):
        with pytest.raises(AssertionError):
            fp8_bmm(bad_x, bad_w)
    with pytest.raises(AssertionError):
        fp8_bmm(x, w, out=poisoned(2, 2, 64))
    for function in (fp8_bmm, fp8_bmm_quant):  # for no rows as for some
        with pytest.raises(BackendError, match="not among"):
            function(x[:0], w, backend="deep_gemm")
    narrow = make_inputs(2, 2, 64, 128)
    with pytest.raises(AssertionError):
        fp8_bmm_quant(*narrow)


def bench_fp8_bmm() -> Iterator[Row]:
    """K4: both halves at V3's 128 heads, x and out as attention has them; K9 against the faster of cuBLAS and DeepGEMM on bf16 weights."""
    import deep_gemm

    from kernels.timing import compare_us, num_sets

    for half, n, k, x_pitch, out_pitch in (("k_b", 512, 128, 192, 576), ("v_b", 128, 512, 512, 128)):
        for m in (64, 256):
            moved = 128 * (m * (n + k) * 2 + n * k)
            sets = [make_inputs(m, 128, n, k, x_pitch=x_pitch) for _ in range(num_sets(moved))]
            sets = [(x, Fp8(w.data.clone(), w.scale.clone()), poisoned(m, 128, out_pitch)[..., :n]) for x, w in sets]
            dense = [(x.transpose(0, 1), dequantise_blocks(w).to(FLOAT).transpose(1, 2), out.transpose(0, 1)) for x, w, out in sets]
            x, w, out = sets[0]
            assert relative_error(fp8_bmm(x, w, out=out), expected(x, w)) < 1e-2
            variants = {
                "ours": [lambda x=x, w=w, out=out: fp8_bmm(x, w, out=out) for x, w, out in sets],
                "torch.bmm": [lambda x=x, w=w, out=out: torch.bmm(x, w, out=out) for x, w, out in dense],
                "DeepGEMM's einsum": [
                    lambda x=x, w=w, out=out: deep_gemm.einsum("bhr,hdr->bhd", x.transpose(0, 1), w.transpose(1, 2), out.transpose(0, 1))
                    for x, w, out in dense
                ],
            }
            if half == "v_b":
                variants["quant"] = [lambda x=x, w=w: fp8_bmm_quant(x, w) for x, w, _ in sets]
            us = compare_us(variants)
            shape = f"128 heads, {m} rows, {k} -> {n}"
            if m == 256:
                fused = ", quantised for o_proj" if half == "v_b" else ", into [m, heads, 576]"
                floor = (moved - (m * 128 * n if half == "v_b" else 0)) / 4.3e6
                yield Row(f"K4-{half}", us.get("quant", us["ours"]), "us", "lower", 25.0, 17.0, f"{shape}{fused}; floor {floor:.1f} us")
            best = min(("torch.bmm", "DeepGEMM's einsum"), key=us.__getitem__)
            times = f"{best} {us[best]:.1f} us on bf16 weights, ours {us['ours']:.1f}, floor {moved / 4.3e6:.1f}"
            yield Row(f"K9-fp8_bmm-{half}-M{m}", us[best] / us["ours"], "x", "higher", 0.9, 1.0, f"{shape}; {times}")
