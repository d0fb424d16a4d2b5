"""What this machine offers and what is installed. Every question is asked apart, so that a broken part hides no other."""

import importlib
import importlib.metadata
import platform
from collections.abc import Callable
from pathlib import Path

import torch

PACKAGES = (
    "torch", "triton", "flashinfer-python", "sgl-deep-gemm", "nvshmem4py-cu13", "nixl-cu13", "grpcio", "pyzmq", "msgspec", "safetensors",
    "tokenizers",
)
OURS = ("proto", "services", "kernels")
_TREE = Path(__file__).parents[2]
_INFINIBAND = Path("/sys/class/infiniband")


def environment() -> list[tuple[str, str]]:
    """(what, finding) pairs, in the order of reading."""
    findings = [("python", platform.python_version()), ("kernel", f"{platform.system()} {platform.release()} {platform.machine()}")]
    findings += [(name, _asked(lambda name=name: importlib.metadata.version(name))) for name in PACKAGES]
    findings += [(f"package {name}", _asked(lambda name=name: origin(name))) for name in OURS]
    findings += [("GPUs", _asked(gpus)), ("InfiniBand", _asked(network_cards))]
    return findings


def origin(name: str) -> str:
    """Where one of our packages is imported from; PyPI has others of the same names."""
    place = Path(next(iter(importlib.import_module(name).__path__))).resolve()
    return f"{place}" if place == _TREE / name else f"{place}, NOT this tree ({_TREE / name}): another package of this name is in the way"


def gpus() -> str:
    """Names, capability and memory of what torch sees."""
    if not torch.cuda.is_available():
        return "none that torch sees: everything runs on CPU"
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{gpu.name} ({gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB)" for gpu in found)


def network_cards() -> str:
    """RDMA devices; Baton's transfers over them have never been run on hardware."""
    found = sorted(card.name for card in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    return f"{', '.join(found)} (never run by us)" if found else "none: pages travel over shared memory or TCP"


def _asked(question: Callable[[], str]) -> str:
    try:
        return question()
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    except Exception as error:  # a doctor reports what is broken, whatever it is
        return f"broken: {type(error).__name__}: {error}"
