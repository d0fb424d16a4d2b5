"""Which implementation of an op runs: chosen by name or by availability, never by trying and catching.

Every op page ends in a table `IMPLEMENTATIONS`, best first. "auto" takes the first entry that is available for the
tensors at hand; a backend asked for by name is taken or refused, never replaced by another.
"""

import os
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Literal, TypeVar

import torch

Backend = Literal["auto", "deep_gemm", "flashinfer", "triton", "onednn", "torch", "reference"]
"""`reference` is the obvious loop beside each contract, `torch` its batched form, `onednn` oneDNN's fp32 GEMM on CPU, `triton`
our kernels for Hopper, `deep_gemm` and `flashinfer` the libraries of these names."""

_PACKAGES = {"triton": "triton", "flashinfer": "flashinfer", "deep_gemm": "deep_gemm"}
_HOPPER = (9, 0)

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
    if backend in _PACKAGES:
        return _why_no_gpu_backend(backend, device_type, dtype)
    return ""


def _why_no_gpu_backend(backend: str, device_type: str, dtype: torch.dtype) -> str:
    """The libraries and Triton need their package and a Hopper GPU; Triton's interpreter serves CPU tensors in tests."""
    if find_spec(_PACKAGES[backend]) is None:
        return f"the package {_PACKAGES[backend]} is not installed"
    if device_type == "cpu" and backend == "triton":
        return "" if interpreting() else "it serves cuda tensors; cpu only under TRITON_INTERPRET=1"
    if device_type != "cuda":
        return f"it serves cuda tensors, not {device_type}"
    if torch.cuda.get_device_capability() != _HOPPER:
        return f"it is built for Hopper (capability 9.0), not {'.'.join(map(str, torch.cuda.get_device_capability()))}"
    if dtype == torch.float64:
        return "it has no float64"
    return ""


def interpreting() -> bool:
    """Whether Triton kernels run on CPU, instruction by instruction: for tests, far too slow to serve."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def choose(
    implementations: Mapping[str, _Implementation], backend: Backend, device_type: str = "cpu", dtype: torch.dtype = torch.float32
) -> str:
    """Name of the implementation that `select` returns; raises BackendError."""
    if backend == "auto":
        return _first_available(tuple(implementations), device_type, dtype)
    if backend not in implementations:
        raise BackendError(f"backend {backend!r} is not among this op's: {', '.join(implementations)}")
    reason = why_unavailable(backend, device_type, dtype)
    if reason:
        raise BackendError(f"backend {backend!r} is not available: {reason}")
    return backend


@cache
def _first_available(names: tuple[str, ...], device_type: str, dtype: torch.dtype) -> str:
    """Cached: asked again before every op of a step, where looking at the environment costs as much as a small op."""
    for name in names:
        if not why_not_automatic(name, device_type, dtype):
            return name
    raise BackendError(f"none of {', '.join(names)} is available for {dtype} on {device_type}")


def why_not_automatic(backend: str, device_type: str, dtype: torch.dtype) -> str:
    """As `why_unavailable`, and the interpreter is never chosen unless asked for by name."""
    if backend == "triton" and device_type == "cpu" and interpreting():
        return "Triton's interpreter runs only when asked for by name"
    return why_unavailable(backend, device_type, dtype)


def select(
    implementations: Mapping[str, _Implementation], backend: Backend, device_type: str = "cpu", dtype: torch.dtype = torch.float32
) -> _Implementation:
    """Return the implementation named `backend`, or with "auto" the first one available; raises BackendError."""
    return implementations[choose(implementations, backend, device_type, dtype)]
