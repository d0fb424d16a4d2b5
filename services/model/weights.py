"""The weights of one rank as frozen records of tensors: fp32 on CPU, FP8 blocks already dequantised.

Shapes use the config's names; nothing here knows a checkpoint's tensor names (`names.py` does) or any computation.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """MLA of one layer."""

    q_a: torch.Tensor | None  # [q_lora_rank, hidden]; None when q_lora_rank is null
    q_a_norm: torch.Tensor | None  # [q_lora_rank]
    q_b: torch.Tensor  # [num_heads * (nope + rope), q_lora_rank, or hidden without q_a]
    kv_a: torch.Tensor  # [kv_lora_rank + rope, hidden]
    kv_a_norm: torch.Tensor  # [kv_lora_rank]
    kv_b: torch.Tensor  # [num_heads * (nope + v), kv_lora_rank]; each head's nope rows, then its v rows
    o: torch.Tensor  # [hidden, num_heads * v]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """A gated MLP: down(silu(gate(x)) * up(x))."""

    gate_up: torch.Tensor  # [2 * intermediate, hidden], gate rows first
    down: torch.Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeights:
    """Gate, routed experts and the shared expert of one layer; `gate` and `bias` cover all experts, the stacks this rank's."""

    gate: torch.Tensor  # [n_routed_experts, hidden]
    bias: torch.Tensor | None  # [n_routed_experts], takes part in choosing only
    gate_up: torch.Tensor  # [num_local_experts, 2 * moe_intermediate, hidden], gate rows first
    down: torch.Tensor  # [num_local_experts, hidden, moe_intermediate]
    shared: MlpWeights | None  # intermediate = n_shared_experts * moe_intermediate


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: torch.Tensor  # [hidden]
    attention: AttentionWeights
    post_attention_norm: torch.Tensor  # [hidden]
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """The whole model as one rank holds it."""

    embed: torch.Tensor  # [vocab, hidden]
    layers: Iterable[LayerWeights]  # num_hidden_layers: a tuple, or each read when it is asked for, once
    norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden]; the same tensor as `embed` when tied
