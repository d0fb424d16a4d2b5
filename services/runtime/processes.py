"""The processes of a cluster on this machine: each keeps the command that starts it, and where it says that it listens."""

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import psutil

_POLL_S = 0.05


class Processes:
    """Starts, ends and starts again. Each gets `--address-file` and `--metrics-file` in a private folder, which goes with close()."""

    def __init__(self, log_dir: Path | None) -> None:
        """`log_dir`: where each process's stderr goes, to `<name>.log` (None = to ours)."""
        self.newest: dict[str, subprocess.Popen[bytes]] = {}  # name -> its last incarnation
        self._commands: dict[str, list[str]] = {}
        self._log_dir = log_dir
        self._private = tempfile.TemporaryDirectory(prefix="baton-")

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start `command`, which takes the arguments that every process of Baton has."""
        files = ["--address-file", str(self._file(name, "address")), "--metrics-file", str(self._file(name, "metrics"))]
        self._commands[name] = [*command, *files, "--die-with-parent", str(os.getpid())]
        self.restart(name)

    def restart(self, name: str) -> None:
        """Start a process that has ended once more, with the same command."""
        self._remove_files(name)
        with contextlib.ExitStack() as files:
            log = files.enter_context((self._log_dir / f"{name}.log").open("ab")) if self._log_dir is not None else None
            # A session of its own, so that Ctrl-C in the terminal reaches this process alone and the drain has an order. A Popen is
            # there as soon as its process is: no cancellation loses it.
            self.newest[name] = subprocess.Popen(
                self._commands[name], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True,
            )

    def pin(self, name: str, setting: str) -> None:
        """Have the process start with `--set setting`, over all others, from its next start on."""
        self._commands[name] += ["--set", setting]

    def forget(self, name: str) -> None:
        """A process that has ended and will not come back."""
        self._remove_files(name)
        del self.newest[name], self._commands[name]

    def _file(self, name: str, kind: str) -> Path:
        return Path(self._private.name) / f"{name}.{kind}"

    def _remove_files(self, name: str) -> None:
        for file in Path(self._private.name).glob(f"{name}.*"):
            file.unlink(missing_ok=True)

    def ended(self) -> list[str]:
        """Names of those that run no more."""
        return [name for name, process in self.newest.items() if process.poll() is not None]

    def address(self, name: str) -> str:
        """host:port where it serves gRPC, "" while it has not said so."""
        return read_address(self._file(name, "address"))

    def metrics_addresses(self, name: str) -> dict[str, str]:
        """host:port of /metrics of the process and of its engines, by name: "decode-2", "decode-2/0"; only those that have said so."""
        found: dict[str, str] = {}
        for file in sorted(Path(self._private.name).glob(f"{name}.metrics*")):
            rank = file.name.removeprefix(f"{name}.metrics").lstrip(".")
            if (not rank or rank.isdigit()) and (address := read_address(file)):
                found[f"{name}/{rank}" if rank else name] = address
        return found

    def engine_pids(self, name: str) -> list[int]:
        """Process ids of the engines of front `name`, by rank."""
        children = psutil.Process(self.newest[name].pid).children()
        ranks = {int(line[line.index("--rank") + 1]): child.pid for child in children if "--rank" in (line := child.cmdline())}
        return [ranks[index] for index in sorted(ranks)]

    async def end(self, names: Collection[str], patience_s: float) -> list[str]:
        """SIGTERM, then SIGKILL for those that are still there after `patience_s`; returns the names of these."""
        processes = {name: self.newest[name] for name in names if self.newest[name].poll() is None}
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + patience_s
        while any(process.poll() is None for process in processes.values()) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        late = [name for name, process in processes.items() if process.poll() is None]
        for name in late:
            os.killpg(processes[name].pid, signal.SIGKILL)  # its engines follow it
            processes[name].wait()
        return late

    def close(self) -> None:
        self._private.cleanup()


def read_address(path: Path) -> str:
    """What the file holds, "" when there is none."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
