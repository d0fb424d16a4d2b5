"""Which UCX transport carries page reads, as UCX itself says: it logs the protocol of every new endpoint when UCX_PROTO_INFO is set.

    report = ucx_report()          before the first NIXL agent of the process is made
    report.settled()               after it was made: the environment is as it was
    report.describe()              "cma/memory" | "tcp/lo" | ... ; before the first read, or where the user logs UCX, what UCX_TLS says
"""
import ctypes
import os
import re
from functools import cache

_VARIABLES = {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": ""}
_ROW = re.compile(r"\|\s*\d\S*\.\.\S+\s*\|[^|]*\|\s*([^|]*?)\s*\|")


class UcxReport:
    """UCX's log in an anonymous file; empty when the user's environment sends it elsewhere."""

    def __init__(self) -> None:
        self._log: int | None = None
        self._mine: list[str] = []
        if not _VARIABLES.keys() & os.environ.keys():
            self._log = os.memfd_create("ucx_log")
            # Named by process, so that a child that inherits it writes here and never into a file of its own.
            values = _VARIABLES | {"UCX_LOG_FILE": f"/proc/{os.getpid()}/fd/{self._log}"}
            self._mine = list(values)
            os.environ.update(values)

    def settled(self) -> None:
        """UCX has read its environment: take our variables out again."""
        for name in self._mine:
            os.environ.pop(name, None)
        self._mine = []

    def describe(self) -> str:
        """Transport of the last endpoint whose remote reads were set up."""
        carried = self._carriers()
        if carried:
            return carried[-1]
        return f"not observed (UCX_TLS={os.environ.get('UCX_TLS', 'all')})"

    def problems(self) -> list[str]:
        """Lines of UCX's log that are no protocol table: warnings and errors."""
        return [line for line in self._lines() if "]  " in line and not re.search(r"\]\s+[|+]", line)]

    def _lines(self) -> list[str]:
        if self._log is None:
            return []
        ctypes.CDLL(None).fflush(None)  # UCX writes through stdio
        return os.pread(self._log, os.fstat(self._log).st_size, 0).decode(errors="replace").splitlines()

    def _carriers(self) -> list[str]:
        found: list[str] = []
        lines = self._lines()
        for title, following in enumerate(lines):
            if "remote memory read" in following:
                rows = (_ROW.search(line) for line in lines[title + 1 : title + 10])
                found += [row.group(1) for row in rows if row][-1:]
        return found


@cache
def ucx_report() -> UcxReport:
    """The process's report: UCX has one log a process, opened once."""
    return UcxReport()
