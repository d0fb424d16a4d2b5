"""K7: the ops of one decode layer between its GEMMs and its attention, in the order of a layer, as one chain of launches.

Every op has inputs of its own, as GEMMs, attention and exchange would have left them; only the gate reads what the op before it wrote. The
chain begins where the experts of the layer before end: their combine and this layer's first norm are one op.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.backend import Backend
from kernels.combine_reduce import combine_add_rms_norm_quant, combine_reduce
from kernels.latent_store import qkv_norm_rope_store
from kernels.rms_norm import add_rms_norm_quant
from kernels.rope import rope_, rotations
from kernels.silu_mul_quant import silu_mul_quant, silu_mul_quant_masked
from kernels.topk_gate import gate
from tests.bench.report import Row
from tests.kernels.device import DEVICE, FLOAT, generator

CHAIN = ("combine_in_norm", "qkv_norm_rope_store", "q_rope", "post_norm", "gate", "silu", "shared_silu")
UNFUSED = ("combine_reduce", "in_norm", *CHAIN[1:])


@dataclass(frozen=True)
class Shape:
    """A layer, by default V3's at the goal's point: 128 requests of 2 tokens, 2 experts a rank that get 1024 rows each."""

    num_tokens: int = 256
    hidden: int = 7168
    num_heads: int = 128
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    rope_dim: int = 64
    nope_dim: int = 128
    num_experts: int = 256
    num_groups: int = 8
    top_k: int = 8
    intermediate: int = 2048
    num_local_experts: int = 2
    expert_rows: int = 1024
    max_m: int = 2048
    num_pages: int = 64
    num_layers: int = 61
    page_size: int = 64

    def floors_mb(self) -> dict[str, float]:
        """Megabytes that each op must move, by the names of `Layer.ops`."""
        m, h, i = self.num_tokens, self.hidden, self.intermediate
        width = self.kv_lora_rank + self.rope_dim
        moved = {
            "combine_in_norm": m * h * (2 * (self.top_k + 3) + 1),
            "combine_reduce": m * h * 2 * (self.top_k + 2),
            "in_norm": m * h * 7,
            "qkv_norm_rope_store": m * (2 * (self.q_lora_rank + width) + self.q_lora_rank + 2 * width),
            "q_rope": m * self.num_heads * self.rope_dim * 4,
            "post_norm": m * h * 9,
            "gate": (m + self.num_experts) * h * 2,
            "silu": self.num_local_experts * self.expert_rows * i * 5,
            "shared_silu": m * i * 5,
        }
        return {name: size / 1e6 for name, size in moved.items()}


class Layer:
    """Inputs of one layer's small ops."""

    def __init__(self, shape: Shape, label: str, pages: torch.Tensor, backend: Backend = "auto") -> None:
        self.shape, self.pages, self._backend = shape, pages, backend
        self._random = generator(label)
        m, heads, width = shape.num_tokens, shape.num_heads, shape.kv_lora_rank + shape.rope_dim
        self.norms = self.randn(2, 2, m, shape.hidden)
        self.norm_weights = self.randn(2, shape.hidden)
        self.qkv = self.randn(m, shape.q_lora_rank + width)
        self.q_weight, self.kv_weight = self.randn(shape.q_lora_rank), self.randn(shape.kv_lora_rank)
        angle = torch.rand(m, shape.rope_dim // 2, generator=self._random, device=DEVICE) * 6
        self.rotation = rotations(angle.cos(), angle.sin())
        self.rows = torch.randperm(pages.numel() // width, generator=self._random, device=DEVICE)[:m]
        self.q = self.randn(m, heads, shape.nope_dim + shape.rope_dim)[..., shape.nope_dim :]
        self.q_out = torch.empty(m, heads, width, dtype=FLOAT, device=DEVICE)[..., shape.kv_lora_rank :]
        self.router, self.bias = self.randn(shape.num_experts, shape.hidden) / 64, torch.zeros(shape.num_experts, device=DEVICE)
        self.gate_up = self.randn(shape.num_local_experts, shape.max_m, 2 * shape.intermediate)
        self.counts = torch.full((shape.num_local_experts,), shape.expert_rows, dtype=torch.int32, device=DEVICE)
        self.shared_gate_up, self.shared = self.randn(m, 2 * shape.intermediate), self.randn(m, shape.hidden)
        self.expert_out = self.randn(m * shape.top_k, shape.hidden)
        self.row_idx = torch.randperm(m * shape.top_k, generator=self._random, device=DEVICE).view(m, shape.top_k).int()
        self.topk_weights = torch.rand(m, shape.top_k, generator=self._random, device=DEVICE)
        self.normed = self.norms[0, 0]

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random, device=DEVICE).to(FLOAT)

    def ops(self) -> dict[str, Callable[[], Any]]:
        """The ops by name."""
        named = {"eps": 1e-6, "backend": self._backend}
        (x, residual), (attended, total) = self.norms
        experts = (self.expert_out, self.row_idx, self.topk_weights, self.shared)
        return {
            "combine_in_norm": partial(combine_add_rms_norm_quant, *experts, residual, self.norm_weights[0], **named),
            "combine_reduce": partial(combine_reduce, *experts, backend=self._backend),
            "in_norm": partial(add_rms_norm_quant, x, residual, self.norm_weights[0], keep_normed=False, **named),
            "qkv_norm_rope_store": partial(
                qkv_norm_rope_store, self.qkv, self.q_weight, self.kv_weight, self.rotation, self.pages, self.rows, **named
            ),
            "q_rope": partial(rope_, self.q, self.rotation, out=self.q_out, backend=self._backend),
            "post_norm": partial(add_rms_norm_quant, attended, total, self.norm_weights[1], keep_normed=True, **named),
            "gate": lambda: self.gate(self.normed),
            "silu": partial(silu_mul_quant_masked, self.gate_up, self.counts, backend=self._backend),
            "shared_silu": partial(silu_mul_quant, self.shared_gate_up, backend=self._backend),
        }

    def gate(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        groups = self.shape.num_groups
        return gate(
            normed, self.router, self.bias, top_k=self.shape.top_k, num_groups=groups, topk_groups=max(1, groups // 2), scale=2.5,
            backend=self._backend,
        )

    def run(self, names: tuple[str, ...] = CHAIN) -> dict[str, Any]:
        """These ops, one after the other; the gate reads the second norm."""
        ops, results = self.ops(), dict[str, Any]()
        for name in names:
            results[name] = self.gate(results["post_norm"][1]) if name == "gate" else ops[name]()
        return results


def make_pages(shape: Shape) -> torch.Tensor:
    """Page-major memory that all layers share."""
    size = (shape.num_pages, shape.num_layers, shape.page_size, shape.kv_lora_rank + shape.rope_dim)
    return torch.empty(size, dtype=FLOAT, device=DEVICE)


def bench() -> Iterator[Row]:
    """The whole chain, then each op alone, all on rotated layers: cold L2."""
    from kernels.timing import compare_us, num_sets

    shape = Shape()
    floors = {name: size / 4.3 for name, size in shape.floors_mb().items()}
    pages = make_pages(shape)
    sets = {name: num_sets(int(floor * 4.3e6)) for name, floor in floors.items()}
    layers = [Layer(shape, f"layer{i}", pages) for i in range(max(sets.values()))]
    chains = {"fused": CHAIN, "unfused": UNFUSED, "no_q_rope": tuple(name for name in CHAIN if name != "q_rope")}
    us = compare_us({name: [partial(layer.run, chain) for layer in layers[:4]] for name, chain in chains.items()})
    floor = sum(floors[name] for name in CHAIN)
    yield Row(
        "K7", us["fused"], "us", "lower", 60.0, 44.0,
        f"{len(CHAIN)} ops as one chain of launches, floor {floor:.1f} us; without the queries' rotation {us['no_q_rope']:.1f}, "
        f"with the combine apart from the norm {us['unfused']:.1f}",
    )
    for name, floor in floors.items():
        us = compare_us({name: [layer.ops()[name] for layer in layers[: sets[name]]]})[name]
        yield Row(f"K7-{name}", us, "us", "lower", None, None, f"alone, floor {floor:.2f} us")
