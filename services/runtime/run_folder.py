"""`.run`: how a cluster that is up on this machine is found.

    router          addresses of its routers, comma-separated, the first one first
    metrics.json    who serves /metrics, for Prometheus's file_sd
    control.sock    takes commands (control.py)
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec

from proto.baton.v1 import generation_pb2, generation_pb2_grpc
from services.runtime.errors import SetupError
from services.runtime.process import write_whole
from services.runtime.processes import read_address
from services.runtime.security import Security

RUN_DIR = Path(".run")


class RunFolder:
    """The folder's files as the cluster writes them. One cluster a folder: clients find it by them."""

    def __init__(self, folder: Path, security: Security) -> None:
        """`security`: how the routers of the folder are asked."""
        self.folder = folder
        self._security = security
        self._routers = folder / "router"
        self._metrics = folder / "metrics.json"
        self._said_metrics = b""

    async def refuse_second(self) -> None:
        """Raises SetupError when the cluster that the folder names answers; one that was killed is forgotten."""
        other = read_address(self._routers)
        for address in other.split(","):
            if address and await router_info(address, self._security) is not None:
                who = f"a cluster of this tree is up already: its router answers at {address} ({self._routers})"
                raise SetupError(f"{who}; stop it first")
        self.withdraw(other)

    def check_writable(self) -> None:
        """Raises SetupError now rather than when all is up."""
        trial = self.folder / "trial"
        write_whole(trial, "")
        trial.unlink(missing_ok=True)

    def name_routers(self, addresses: Sequence[str]) -> None:
        """Say that the cluster is up. Raises SetupError."""
        write_whole(self._routers, ",".join(addresses))

    def write_metrics(self, targets: Mapping[str, tuple[str, str]]) -> None:
        """`targets`: name of the process -> its role, host:port of its /metrics. Raises SetupError."""
        entries: list[dict[str, Any]] = [
            {"targets": [address], "labels": {"role": role, "process": name}} for name, (role, address) in targets.items()
        ]
        said = msgspec.json.format(msgspec.json.encode(entries), indent=2)
        if said != self._said_metrics:
            write_whole(self._metrics, said.decode() + "\n")
            self._said_metrics = said

    def withdraw(self, routers: str) -> None:
        """Remove what the folder says if it is `routers` (as in the file) that it names."""
        if routers and read_address(self._routers) == routers:
            with contextlib.suppress(OSError):
                self._metrics.unlink(missing_ok=True)
                self._routers.unlink(missing_ok=True)


async def router_info(address: str, security: Security) -> generation_pb2.GetInfoReply | None:
    """What the router at `address` says of itself, None when none answers there within 2 s."""
    async with security.open_channel(address) as channel:
        stub: Any = generation_pb2_grpc.GenerationStub(channel)
        try:
            return await stub.GetInfo(generation_pb2.GetInfoRequest(), timeout=2.0)
        except (grpc.aio.AioRpcError, ValueError):  # the latter: what a file holds is no address
            return None
