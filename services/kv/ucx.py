"""NIXL agents over UCX: UCX's environment, and which of its transports carries page reads, as UCX itself says in its log.

    agent = start_agent(instance_id, kv_network)
    ucx().describe()               "cma/memory" | "tcp/lo" | ...; before the first read, or where the user logs UCX, what UCX_TLS says

What the user sets in the environment always wins, but for devices outside kv_network: that is an error.
"""
import ctypes
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import nixl_cu13 as nixl
from nixl_cu13._bindings import nixlBackendError  # pyright: ignore[reportMissingModuleSource]

from services.kv.network import net_devices
from services.runtime.errors import ConfigError

# Over TCP a read is emulated by messages of this size: 0.5 GB/s with UCX's 8 KiB, 4.7 GB/s with 1 MiB (tests/bench/bench_handover.py).
_TUNED = {"UCX_TCP_TX_SEG_SIZE": "1m", "UCX_TCP_RX_SEG_SIZE": "1m"}
_ROW = re.compile(r"\|\s*\d\S*\.\.\S+\s*\|[^|]*\|\s*([^|]*?)\s*\|")  # | range | description | transport |


class Ucx:
    """UCX of this process; its log goes to an anonymous file unless the user's environment sends it elsewhere."""

    def __init__(self) -> None:
        self._log: int | None = None
        self._variables = dict(_TUNED)
        if not {"UCX_PROTO_INFO", "UCX_LOG_FILE"} & os.environ.keys():
            self._log = os.memfd_create("ucx_log")
            # Named by process: a child that inherits the name writes here, never into a file of its own.
            self._variables |= {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": f"/proc/{os.getpid()}/fd/{self._log}"}

    @contextmanager
    def environment(self, devices: str = "") -> Generator[None, None, None]:
        """Our settings, for as long as UCX reads them; children do not inherit them. `devices`: UCX_NET_DEVICES, "" = UCX chooses."""
        wanted = self._variables | ({"UCX_NET_DEVICES": devices} if devices else {})
        added = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]

    def describe(self) -> str:
        """Transport of the last endpoint whose remote reads were set up."""
        carriers = self._carriers()
        return carriers[-1] if carriers else f"not observed (UCX_TLS={os.environ.get('UCX_TLS', 'all')})"

    def _carriers(self) -> list[str]:
        if self._log is None:
            return []
        ctypes.CDLL(None).fflush(None)  # UCX writes through stdio
        lines = os.pread(self._log, os.fstat(self._log).st_size, 0).decode(errors="replace").splitlines()
        found: list[str] = []
        for title, line in enumerate(lines):
            if "remote memory read" in line:
                rows = [_ROW.search(row) for row in lines[title + 1 : title + 10]]
                found += [row.group(1) for row in rows if row][-1:]
        return found


@cache
def ucx() -> Ucx:
    """The process's one: UCX opens its log once a process."""
    return Ucx()


def start_agent(instance_id: str, kv_network: str = "") -> Any:
    """A NIXL agent with UCX, over the devices of `kv_network`. Raises ConfigError when UCX cannot start as it and the environment want.

    The network is looked up for every agent: when a renewed one opens, devices may have come, gone or got another address.
    """
    devices = net_devices(kv_network) if kv_network else ""
    # No progress thread: NIXL's spins on a core, and the hand-off thread, which polls notifications every millisecond, moves the same
    # work on (two idle ranks: 0.03 cores instead of 0.5 to 1.6). STRICT: engine and hand-off thread both call.
    config = nixl.nixl_agent_config(
        enable_prog_thread=False, backends=["UCX"], sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    )
    try:
        with ucx().environment(devices):
            return nixl.nixl_agent(instance_id, config)
    except nixlBackendError as error:
        tls = os.environ.get("UCX_TLS", "its default")
        advice = "on a machine with GPUs UCX_TLS must name cuda_copy too" if "UCX_TLS" in os.environ else "NIXL's own lines say why"
        raise ConfigError(f"NIXL could not start UCX with UCX_TLS={tls} ({error}); {advice}") from None
