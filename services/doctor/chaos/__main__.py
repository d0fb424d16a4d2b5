"""`python -m services.doctor.chaos --seed N --minutes M`: a cluster under load and faults, then what it owed and what it gave.

Exit code 0 = every promise held, 1 = a breach (each is one sentence of the report) or an error, 130 = interrupted.
"""

import argparse
import asyncio
import sys
from pathlib import Path

import msgspec

from services.doctor.chaos.kinds import KINDS
from services.doctor.chaos.report import Report
from services.doctor.chaos.run import Plan, Run, default_log_dir
from services.doctor.chaos.text import describe
from services.runtime.config import program_name
from services.runtime.process import run_process, say


def main() -> None:
    """Run, print, and say by the exit code whether anything broke."""
    parser = argparse.ArgumentParser(prog=program_name(), description="A cluster under a seeded schedule of faults, verified against Mono.")
    parser.add_argument("--seed", type=int, default=1, help="of load and faults (default 1)")
    parser.add_argument("--minutes", type=float, default=3.0, help="under load; 3 and more want every kind and path (default 3)")
    parser.add_argument("--clients", type=int, default=12, help="requests at once (default 12)")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this kind of fault; may be given more than once")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="where the report is written as JSON too")
    arguments = parser.parse_args()
    plan = Plan(seed=arguments.seed, minutes=arguments.minutes, num_clients=arguments.clients,
                kinds=tuple(arguments.kind or KINDS), log_dir=default_log_dir(arguments.seed))
    reports: list[Report] = []

    async def body(stopping: asyncio.Event) -> None:
        run = Run(plan, say)
        try:
            reports.append(await run.run(stopping))
        finally:
            run.close()

    run_process(body)
    (report,) = reports
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    say(describe(report))
    sys.exit(1 if report.breaches else 0)


if __name__ == "__main__":
    main()
