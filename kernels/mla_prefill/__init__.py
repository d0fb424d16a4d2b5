"""Multi-head attention of a ragged batch of prompt chunks, in parts that are merged by their natural log-sum-exps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.backend import Backend, BackendError, select

_MAX_SCORES = 1 << 22
"""Elements of one block of scores (16 MB in fp32): queries are taken in blocks so small that a long chunk needs no more memory."""
_QUERY_BLOCK = 128  # measured for 4 heads and 2,000 tokens: 64 rows 68 ms, 128 rows 66, 256 rows 70, 512 rows 91


@dataclass(frozen=True, slots=True)
class MlaPrefillShape:
    """Sizes fixed by the model; every head has its own key (qk_dim = nope + rope) and value."""

    num_heads: int
    qk_dim: int
    v_dim: int
    softmax_scale: float


class MlaPrefill(Protocol):
    """Planned once a step, run once a layer; it holds one plan, so a step with several parts uses one of these for each part."""

    def plan(self, psum_q: Sequence[int], psum_k: Sequence[int], *, causal: bool) -> None:
        """Fix the ragged batch: sequence i has queries psum_q[i]:psum_q[i + 1] and keys psum_k[i]:psum_k[i + 1].

        causal  sequences have as many keys as queries, and query j sees the keys 0..j; otherwise a query sees all keys
        """
        ...

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend within each sequence.

        q        [num_queries, num_heads, qk_dim]; here and below any strides of the first two dimensions, rows contiguous
        k        [num_keys, num_heads, qk_dim]
        v        [num_keys, num_heads, v_dim]
        returns  out [num_queries, num_heads, v_dim] in q's dtype; lse [num_queries, num_heads], fp32 for half types, else q's
                 dtype: the natural logarithm of the sum of exp(scores); out 0 and lse -inf where a sequence has no keys
        """
        ...


def create_mla_prefill(
    shape: MlaPrefillShape, *, backend: Backend = "auto", device_type: str = "cpu", dtype: torch.dtype = torch.float32
) -> MlaPrefill:
    """Return a planner of the chosen backend for tensors of `dtype` on `device_type`; "auto" passes over FlashInfer for dims it lacks."""
    reason = why_not_flashinfer(shape, dtype)
    if backend == "flashinfer" and reason:
        raise BackendError(f"backend 'flashinfer' cannot serve {shape}: {reason}")
    table = {name: make for name, make in IMPLEMENTATIONS.items() if name != "flashinfer" or not reason}
    return select(table, backend, device_type, dtype)(shape)


def why_not_flashinfer(shape: MlaPrefillShape, dtype: torch.dtype) -> str:
    """Empty if FlashInfer's ragged prefill for Hopper is compiled for these dims, else the reason."""
    if (shape.qk_dim, shape.v_dim) != (192, 128):
        return f"it has qk_dim 192 with v_dim 128, not {shape.qk_dim} with {shape.v_dim}"
    if dtype != torch.bfloat16:
        return f"it is built for bfloat16, not {dtype}"
    return ""


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, *, backend: Backend = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    out      [num_queries, num_heads, v_dim]; any strides of the first two dimensions, rows contiguous
    lse      [num_queries, num_heads] as `MlaPrefill.run` returns it (natural logarithms); any strides
    returns  (out, lse) in new memory; a side of lse -inf has no keys and an out of zeros; both sides: out 0, lse -inf
    """
    assert out_a.shape == out_b.shape and lse_a.shape == lse_b.shape == out_a.shape[:2], f"{out_a.shape=} {out_b.shape=} {lse_a.shape=}"
    assert out_a.stride(2) == out_b.stride(2) == 1 or out_a.shape[2] == 1, f"{out_a.stride()=} {out_b.stride()=}"
    return select(MERGE_IMPLEMENTATIONS, backend, out_a.device.type, out_a.dtype)(out_a, lse_a, out_b, lse_b)


def merge_states_reference(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in two exponentials that overflow for large lse."""
    sum_a, sum_b = lse_a.double().exp().unsqueeze(-1), lse_b.double().exp().unsqueeze(-1)
    out = (out_a * sum_a + out_b * sum_b) / (sum_a + sum_b).clamp(min=1e-300)
    return out.to(out_a.dtype), (sum_a + sum_b).log().squeeze(-1).to(lse_a.dtype)


