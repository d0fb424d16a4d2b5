"""A node's front: gRPC server, supervisor of its ranks, member of the routers' registries. Outlives its engines.

What a pool adds is its `PoolService`: the gRPC servicer that turns calls into commands and events into replies.
"""

import asyncio
import ipaddress
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from proto.baton.v1 import common_pb2, registry_pb2
from services.runtime.config import Config, PoolSection, argument_parser, load_config
from services.runtime.health import HealthBoard
from services.runtime.ipc import RankLoad, Up
from services.runtime.membership import Membership
from services.runtime.metrics import loop_metrics
from services.runtime.process import die_with_parent, run_process, say, write_whole
from services.runtime.security import Security
from services.runtime.serve import WIRE_VERSION, Server, first_of
from services.runtime.supervisor import RankProcess, Supervisor
from services.runtime.telemetry import setup_logging

logger = logging.getLogger(__name__)


class PoolService(Protocol):
    """What a pool's server.py implements. All methods run in the event loop."""

    def register(self, server: Server) -> None:
        """Add the gRPC servicer."""
        ...

    def attach(self, ranks: Sequence[RankProcess]) -> None:
        """The ranks, once, before anything else; `rank.up` and `rank.send()` are the way to them."""
        ...

    def on_event(self, rank: RankProcess, event: Any) -> None:
        """An event of the pool's own kinds from `rank`."""
        ...

    def on_renewed(self, rank: RankProcess, former_instance_id: str) -> None:
        """The engine lives on under `rank.up.instance_id`; its hand-offs are void and ended by events of their own."""
        ...

    def on_down(self, rank: RankProcess, instance_id: str) -> None:
        """The engine incarnation is gone: fail everything that it had."""
        ...

    def drain(self) -> None:
        """Refuse new work from now on; what runs goes on."""
        ...

    def num_active(self) -> int:
        """Requests not yet over; a drain waits until it is 0."""
        ...


