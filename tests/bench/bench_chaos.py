"""Thirty minutes of load and faults (services/doctor/chaos), as rows. Exits non-zero on any breach, after writing them.

    python -m tests.bench.bench_chaos [--seed N] [--minutes M]
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from services.doctor.chaos.report import COMPLETED_SHARE, Report, demand_of
from tests.bench.report import Row, report


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=30.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "services.doctor.chaos", "--seed", str(arguments.seed), "--minutes", str(arguments.minutes)]
        done = subprocess.run([*command, "--json", str(file)])
        if not file.exists():
            sys.exit(done.returncode or 1)
        found = msgspec.json.decode(file.read_bytes(), type=Report)
    report("chaos", rows(found))
    sys.exit(done.returncode)


def rows(found: Report) -> list[Row]:
    """The promises of the issue as rows with a bar, the rest as figures."""
    demand = demand_of(found.minutes)
    conditions = (f"seed {found.seed}, {found.minutes:g} min, a fault every 10 s, {found.tokens_per_s:.0f} tokens/s, 2 routers, "
                  "3 prefill and 3 decode fronts, UCX_TLS=tcp, demo model, everything on one machine")
    owed = [
        Row("BREACHES", len(found.breaches), "", "lower", 0, 0, "; ".join(found.breaches) or conditions),
        Row("WRONG", found.tokens["wrong streams"], "streams", "lower", 0, 0, f"of {found.tokens['compared']} tokens compared with Mono, "
            f"{found.tokens['excused']} excused"),
        Row("LEAKED", len(found.leaked), "ranks", "lower", 0, 0, f"all pages back {found.settle_s:.1f} s after the last stream"),
        Row("HUNG", found.requests["hung"] + len(found.hung_processes), "", "lower", 0, 0, "streams and processes"),
        Row("CRASHES", sum(found.crashes.values()), "engines", "lower", 0, 0, f"ended by themselves: {found.crashes}"),
        Row("COMPLETED", found.completed_share, "share", "higher", COMPLETED_SHARE, 1.0,
            f"of requests that did not vanish while each pool had a rank that served and suffered no fault; {found.requests}"),
        Row("REQUESTS", found.requests["long"], "", "higher", demand.requests, demand.requests, "completed with 64 output tokens and more"),
    ]
    kinds = [Row(f"KIND {kind}", sum(variants.values()), "times", "higher", demand.per_kind, demand.per_kind, f"{variants}")
             for kind, variants in found.faults.items()]
    bars = dict.fromkeys(found.paths, demand.per_path) | {"RETRY": None}
    conditions = f"times that a token came of it; tried {found.tries}; reasons of all paths: {found.reasons}"
    paths = [Row(f"PATH {path}", number, "times", "higher", bars[path], bars[path], conditions) for path, number in found.paths.items()]
    spreads = {f"STREAM {kind}": (spread, "from a fault to the next token of a stream that it hit")
               for kind, spread in found.stream_recovery.items()}
    spreads |= {"RANK-RECOVERY": (found.rank_recovery, "from a fault to all ranks serving again, the time it lasts included"),
                "RANK-RETURN": (found.rank_recovery_after_release, "from a fault's end to all ranks serving again"),
                "MOVE-PAUSE": (found.move_pause, "from a move's pause to the next token")}
    times = [Row(f"{name} {part}", getattr(spread, field), "s", "lower", None, None, f"{meaning}; {spread.number} times")
             for name, (spread, meaning) in spreads.items() for part, field in (("p50", "median"), ("p99", "p99"), ("max", "most"))]
    return [*owed, *kinds, *paths, *times]


if __name__ == "__main__":
    main()
