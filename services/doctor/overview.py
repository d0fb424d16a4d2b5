"""Prints what `python -m services.doctor` alone shows: the machine, then op x backend."""

import sys

from rich.console import Console
from rich.table import Table

from services.doctor.backends import choices, kind_here
from services.doctor.environment import environment


def show_overview() -> None:
    """Print what is here, then op x backend."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    found = Table("what", "found", box=None, title="This machine", title_justify="left")
    for what, finding in environment():
        found.add_row(what, finding)
    console.print(found)
    device, dtype = kind_here()
    table = Table("op", "runs", "better ones, and why not", "by name only", box=None, title_justify="left")
    table.title = f"Op x backend, for {str(dtype).removeprefix('torch.')} on {device}"
    for choice in choices(device, dtype):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.passed_over.items())
        table.add_row(choice.op, choice.backend, reasons or "none", ", ".join(choice.others))
    console.print(table)
    console.print("On a GPU, fp8_gemm and mla_decode choose between their libraries and triton by the size of each call.")
