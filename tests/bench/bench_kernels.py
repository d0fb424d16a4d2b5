"""Every kernel on one Hopper GPU: `python -m tests.bench kernels`, or `python -m tests.bench.bench_kernels OP ...` for some ops.

The benchmark of an op stands beside its tests, `bench_<op>` in `tests/kernels/test_<op>.py`, and yields rows; this collects them. Times
are medians over replays of a CUDA graph that rotates input sets, so that L2 is cold (`kernels/timing.py`). Only a run of all ops
writes results/kernels.json.
"""

import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.bench.report import Row, report, show

TESTS = Path(__file__).parents[1] / "kernels"


def benchmarks() -> dict[str, str]:
    """Op -> the module whose `bench_<op>` measures it."""
    files = {path.stem.removeprefix("test_"): path for path in sorted(TESTS.glob("test_*.py"))}
    return {op: f"tests.kernels.test_{op}" for op, path in files.items() if f"\ndef bench_{op}(" in path.read_text()}


def measure(op: str, module: str) -> Iterator[Row]:
    """Rows of one op, shown as they come."""
    began = time.monotonic()
    print(f"-- {op}", flush=True)
    for row in getattr(importlib.import_module(module), f"bench_{op}")():
        show(row)
        yield row
    torch.cuda.empty_cache()
    print(f"-- {op}: {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    known = benchmarks()
    wanted = sys.argv[1:] or list(known)
    unknown = [op for op in wanted if op not in known]
    if unknown:
        sys.exit(f"error: no benchmark of {', '.join(unknown)}; there are {', '.join(known)}")
    if not torch.cuda.is_available():
        sys.exit("error: kernels are measured on a Hopper GPU, and torch sees none here")
    rows = [row for op in wanted for row in measure(op, known[op])]
    if wanted == list(known):
        report("kernels", rows)


if __name__ == "__main__":
    main()
