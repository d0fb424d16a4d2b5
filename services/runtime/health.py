"""What a front says about its ranks in gRPC health: a name a rank beside the server as a whole.

    ""  and "baton.v1.Decode"      SERVING while any rank serves and the front does not drain: readiness
    "baton.v1.Decode/0"            SERVING while rank 0 serves, draining or not: between its engine's end, or its silence, and the next
                                   engine's Up, which comes after a forward of its own, it does not
"""
import asyncio
from collections.abc import Collection, Sequence

from services.runtime.serve import Server


class HealthBoard:
    """Shows the latest state, one update after another; `run` until cancelled."""

    def __init__(self, server: Server, services: Sequence[str], num_ranks: int) -> None:
        self._server, self._services = server, services
        self._num_ranks = num_ranks
        self._up: frozenset[int] = frozenset()
        self._draining = False
        self._changed = asyncio.Event()
        self._changed.set()

    def show(self, up: Collection[int]) -> None:
        """These ranks serve, the others do not."""
        self._up = frozenset(up)
        self._changed.set()

    def drain(self) -> None:
        """The front takes no new work from now on."""
        self._draining = True
        self._changed.set()

    async def run(self) -> None:
        """Tell the gRPC server of every change."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._server.set_serving(bool(self._up) and not self._draining)
            for rank in range(self._num_ranks):
                for service in self._services:
                    await self._server.set_health(f"{service}/{rank}", rank in self._up)
