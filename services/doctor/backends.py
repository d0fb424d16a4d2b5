"""Op x backend: which implementation of every op runs here, and why not a better one. Read from the ops' own tables."""

import importlib
import pkgutil
from collections.abc import Mapping
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


_TABLE = "IMPLEMENTATIONS"


def ops() -> dict[str, Mapping[str, object]]:
    """Every op under `kernels` with its table of implementations, best first. A page's other tables (`ADD_QUANT_IMPLEMENTATIONS`)
    are its op's variants (`rms_norm, add quant`)."""
    found: dict[str, Mapping[str, object]] = {}
    for module in pkgutil.iter_modules(kernels.__path__):
        page = importlib.import_module(f"kernels.{module.name}")
        for name in sorted((name for name in vars(page) if name.endswith(_TABLE)), key=len):
            variant = name.removesuffix(_TABLE).strip("_").lower().replace("_", " ")
            found[f"{module.name}, {variant}" if variant else module.name] = getattr(page, name)
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
