"""Where tests of kernels run: on the GPU if there is one, else Triton's kernels in its interpreter and no library."""

import zlib

import pytest
import torch

from kernels.backend import why_unavailable

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
FLOAT = torch.bfloat16 if ON_GPU else torch.float32
"""The interpreter's tl.dot is wrong for bfloat16, so there the same kernels get float32 inputs."""

gpu_only = pytest.mark.gpu


def skip_unless_available(backend: str, dtype: torch.dtype = torch.float32) -> None:
    """Skip the test with the reason for which `backend` cannot run here."""
    reason = why_unavailable(backend, DEVICE, dtype)
    if reason:
        pytest.skip(f"{backend}: {reason}")


def generator(label: str, device: str = DEVICE) -> torch.Generator:
    """Random numbers that depend on the label alone, never on the order of tests."""
    return torch.Generator(device).manual_seed(zlib.crc32(label.encode()))