class Front:
    """Runs one pool front until told to stop, then drains."""

    def __init__(self, *, role: str, module: str, services: Sequence[str], event_type: Any, config: Config,
                 section: PoolSection, arguments: Sequence[str], pool: PoolService, address_file: Path | None = None) -> None:
        """`address_file`: where to say at which address it listens."""
        self._role, self._config, self._section, self._pool = role, config, section, pool
        self._front_id = uuid.uuid4().hex
        self._security = Security.of(config.security)
        self._server = Server(section.address, services, self._security)
        self._loads: dict[str, RankLoad] = {}
        self._instances: dict[int, str] = {}  # rank -> incarnation that is up
        self._supervisor = Supervisor(num_ranks=section.ranks, module=module, arguments=arguments, event_type=event_type,
                                      on_event=self._on_event, on_down=self._on_down)
        self._membership = Membership(section.routers, self._member, self._load_reports, self._on_joined, self._security)
        self._joined: list[str] = []  # routers that have let us in and nobody was told of yet
        self._health = HealthBoard(self._server, services, section.ranks)
        self._draining = False
        self._address_file = address_file
        pool.register(self._server)
        pool.attach(self._supervisor.ranks)

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping`, then drain. Raises SetupError when the port or a rank cannot be had."""
        await self._server.start()
        if self._address_file is not None:
            write_whole(self._address_file, self._server.address)
        try:
            await first_of(self._supervisor.run(), self._membership.run(), self._health.run(), self._drain_when(stopping))
        finally:
            await self._server.stop(0.5)

    def why_not_ready(self) -> str:
        """Readiness, as gRPC health has it: "" while any rank is up and nothing drains; any thread may ask."""
        if self._draining:
            return "the front drains"
        return "" if self._instances else "no rank is up"

    async def _drain_when(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._draining = True
        self._pool.drain()
        self._health.drain()
        self._membership.leave()
        if self._pool.num_active():
            say(f"draining: what runs gets {self._section.drain_s:g} s at most; a second Ctrl-C ends it at once")
        deadline = time.monotonic() + self._section.drain_s
        while self._pool.num_active() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await self._supervisor.stop()

    def _on_event(self, rank: RankProcess, event: Any) -> None:
        if isinstance(event, Up):
            self._instances[rank.rank] = event.instance_id
            if event.former_instance_id:
                logger.warning("rank %d (instance %s) is instance %s now", rank.rank, event.former_instance_id, event.instance_id)
                if (load := self._loads.pop(event.former_instance_id, None)) is not None:
                    self._loads[event.instance_id] = load
                self._pool.on_renewed(rank, event.former_instance_id)
            self._rank_changed()
        elif isinstance(event, RankLoad):
            if rank.up is not None:
                self._loads[rank.up.instance_id] = event
                self._membership.loads_changed()
        else:
            self._pool.on_event(rank, event)

    def _on_down(self, rank: RankProcess) -> None:
        instance_id = self._instances.pop(rank.rank, None)
        if instance_id is not None:
            level = logging.INFO if self._draining else logging.ERROR
            how = "answers no more" if rank.exit_code is None else f"is down, exit code {rank.exit_code}"
            logger.log(level, "rank %d (instance %s) %s", rank.rank, instance_id, how)
            self._loads.pop(instance_id, None)
            self._pool.on_down(rank, instance_id)
            self._rank_changed()

    def _on_joined(self, router: str) -> None:
        self._joined.append(router)
        self._tell_joined()

    def _tell_joined(self) -> None:
        """Whoever started this front by hand learns that it serves: every rank is up, and a router knows of them."""
        if len(self._instances) == self._section.ranks:
            address = self._server.address
            ranks = "1 rank" if self._section.ranks == 1 else f"{self._section.ranks} ranks"
            for router in self._joined:
                say(f"{self._role} front at {address}: {ranks} up, joined {router}")
            self._joined.clear()

    def _rank_changed(self) -> None:
        self._membership.member_changed()
        self._tell_joined()
        self._health.show(self._instances)

    def _member(self, local_host: str) -> registry_pb2.Member:
        ups = [(rank, rank.up) for rank in self._supervisor.ranks if rank.up is not None]
        member = registry_pb2.Member(
            front_id=self._front_id, role=self._role, address=self._advertised(local_host), wire_version=WIRE_VERSION,
            model=os.path.basename(os.path.normpath(self._config.model.path)), tp=1, ep=1,
        )
        for rank, up in ups:
            member.fingerprint = up.fingerprint
            member.limits.CopyFrom(registry_pb2.Limits(
                max_model_len=up.max_model_len, vocab_size=up.vocab_size, page_size=up.page_size,
                num_pages=up.num_pages, max_running=up.max_running,
            ))
            member.ranks.append(common_pb2.Rank(
                instance_id=up.instance_id, role=self._role, pool_address=member.address, rank=rank.rank, peer=up.peer,
                former_instance_id=up.former_instance_id,
            ))
            if up.kv_events_port:
                host = member.address.rpartition(":")[0]
                member.kv_events.append(registry_pb2.KvEventSource(
                    instance_id=up.instance_id, endpoint=f"tcp://{host}:{up.kv_events_port}",
                    replay_endpoint=f"tcp://{host}:{up.kv_replay_port}",
                ))
        return member

    def _advertised(self, local_host: str) -> str:
        """Where a router reaches us. One that listens everywhere is reached where the router is dialled from: no wildcard is an address."""
        host, _, port = self._server.address.rpartition(":")
        return f"{self._section.advertise or (local_host if _is_wildcard(host) else host)}:{port}"

    def _load_reports(self) -> list[registry_pb2.Load]:
        return [
            registry_pb2.Load(
                instance_id=instance_id, num_free_pages=load.num_free_pages, num_claims=load.num_claims, num_running=load.num_running,
                num_queued_tokens=load.num_queued_tokens, num_leased_pages=load.num_leased_pages, step_us=load.step_us,
                num_running_tokens=load.num_running_tokens, num_routers=self._membership.num_joined,
            )
            for instance_id, load in self._loads.items()
        ]


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:  # a name
        return False


def run_front(
    role: Literal["prefill", "decode"], *, service: str, event_type: Any, pool: Callable[[Config], PoolService]
) -> None:
    """A front's whole process: its arguments, `pool` built from the file, serving until a signal, the drain."""
    arguments = argument_parser(f"One node's {role} front: gRPC server and supervisor of its ranks").parse_args()
    die_with_parent(signal.SIGTERM, arguments.die_with_parent)

    async def body(stopping: asyncio.Event) -> None:
        config = load_config(arguments.config, arguments.set)
        setup_logging(role, config.log.level)
        section = config.prefill if role == "prefill" else config.decode
        front = Front(
            role=role, module=f"services.{role}.engine", services=[service], event_type=event_type, config=config,
            section=section, arguments=sys.argv[1:], pool=pool(config), address_file=arguments.address_file,
        )
        async with loop_metrics(section.metrics, arguments.metrics_file, front.why_not_ready):
            await front.run(stopping)

    run_process(body)
