"""Writes a benchmark's rows to `results/<name>.json` with the machine, versions and date they belong to, and prints them.

    report("handover", [Row("C7", 6.1, "GB/s", "higher", 5.4, 9.5, "351 MB as 79 pages, two processes, UCX cma")])
"""

import datetime
import importlib.metadata
import platform
from pathlib import Path
from typing import Literal

import msgspec
import psutil
import torch

RESULTS = Path(__file__).parent / "results"
_PACKAGES = (
    "torch", "numpy", "nixl-cu13", "grpcio", "pyzmq", "msgspec", "transformers", "triton", "flashinfer-python", "sgl-deep-gemm",
)


class Row(msgspec.Struct, frozen=True):
    """One measured figure; `base` is the bar that must be passed, `aim` the goal beyond it (None: a figure without a bar)."""

    id: str
    value: float
    unit: str
    better: Literal["lower", "higher"]
    base: float | None
    aim: float | None
    conditions: str


def report(name: str, rows: list[Row]) -> Path:
    """Write and print `rows`; returns the file."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    rounded = [msgspec.structs.replace(row, value=float(f"{row.value:.4g}")) for row in rows]
    body = {"machine": machine(), "versions": versions(), "date": datetime.date.today().isoformat(), "rows": rounded}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n")
    for row in rounded:
        show(row)
    return path


def show(row: Row) -> None:
    """Print one row, with its bar."""
    bar = "" if row.base is None else f"  base {row.base:g}, aim {row.aim:g}: {'passed' if passed(row) else 'MISSED'}"
    print(f"{row.id:16} {row.value:>10.4g} {row.unit:10} {row.better} is better{bar}  ({row.conditions})", flush=True)


def passed(row: Row) -> bool:
    """Whether the base is reached; a row without one passes."""
    return row.base is None or (row.value >= row.base if row.better == "higher" else row.value <= row.base)


def machine() -> dict[str, str | int | float]:
    """What the figures were measured on."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
    gpu = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda or ""} if torch.cuda.is_available() else {}
    return {
        **gpu,
        "cpu": models[0] if models else platform.processor(),
        "cores": psutil.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
    }


def versions() -> dict[str, str]:
    """Python and the packages that matter, where installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
