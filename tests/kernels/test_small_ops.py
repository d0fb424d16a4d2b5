"""A layer's small ops together: every op of the chain gives with Triton what it gives with the references."""

from collections.abc import Callable, Iterator

import pytest
import torch

from kernels.combine_reduce import combine_add_rms_norm_quant, combine_reduce
from kernels.latent_store import kv_norm_rope_store
from kernels.numerics import Fp8, dequantise_tokens, relative_error
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import rope_
from kernels.silu_mul_quant import silu_mul_quant
from tests.bench.report import Row
from tests.bench.small_ops import UNFUSED, Layer, Shape, bench, make_pages
from tests.kernels.device import DEVICE, FLOAT, ON_GPU, gpu_only, skip_unless_available

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


@pytest.mark.parametrize("op", ["rms_norm", "residual", "combine", "combine_norm", "rope", "rope_out", "silu", "store"])
def test_rows_that_begin_inside_a_pair_are_refused(op: str) -> None:
    """Kernels read two bf16 as one word: from an odd element on, a GPU would fault."""
    skip_unless_available("triton", torch.bfloat16)
    odd = torch.zeros(2, 258, dtype=torch.bfloat16, device=DEVICE)[:, 1:257]
    x, weight, eps = torch.zeros_like(odd), torch.ones(256, dtype=torch.bfloat16, device=DEVICE), 1e-6
    idx, weights = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE), torch.ones(2, 1, device=DEVICE)
    heads, odd_heads = x.unflatten(1, (4, 64)), odd.unflatten(1, (4, 64))
    rotation = torch.zeros(2, 32, dtype=torch.complex64, device=DEVICE)
    pages, rows = torch.zeros(1, 1, 4, 256, dtype=torch.bfloat16, device=DEVICE), torch.arange(2, device=DEVICE)
    calls: dict[str, Callable[[], object]] = {
        "rms_norm": lambda: rms_norm(odd, weight, eps=eps, backend="triton"),
        "residual": lambda: add_rms_norm(x, odd, weight, eps=eps, backend="triton"),
        "combine": lambda: combine_reduce(x, idx, weights, odd, backend="triton"),
        "combine_norm": lambda: combine_add_rms_norm_quant(odd, idx, weights, None, x, weight, eps=eps, backend="triton"),
        "rope": lambda: rope_(odd_heads, rotation, backend="triton"),
        "rope_out": lambda: rope_(heads, rotation, out=odd_heads, backend="triton"),
        "silu": lambda: silu_mul_quant(odd, backend="triton"),
        "store": lambda: kv_norm_rope_store(odd, weight[:192], rotation, pages, rows, eps=eps, backend="triton"),
    }
    with pytest.raises(AssertionError, match="odd offset"):
        calls[op]()


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
