from collections.abc import Iterator

import pytest
import torch

from kernels.latent_store import kv_norm_rope_store, latent_store, pool_rows, qkv_norm_rope_store
from kernels.numerics import dequantise_tokens, relative_error
from kernels.rms_norm import rms_norm, rms_norm_quant
from kernels.rope import rope_, rotations
from tests.bench.report import Row
from tests.kernels.device import DEVICE, FLOAT, ON_GPU, generator, gpu_only, skip_unless_available
from tests.kernels.poison import poison_empty

FUSED = ["reference", "triton"]
BOUND = 1e-2 if ON_GPU else 1e-5
SHAPES = {"v3": (1536, 512, 64), "small": (128, 48, 8), "odd": (384, 512, 12), "v2_lite": (0, 512, 64), "tiny": (0, 16, 2)}


@pytest.mark.parametrize("backend", ["torch", "reference", "triton"])
def test_entries_land_in_their_slots_and_nowhere_else(backend: str) -> None:
    skip_unless_available(backend)
    pages = torch.full((5, 3, 4, 6), torch.nan, device=DEVICE)
    rows = pool_rows([[4, 1], [2]], [range(3, 6), range(0, 1)], num_layers=3, page_size=4).to(DEVICE)
    latent = torch.arange(16, dtype=torch.float32, device=DEVICE).view(4, 4)
    key_rope = -torch.arange(8, dtype=torch.float32, device=DEVICE).view(4, 2)
    latent_store(latent, key_rope, pages, rows[1], backend=backend)
    expected = torch.full_like(pages, torch.nan)
    for token, (page, slot) in enumerate([(4, 3), (1, 0), (1, 1), (2, 0)]):
        expected[page, 1, slot] = torch.cat((latent[token], key_rope[token]))
    assert torch.equal(pages.nan_to_num(99), expected.nan_to_num(99))


def test_rows_of_layers_follow_each_other_in_a_page() -> None:
    rows = pool_rows([[7]], [range(63, 64)], num_layers=2, page_size=64)
    assert rows.tolist() == [[7 * 2 * 64 + 63], [7 * 2 * 64 + 64 + 63]]


def test_rejects_strided_pages_and_rows() -> None:
    wide, pages, rows = torch.zeros(2, 3, 4, 12), torch.zeros(2, 3, 4, 6), torch.arange(4)
    for bad_pages, bad_rows in ((wide[..., :6], rows[:2]), (pages, rows[::2]), (pages, rows[:1])):
        with pytest.raises(AssertionError):
            latent_store(torch.zeros(2, 4), torch.zeros(2, 2), bad_pages, bad_rows)


