"""FlashInfer's ragged prefill for Hopper (fa3, head dims 192 and 128)."""

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

from kernels.mla_prefill import MlaPrefillShape, check_plan, check_run

_WORKSPACE_BYTES = 128 << 20
_LOWEST = -49_000.0  # a row without keys gets -50,000 where ours is -inf


class FlashInferMlaPrefill:
    """Its plan is a work list of (sequence, head, block of 128 queries) that every layer of the step reuses."""

    def __init__(self, shape: MlaPrefillShape) -> None:
        self._shape = shape
        self._wrapper = BatchPrefillWithRaggedKVCacheWrapper(_workspace(torch.cuda.current_device()), "NHD", backend="fa3")
        self._planned = torch.cuda.Event()

    def plan(self, psum_q: Sequence[int], psum_k: Sequence[int], *, causal: bool) -> None:
        check_plan(psum_q, psum_k, causal)
        self._num_queries, self._num_keys = psum_q[-1], psum_k[-1]
        self._without_keys = any(begin == end for begin, end in pairwise(psum_k))
        if not self._num_queries or not self._num_keys:
            return
        self._planned.synchronize()  # FlashInfer's pinned buffer may still be read by the last plan's copy
        self._wrapper.plan(
            torch.tensor(psum_q, dtype=torch.int32),
            torch.tensor(psum_k, dtype=torch.int32),
            self._shape.num_heads,
            self._shape.num_heads,
            self._shape.qk_dim,
            self._shape.v_dim,
            causal=causal,
            sm_scale=self._shape.softmax_scale,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        self._planned.record()

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        check_run(self._shape, self._num_queries, self._num_keys, q, k, v)
        assert q.dtype == torch.bfloat16 and q.stride(2) == k.stride(2) == v.stride(2) == 1, f"{q.dtype=} {q.stride()=}"
        if not self._num_queries or not self._num_keys:
            lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
            return q.new_zeros(q.shape[0], q.shape[1], self._shape.v_dim), lse
        out, lse = self._wrapper.run(q, k, v, return_lse=True)
        if self._without_keys:
            lse.masked_fill_(lse < _LOWEST, -math.inf)
        return out, lse.mul_(math.log(2.0))  # its logarithms are of base 2


@cache
def _workspace(device: int) -> torch.Tensor:
    """One for all planners: fa3 does not split keys, so nothing in it outlives a launch."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=torch.device("cuda", device))
