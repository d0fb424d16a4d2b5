"""`make bench`: every benchmark, one after another, each in a process of its own; results in tests/bench/results/*.json.

    python -m tests.bench [name ...]        names: cluster, forward, handover, scaling ...; if named: chaos (half an hour), kernels (a GPU)
"""

import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ONLY_WHEN_NAMED = {"chaos", "kernels"}


def main() -> None:
    known = {path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py")}
    names = sys.argv[1:] or sorted(known - ONLY_WHEN_NAMED)
    failed: list[str] = []
    for name in names:
        if name not in known:
            sys.exit(f"error: there is no benchmark {name!r}; known are {', '.join(sorted(known))}")
        print(f"== {name}", flush=True)
        began = time.monotonic()
        if subprocess.run([sys.executable, "-m", f"tests.bench.bench_{name}"]).returncode:
            failed.append(name)
        print(f"== {name}: {time.monotonic() - began:.0f} s", flush=True)
    if failed:
        sys.exit(f"error: {', '.join(failed)} failed; see the output above")


if __name__ == "__main__":
    main()