def merge_states_torch(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the larger of the two."""
    lse = torch.logaddexp(lse_a, lse_b)
    finite = lse.clamp(min=torch.finfo(lse.dtype).min)  # -inf on both sides weighs 0, not NaN
    weight_a, weight_b = (lse_a - finite).exp().unsqueeze(-1), (lse_b - finite).exp().unsqueeze(-1)
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse


def _merge_states_triton(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    from kernels.mla_prefill._triton import merge_states_triton

    return merge_states_triton(out_a, lse_a, out_b, lse_b)


class _Planned:
    """What the torch forms keep of a plan."""

    def __init__(self, shape: MlaPrefillShape) -> None:
        self._scale = shape.softmax_scale
        self._shape = shape

    def plan(self, psum_q: Sequence[int], psum_k: Sequence[int], *, causal: bool) -> None:
        check_plan(psum_q, psum_k, causal)
        self._psum_q, self._psum_k, self._causal = psum_q, psum_k, causal

    def _outputs(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros and -inf, as rows without keys keep them."""
        check_run(self._shape, self._psum_q[-1], self._psum_k[-1], q, k, v)
        wide = torch.promote_types(q.dtype, torch.float32)
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2]), q.new_full(q.shape[:2], -torch.inf, dtype=wide)


def check_plan(psum_q: Sequence[int], psum_k: Sequence[int], causal: bool) -> None:
    """Assert what `MlaPrefill.plan` asks for."""
    assert len(psum_q) == len(psum_k) and (not causal or list(psum_q) == list(psum_k)), f"{psum_q=} {psum_k=} {causal=}"


def check_run(shape: MlaPrefillShape, num_queries: int, num_keys: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Assert what `MlaPrefill.run` asks for."""
    assert q.shape == (num_queries, shape.num_heads, shape.qk_dim), f"{q.shape=} {num_queries=} {shape=}"
    assert k.shape == (num_keys, shape.num_heads, shape.qk_dim), f"{k.shape=} {num_keys=} {shape=}"
    assert v.shape == (num_keys, shape.num_heads, shape.v_dim), f"{v.shape=} {num_keys=} {shape=}"


class ReferenceMlaPrefill(_Planned):
    """Query by query."""

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self._outputs(q, k, v)
        psum_q, psum_k = self._psum_q, self._psum_k
        for i in range(len(psum_q) - 1):
            for row in range(psum_q[i], psum_q[i + 1]):
                end = psum_k[i] + row - psum_q[i] + 1 if self._causal else psum_k[i + 1]
                keys, values = k[psum_k[i] : end].to(lse.dtype), v[psum_k[i] : end].to(lse.dtype)
                if len(keys):
                    scores = (q[row].to(lse.dtype) * keys).sum(dim=-1) * self._scale  # [num_keys, num_heads]
                    lse[row] = scores.exp().sum(dim=0).log()
                    out[row] = ((scores - lse[row]).exp().unsqueeze(-1) * values).sum(dim=0).to(out.dtype)
        return out, lse


class TorchMlaPrefill(_Planned):
    """A loop over sequences and blocks of queries; a causal block multiplies with no key behind its last query."""

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self._outputs(q, k, v)
        if q.is_cuda:  # a fallback for dims that no kernel serves, where rounded scores would matter more than time
            q, k, v = q.to(lse.dtype), k.to(lse.dtype), v.to(lse.dtype)
        psum_q, psum_k, causal = self._psum_q, self._psum_k, self._causal
        heads_q, heads_k, heads_v = q.transpose(0, 1), k.permute(1, 2, 0), v.transpose(0, 1)  # [h, q, d], [h, d, k], [h, k, v]
        for i in range(len(psum_q) - 1):
            num_keys = psum_k[i + 1] - psum_k[i]
            block = max(16, min(_QUERY_BLOCK, _MAX_SCORES // max(1, num_keys * q.shape[1])))
            for start in range(psum_q[i], psum_q[i + 1], block) if num_keys else ():
                stop = min(start + block, psum_q[i + 1])
                end = psum_k[i] + stop - psum_q[i] if causal else psum_k[i + 1]
                scores = torch.bmm(heads_q[:, start:stop] * self._scale, heads_k[:, :, psum_k[i] : end])  # [h, block, keys]
                if causal and stop - start > 1:
                    scores[:, :, start - stop :] += scores.new_full((stop - start, stop - start), -torch.inf).triu_(1)
                best = scores.amax(dim=-1, keepdim=True)
                weights = scores.sub_(best).exp_()
                total = weights.sum(dim=-1, keepdim=True)  # [h, block, 1]
                out[start:stop] = torch.bmm(weights, heads_v[:, psum_k[i] : end]).div_(total).transpose(0, 1).to(out.dtype)
                lse[start:stop] = (best + total.log()).squeeze(-1).t()
        return out, lse


def _make_flashinfer(shape: MlaPrefillShape) -> MlaPrefill:
    from kernels.mla_prefill._flashinfer import FlashInferMlaPrefill

    return FlashInferMlaPrefill(shape)


_Merge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
IMPLEMENTATIONS: Mapping[str, Callable[[MlaPrefillShape], MlaPrefill]] = {
    "flashinfer": _make_flashinfer,
    "torch": TorchMlaPrefill,
    "reference": ReferenceMlaPrefill,
}
MERGE_IMPLEMENTATIONS: Mapping[str, _Merge] = {
    "triton": _merge_states_triton,
    "torch": merge_states_torch,
    "reference": merge_states_reference,
}
