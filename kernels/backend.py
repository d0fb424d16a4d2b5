"""Which implementation of an op runs: chosen by name or by availability, never by trying and catching.

Every op page ends in a table `_IMPLEMENTATIONS`, best first. "auto" takes the first entry that is available for the
tensors at hand; a backend asked for by name is taken or refused, never replaced by another.
"""

from collections.abc import Mapping
from functools import cache
from typing import Literal, TypeVar

import torch

Backend = Literal["auto", "onednn", "torch", "reference"]
"""`reference` is the obvious loop beside each contract, `torch` its batched form, `onednn` oneDNN's fp32 GEMM on CPU."""

_Implementation = TypeVar("_Implementation")


class BackendError(ValueError):
    """A backend asked for by name that the op does not have or this machine cannot run."""


@cache
def why_unavailable(backend: str, device_type: str, dtype: torch.dtype) -> str:
    """Empty if `backend` can run on tensors of this kind here, else the reason in a few words."""
    if backend == "onednn":
        if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            return "this torch is built without oneDNN's packed GEMM"
        if device_type != "cpu" or dtype != torch.float32:
            return f"it serves float32 on cpu, not {dtype} on {device_type}"
    return ""


def select(
    implementations: Mapping[str, _Implementation], backend: Backend, device_type: str = "cpu", dtype: torch.dtype = torch.float32
) -> _Implementation:
    """Return the implementation named `backend`, or with "auto" the first one available; raises BackendError."""
    if backend == "auto":
        for name, implementation in implementations.items():
            if not why_unavailable(name, device_type, dtype):
                return implementation
        raise BackendError(f"none of {', '.join(implementations)} is available for {dtype} on {device_type}")
    if backend not in implementations:
        raise BackendError(f"backend {backend!r} is not among this op's: {', '.join(implementations)}")
    reason = why_unavailable(backend, device_type, dtype)
    if reason:
        raise BackendError(f"backend {backend!r} is not available: {reason}")
    return implementations[backend]
