"""A layer's small ops together: every op of the chain gives with Triton what it gives with the references."""

from collections.abc import Iterator

import pytest
import torch

from kernels.numerics import Fp8, dequantise_tokens, relative_error
from tests.bench.report import Row
from tests.bench.small_ops import UNFUSED, Layer, Shape, bench, make_pages
from tests.kernels.device import FLOAT, ON_GPU, gpu_only, skip_unless_available

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
        for one, two in zip(_tensors(got[name], name, SMALL), _tensors(wanted, name, SMALL), strict=True):
            assert relative_error(one, two) < 1e-2, name


@gpu_only
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_dependent_launches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of dependent launches, replayed on the same memory, against plain launches."""
    shape = Shape(num_pages=4)
    pages = make_pages(shape).zero_()
    layers = [Layer(shape, f"dependent{i}", pages) for i in range(3)]
    monkeypatch.setattr("kernels.launch.DEPENDENT", False)
    expected = [{name: _tensors(result, name, shape) for name, result in layer.run().items()} for layer in layers]
    stored = pages.clone()
    monkeypatch.setattr("kernels.launch.DEPENDENT", True)
    for layer in layers:
        layer.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [layer.run() for layer in layers]
    for _ in range(20):
        pages.zero_()
        graph.replay()
    for results, wanted in zip(got, expected, strict=True):
        for name, result in results.items():
            assert all(torch.equal(one, two) for one, two in zip(_tensors(result, name, shape), wanted[name], strict=True)), name
    assert torch.equal(pages, stored)


def _tensors(result: object, name: str, shape: Shape) -> list[torch.Tensor]:
    """The tensors of an op's result, copied: FP8 as what it stands for, of masked groups the rows in use."""
    if isinstance(result, Fp8):
        tensor = dequantise_tokens(result)
        return [tensor[:, : shape.expert_rows] if name == "silu" else tensor]
    if isinstance(result, tuple):
        return [tensor for part in result for tensor in _tensors(part, name, shape)]
    return [] if result is None else [result.clone()]


def bench_small_ops() -> Iterator[Row]:
    yield from bench()
