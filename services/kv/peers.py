"""The ranks at the other end of hand-offs: of each place only the newest incarnation is a peer."""
import logging
import time
from collections.abc import Callable

from proto.baton.v1 import common_pb2
from services.kv.messages import PeerRank
from services.kv.transport import IDLE_S, Transport
from services.runtime.errors import HandoffError

_log = logging.getLogger(__name__)


class Peers:
    """Peers of one rank by place, at whatever transport it has now. One thread calls."""

    def __init__(self, transport: Callable[[], Transport], clock: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._clock = clock
        self._places: dict[tuple[str, int], tuple[str, float]] = {}  # (address, rank) -> its incarnation, as last heard, and when

    def __len__(self) -> int:
        return len(self._places)

    def meet(self, rank: PeerRank) -> None:
        """Make `rank` a peer; an older incarnation of it gets nothing new. Raises HandoffError when it cannot be used.

        Routers hear of incarnations at different times: one that is named late closes no younger one, and is not refused either, since the
        ids' order is that of a clock.
        """
        transport, place, now = self._transport(), (rank.address, rank.rank), self._clock()
        before, _ = self._places.get(place, ("", 0.0))
        if before != rank.instance_id or not transport.has_peer(rank.instance_id):
            named = transport.add_peer(rank.peer)
            if named != rank.instance_id:
                message = f"the peer is instance {rank.instance_id} but its metadata belongs to {named}; register that rank again"
                raise HandoffError(common_pb2.PEER_GONE, message)
            if before > named:
                return
            if before and before != named:
                _log.info("peer %s at %s rank %d replaces %s", named, *place, before)
                transport.close_peer(before)
            self._forget_unmet(now - IDLE_S)
        self._places[place] = rank.instance_id, now

    def _forget_unmet(self, oldest: float) -> None:
        """Places come and go with their fronts' ports: what was not met for as long as its peer is kept is nobody's place any more."""
        for place in [place for place, (_, met_at) in self._places.items() if met_at < oldest]:
            del self._places[place]