class Inputs:
    """A fused projection's output with strided rows, weights, rotations, and pages full of NaN; token 1 is padded and NaN."""

    def __init__(self, label: str, num_tokens: int, q_rank: int, kv_rank: int, rope: int) -> None:
        rng = generator(f"{label}{num_tokens}")
        self.q_rank, self.kv_rank = q_rank, kv_rank
        width = q_rank + kv_rank + rope
        self.qkv = torch.randn(num_tokens, width + 64, generator=rng, device=DEVICE).to(FLOAT)[:, 32 : width + 32]
        self.q_weight, self.kv_weight = (torch.randn(n, generator=rng, device=DEVICE).to(FLOAT) for n in (q_rank, kv_rank))
        angle = torch.rand(num_tokens, rope // 2, generator=rng, device=DEVICE) * 6
        self.rotation = rotations(angle.cos(), angle.sin())
        self.pages = torch.full((3, 2, max(4, num_tokens), kv_rank + rope), torch.nan, dtype=FLOAT, device=DEVICE)
        self.rows = torch.randperm(self.pages.numel() // (kv_rank + rope), generator=rng, device=DEVICE)[:num_tokens]
        if num_tokens > 1:
            self.rows[1], self.qkv[1] = -1, torch.nan

    def run(self, backend: str):
        """q, or None for a model without q_lora_rank."""
        rest = (self.kv_weight, self.rotation, self.pages, self.rows)
        if self.q_rank:
            return qkv_norm_rope_store(self.qkv, self.q_weight, *rest, eps=1e-6, backend=backend)
        return kv_norm_rope_store(self.qkv, *rest, eps=1e-6, backend=backend)

    def entries(self) -> torch.Tensor:
        """What pages must hold of the tokens that are not padded, in fp64."""
        kv = self.qkv[self.rows >= 0, self.q_rank :].double()
        latent, key = kv[:, : self.kv_rank], kv[:, self.kv_rank :].contiguous()
        latent = latent / (latent.square().mean(1, keepdim=True) + 1e-6).sqrt() * self.kv_weight.double()
        key = torch.view_as_real(torch.view_as_complex(key.unflatten(1, (-1, 2))) * self.rotation[self.rows >= 0].to(torch.complex128))
        return torch.cat((latent, key.flatten(1)), dim=1)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_fused_stores_the_formula_and_touches_nothing_else(
    backend: str, shape: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_unless_available(backend, FLOAT)
    inputs = Inputs(shape, num_tokens, *SHAPES[shape])
    poison_empty(monkeypatch)
    q = inputs.run(backend)
    used = inputs.rows >= 0
    flat = inputs.pages.view(-1, inputs.pages.shape[-1])
    assert relative_error(flat[inputs.rows[used]], inputs.entries()) < BOUND
    flat[inputs.rows[used]] = torch.nan
    assert flat.isnan().all()
    if q is not None:
        expected = rms_norm_quant(inputs.qkv[used, : inputs.q_rank], inputs.q_weight, eps=1e-6, backend=backend)
        assert torch.equal(q.scale[used], expected.scale) and torch.equal(q.data[used].float(), expected.data.float())
        assert q.data[~used].float().isnan().all() and q.scale[~used].isnan().all()
        assert q.data.is_contiguous() and (num_tokens == 0 or q.scale.stride() == (1, -(-num_tokens // 4) * 4))


@pytest.mark.parametrize("backend", FUSED)
def test_fused_gives_the_bits_of_its_parts(backend: str) -> None:
    skip_unless_available(backend, FLOAT)
    inputs = Inputs("parts", 4, *SHAPES["v3"])
    inputs.run(backend)
    used = inputs.rows >= 0
    latent, key = inputs.qkv[used, inputs.q_rank :].split([inputs.kv_rank, 64], dim=1)
    latent = rms_norm(latent, inputs.kv_weight, eps=1e-6, backend=backend)
    key = rope_(key.unsqueeze(1).clone(), inputs.rotation[used], backend=backend).squeeze(1)
    got = inputs.pages.view(-1, inputs.pages.shape[-1])[inputs.rows[used]]
    assert torch.equal(got, torch.cat((latent, key), dim=1))


@pytest.mark.parametrize("backend", FUSED)
def test_a_nan_stays_in_its_token(backend: str) -> None:
    skip_unless_available(backend, FLOAT)
    inputs = Inputs("nan", 4, *SHAPES["small"])
    clean, pages = inputs.run(backend), inputs.pages.clone()
    inputs.qkv[3] = torch.nan
    got = inputs.run(backend)
    flat, before = inputs.pages.view(-1, 56), pages.view(-1, 56)
    assert flat[inputs.rows[3]].isnan().all() and got.data[3].float().isnan().all()
    assert torch.equal(flat[inputs.rows[[0, 2]]], before[inputs.rows[[0, 2]]])
    assert torch.equal(got.data[[0, 2]].float(), clean.data[[0, 2]].float()) and torch.equal(got.scale[[0, 2]], clean.scale[[0, 2]])


@pytest.mark.parametrize("backend", FUSED)
def test_pages_beyond_2_31_elements(backend: str) -> None:
    """On CPU no page is touched but the rows written."""
    skip_unless_available(backend, FLOAT)
    inputs = Inputs("far", 3, *SHAPES["v3"])
    inputs.pages = torch.empty(2**31 // (61 * 64 * 576) + 2, 61, 64, 576, dtype=FLOAT, device=DEVICE)
    last = inputs.pages.numel() // 576 - 1
    inputs.rows = torch.tensor([0, -1, last], device=DEVICE)
    inputs.run(backend)
    assert relative_error(inputs.pages.view(-1, 576)[[0, last]], inputs.entries()) < BOUND


@gpu_only
@pytest.mark.skipif(not ON_GPU, reason="needs 45 GB of GPU memory")
def test_all_pages_of_a_rank() -> None:
    """5.3 x 2^32 elements, as 128 requests of 5,000 tokens have."""
    inputs = Inputs("rank", 3, *SHAPES["v3"])
    inputs.pages = torch.empty(10112, 61, 64, 576, dtype=FLOAT, device=DEVICE)
    last = inputs.pages.numel() // 576 - 1
    inputs.rows = torch.tensor([2**32 // 576 + 1, -1, last], device=DEVICE)
    q = inputs.run("triton")
    assert relative_error(inputs.pages.view(-1, 576)[inputs.rows[[0, 2]]], inputs.entries()) < BOUND
    assert not dequantise_tokens(q)[[0, 2]].isnan().any()


def test_fused_rejects_wrong_shapes() -> None:
    x, q, kv, rotation = torch.zeros(2, 128 + 16 + 4), torch.zeros(128), torch.zeros(16), torch.zeros(2, 2, dtype=torch.complex64)
    pages, rows = torch.zeros(1, 1, 4, 20), torch.zeros(2, dtype=torch.int64)
    for wrong in (
        (x, q[:100], kv, rotation, pages, rows), (x, q, kv, rotation[:1], pages, rows), (x, q, kv, rotation, pages[..., :19], rows),
        (x, q, kv, rotation, pages, rows.int()), (x, q, kv[:15], rotation, pages, rows), (x, q, kv, rotation, pages, torch.arange(4)[::2]),
        (x, torch.zeros(256)[::2], kv, rotation, pages, rows), (x, q, torch.zeros(32)[::2], rotation, pages, rows),
    ):
        with pytest.raises(AssertionError):
            qkv_norm_rope_store(*wrong, eps=1e-6)


def bench_latent_store() -> Iterator[Row]:
    """What is between the first projection and q_b, one launch; its parts as they come from FlashInfer and torch as the peer."""
    from flashinfer.norm import rmsnorm

    from kernels.quant_fp8 import quant_fp8
    from kernels.timing import compare_us, num_sets

    pages = torch.empty(64, 61, 64, 576, dtype=torch.bfloat16, device="cuda")
    weights = [torch.randn(n, dtype=torch.bfloat16, device="cuda") for n in (1536, 512)]
    for rows in (256, 4096):
        angle = torch.rand(rows, 32, device="cuda")
        rotation = rotations(angle.cos(), angle.sin())
        sets = [torch.randn(rows, 2112, dtype=torch.bfloat16, device="cuda") for _ in range(num_sets(rows * 7000))]
        places = [torch.randperm(pages.numel() // 576, device="cuda")[:rows] for _ in sets]

        def parts(x: torch.Tensor, place: torch.Tensor, rotation: torch.Tensor = rotation) -> object:
            q, latent, key = x.split([1536, 512, 64], dim=1)
            rope_(key.unsqueeze(1), rotation, backend="torch")
            latent_store(rmsnorm(latent, weights[1]), key, pages, place, backend="torch")
            return quant_fp8(rmsnorm(q, weights[0]))

        def fused(x: torch.Tensor, place: torch.Tensor, rotation: torch.Tensor = rotation) -> object:
            return qkv_norm_rope_store(x, *weights, rotation, pages, place, eps=1e-6)

        us = compare_us({
            "ours": [lambda x=x, p=p, fused=fused: fused(x, p) for x, p in zip(sets, places, strict=True)],
            "parts": [lambda x=x, p=p, parts=parts: parts(x, p) for x, p in zip(sets, places, strict=True)],
        })
        size = rows * (2112 * 2 + 1536 + 576 * 2 + 64 * 4)
        yield Row(
            f"K9-qkv_norm_rope_store-{rows}", us["parts"] / us["ours"], "x", "higher", 0.9, 1.0,
            f"FlashInfer's norms, torch's rotation and scatter {us['parts']:.2f} us, ours {us['ours']:.2f}, floor {size / 4.3e6:.2f}",
        )
