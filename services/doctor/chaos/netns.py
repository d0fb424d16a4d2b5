"""A network namespace for each front, joined by one bridge: cutting a node off is taking its link down.

Every name begins with `bc<pid>`, so that what a killed run left behind is found, and removed, by the next one.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from services.runtime.errors import SetupError

_NAME = re.compile(r"\bbc(\d+)(?:b|n\d+)\b")
_SUBNETS = range(16, 256)


@dataclass(frozen=True)
class Host:
    """One namespace and its address on the bridge."""

    namespace: str
    link: str  # the bridge's end of its only cable
    ip: str

    @property
    def prefix(self) -> list[str]:
        """Words before a command that run it here, in the same process."""
        return ["ip", "netns", "exec", self.namespace]

    def cut(self) -> None:
        """Nothing passes any more, in either direction; nobody is told."""
        _run("ip", "link", "set", self.link, "down")

    def mend(self) -> None:
        """The cable is back."""
        _run("ip", "link", "set", self.link, "up")


class Network:
    """The bridge, with this machine at `ip`, and its hosts."""

    def __init__(self) -> None:
        """Raises SetupError when namespaces cannot be had here."""
        remove_stale()
        self._name = f"bc{os.getpid()}"
        self._subnet = _free_subnet()
        self._hosts: list[Host] = []
        self.ip = f"{self._subnet}.1"
        try:
            _run("ip", "link", "add", f"{self._name}b", "type", "bridge")
            _run("ip", "address", "add", f"{self.ip}/24", "dev", f"{self._name}b")
            _run("ip", "link", "set", f"{self._name}b", "up")
            _let_pass(f"{self._name}b")
        except SetupError:
            self.close()
            raise

    def add_host(self) -> Host:
        """One more namespace, with interfaces `lo` and `eth0`. Raises SetupError."""
        index = len(self._hosts)
        host = Host(f"{self._name}n{index}", f"{self._name}v{index}", f"{self._subnet}.{index + 2}")
        self._hosts.append(host)
        _run("ip", "netns", "add", host.namespace)
        _run("ip", "link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        _run("ip", "link", "set", host.link, "master", f"{self._name}b", "up")
        for words in (["address", "add", f"{host.ip}/24", "dev", "eth0"], ["link", "set", "lo", "up"], ["link", "set", "eth0", "up"]):
            _run("ip", "-n", host.namespace, *words)
        return host

    def close(self) -> None:
        """Remove everything; what still runs in a namespace is killed."""
        _remove([f"{self._name}b", *(host.namespace for host in self._hosts)])


def why_unavailable() -> str:
    """One sentence about why namespaces cannot be had, "" when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the `ip` command (iproute2)"
    name = f"bc{os.getpid()}n0"
    try:
        _run("ip", "netns", "add", name)
    except SetupError as error:
        return f"this machine gives no network namespaces ({error})"
    finally:
        _remove([name])
    return ""


def remove_stale() -> None:
    """Remove what runs that no longer live have left, the processes in their namespaces too."""
    listed = [*_lines("ip", "netns", "list"), *_lines("ip", "-o", "link", "show", "type", "bridge")]
    found = [(match.group(0), int(match.group(1))) for line in listed for match in [_NAME.search(line)] if match]
    _remove([name for name, pid in found if not _is_chaos(pid)])


def _is_chaos(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("python" in word or "pytest" in word for word in psutil.Process(pid).cmdline()[:2])
    return False


def _remove(names: Sequence[str]) -> None:
    for name in names:
        if name.endswith("b"):
            subprocess.run(["ip", "link", "delete", name], capture_output=True)
            if shutil.which("iptables") is not None:
                subprocess.run(_forward_rule("-D", name), capture_output=True)
            continue
        for pid in _lines("ip", "netns", "pids", name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _let_pass(bridge: str) -> None:
    """Let the bridge's hosts reach each other where a Docker engine runs: it has bridges filtered, and drops what it does not know."""
    if shutil.which("iptables") is not None:
        _run(*_forward_rule("-I", bridge))


def _forward_rule(action: str, bridge: str) -> list[str]:
    return ["iptables", "-w", action, "FORWARD", "-i", bridge, "-o", bridge, "-j", "ACCEPT"]


def _free_subnet() -> str:
    """First three numbers of a private /24 that no interface and no route of this machine uses."""
    taken = "\n".join(_lines("ip", "-4", "route", "show", "table", "all"))
    start = os.getpid()
    for offset in range(len(_SUBNETS)):
        subnet = f"10.213.{_SUBNETS[(start + offset) % len(_SUBNETS)]}"
        if f"{subnet}." not in taken:
            return subnet
    raise SetupError("all of 10.213.0.0/16 is in use; end other chaos runs on this machine first")


def _lines(*command: str) -> Iterator[str]:
    done = subprocess.run(command, capture_output=True, text=True)
    yield from done.stdout.splitlines()


def _run(*command: str) -> None:
    """Raises SetupError with the command's own words."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SetupError(f"{' '.join(command)} failed: {done.stderr.strip()}; run as root on a machine that allows it")
