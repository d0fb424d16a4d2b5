"""Op x backend: which implementation of every op runs here, and why not a better one. Read from the ops' own tables."""

import importlib
import pkgutil
from dataclasses import dataclass

import torch

import kernels
from kernels.backend import choose, why_not_automatic


@dataclass(frozen=True, slots=True)
class Choice:
    """One op's choice for tensors of one kind."""

    op: str
    backend: str
    passed_over: dict[str, str]  # better ones -> why each is not it
    others: tuple[str, ...]  # those after it, taken only when asked for by name


def ops() -> dict[str, dict[str, object]]:
    """Every op under `kernels` with its table of implementations, best first."""
    found: dict[str, dict[str, object]] = {}
    for module in pkgutil.iter_modules(kernels.__path__):
        table = getattr(importlib.import_module(f"kernels.{module.name}"), "IMPLEMENTATIONS", None)
        if table is not None:
            found[module.name] = table
    return found


def choices(device_type: str, dtype: torch.dtype) -> list[Choice]:
    """The choice of every op for such tensors."""
    chosen: list[Choice] = []
    for op, table in ops().items():
        names = list(table)
        backend = choose(table, "auto", device_type, dtype)
        better, others = names[: names.index(backend)], names[names.index(backend) + 1 :]
        chosen.append(Choice(op, backend, {name: why_not_automatic(name, device_type, dtype) for name in better}, tuple(others)))
    return chosen


def kind_here() -> tuple[str, torch.dtype]:
    """Device and dtype that an engine on this machine computes with."""
    return ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
