"""Unwritten memory that shows: whatever `torch.empty` gives is full of NaN."""

from typing import Any

import pytest
import torch


def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the rest of a test, an output that a kernel did not write is NaN (integers: a large negative number)."""
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
        out = empty(*shape, **options)
        if out.dtype.itemsize == 1:
            out.view(torch.uint8).fill_(0xFF)  # NaN in e4m3
        else:
            out.fill_(torch.nan if out.dtype.is_floating_point else -(2**31))
        return out

    monkeypatch.setattr(torch, "empty", poisoned)
