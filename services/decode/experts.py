"""The MLP half of a decode layer: few tokens, so an expert sees a row or two and its weights are what costs time."""

import torch

from kernels.backend import Backend
from kernels.grouped_experts import grouped_experts
from kernels.linear import create_linear
from kernels.silu_mul import silu_mul
from kernels.topk_gate import topk_gate
from services.model.config import ModelConfig
from services.model.weights import MlpWeights, MoeWeights


class DecodeMlp:
    """A gated MLP on every token: dense layers, and the shared expert of the others."""

    def __init__(self, weights: MlpWeights, backend: Backend) -> None:
        self._backend: Backend = backend
        self._gate_up = create_linear(weights.gate_up, backend=backend)
        self._down = create_linear(weights.down, backend=backend)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, hidden] -> [batch, hidden]."""
        return self._down(silu_mul(self._gate_up(x), backend=self._backend))


class DecodeExperts:
    """Gate, routed experts and the shared expert of one layer; the scaling factor sits in the gate's weights alone."""

    def __init__(self, config: ModelConfig, weights: MoeWeights, backend: Backend) -> None:
        self._config, self._bias = config, weights.bias
        self._backend: Backend = backend
        self._gate = create_linear(weights.gate, backend=backend)
        # Rows an expert are too few for oneDNN's layout to pay, and a second copy of the experts would double the rank.
        expert_backend: Backend = "torch" if backend == "auto" else backend
        self._gate_up = [create_linear(expert, backend=expert_backend) for expert in weights.gate_up.unbind(0)]
        self._down = [create_linear(expert, backend=expert_backend) for expert in weights.down.unbind(0)]
        self._shared = None if weights.shared is None else DecodeMlp(weights.shared, backend)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, hidden], normalised -> [batch, hidden]."""
        config = self._config
        topk_idx, topk_weights = topk_gate(
            self._gate(x),
            self._bias,
            top_k=config.num_experts_per_tok,
            num_groups=config.n_group,
            topk_groups=config.topk_group,
            method=config.topk_method,
            scoring=config.scoring_func,
            normalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            backend=self._backend,
        )
        routed = grouped_experts(x, topk_idx, topk_weights, self._gate_up, self._down, backend=self._backend)
        return routed if self._shared is None else routed.add_(self._shared(x))
