"""A layer's small ops together: every op of the chain gives with Triton what it gives with the references."""

from collections.abc import Iterator

import torch

from kernels.numerics import Fp8, dequantise_tokens, relative_error
from tests.bench.report import Row
from tests.bench.small_ops import UNFUSED, Layer, Shape, bench, make_pages
from tests.kernels.device import FLOAT, skip_unless_available

SMALL = Shape(
    num_tokens=3, hidden=256, num_heads=2, q_lora_rank=128, kv_lora_rank=32, rope_dim=8, nope_dim=16, num_experts=16, num_groups=4, top_k=2,
    intermediate=128, expert_rows=2, max_m=3, num_pages=2, num_layers=2, page_size=4,
)


def test_a_layer_is_the_same_by_all_backends() -> None:
    skip_unless_available("triton", FLOAT)
    pages = [make_pages(SMALL).zero_() for _ in range(2)]
    names = ("combine_in_norm", *UNFUSED)
    got, expected = (Layer(SMALL, "layer", pages[i], backend).run(names) for i, backend in enumerate(("triton", "reference")))
    assert relative_error(pages[0], pages[1]) < 1e-2 and set(got) == set(SMALL.floors_mb())
    for name, wanted in expected.items():
        for one, two in zip(_tensors(got[name]), _tensors(wanted), strict=True):
            used = slice(0, SMALL.expert_rows) if name == "silu" else slice(None)
            assert relative_error(one[..., used, :], two[..., used, :]) < 1e-2, name


def _tensors(result: object) -> list[torch.Tensor]:
    """The tensors of a result, FP8 as what it stands for."""
    if isinstance(result, Fp8):
        return [dequantise_tokens(result)]
    if isinstance(result, tuple):
        return [tensor for part in result for tensor in _tensors(part)]
    return [] if result is None else [result]


def bench_small_ops() -> Iterator[Row]:
    yield from bench()
