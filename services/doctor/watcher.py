"""A registry that fronts join like any router and that only listens: which ranks serve, and whether everything came back.

Conservation is read from it: when nothing runs, every rank's pages are free or cached and nothing is claimed, queued or leased.
"""

from collections.abc import AsyncIterator
from typing import Any

from proto.baton.v1 import common_pb2, registry_pb2, registry_pb2_grpc
from services.runtime.serve import WIRE_VERSION


class Watcher(registry_pb2_grpc.RegistryServicer):
    """Keeps each rank's last load and its pool's size for as long as the rank is listed."""

    def __init__(self) -> None:
        self.num_pages: dict[str, int] = {}
        self.ranks: dict[str, common_pb2.Rank] = {}
        self.loads: dict[str, registry_pb2.Load] = {}
        self._leaving: set[str] = set()  # instance ids
        self._streams: dict[str, object] = {}  # instance id -> the membership that listed it last

    async def Join(
        self, request_iterator: AsyncIterator[registry_pb2.MemberUpdate], context: Any
    ) -> AsyncIterator[registry_pb2.RegistryUpdate]:
        yield registry_pb2.RegistryUpdate(welcome=registry_pb2.Welcome(router_id="watcher", wire_version=WIRE_VERSION))
        stream, listed = object(), set[str]()
        try:
            async for update in request_iterator:
                if update.HasField("member"):
                    listed = self._list(update.member, stream, listed)
                elif update.HasField("leaving"):
                    self._leaving |= listed
                elif update.HasField("load"):
                    self.loads[update.load.instance_id] = update.load
        finally:
            self._forget(stream, listed)

    def _list(self, member: registry_pb2.Member, stream: object, listed: set[str]) -> set[str]:
        ranks = {rank.instance_id: rank for rank in member.ranks}
        self._forget(stream, listed - ranks.keys())
        self.ranks |= ranks
        self.num_pages |= dict.fromkeys(ranks, member.limits.num_pages)
        self._streams |= dict.fromkeys(ranks, stream)
        return set(ranks)

    def _forget(self, stream: object, instance_ids: set[str]) -> None:
        """A front that was cut off may have joined again before its old stream is known to be over."""
        for instance_id in instance_ids:
            if self._streams.get(instance_id) is stream:
                self._leaving.discard(instance_id)
                for table in (self.ranks, self.num_pages, self.loads, self._streams):
                    table.pop(instance_id, None)

    def serving(self, role: str) -> dict[str, common_pb2.Rank]:
        """Ranks of `role` that take work, by pool address and rank: "host:port/0"."""
        return {f"{rank.pool_address}/{rank.rank}": rank for instance_id, rank in self.ranks.items()
                if rank.role == role and instance_id not in self._leaving}

    def untidy(self) -> dict[str, str]:
        """Ranks that hold more than they should when nothing runs."""
        found: dict[str, str] = {}
        for instance_id in self.ranks:
            load, pages = self.loads.get(instance_id), self.num_pages[instance_id]
            if load is None:
                found[instance_id] = "has reported no load yet"
                continue
            held = (pages - load.num_free_pages, load.num_claims, load.num_running, load.num_queued_tokens, load.num_leased_pages)
            if any(held):
                found[instance_id] = f"{self.ranks[instance_id].role}: {load} of {pages} pages".replace("\n", " ")
        return found
