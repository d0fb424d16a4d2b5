"""The ranks at the other end of hand-offs: of each place only the newest incarnation is a peer."""
import logging

from proto.baton.v1 import common_pb2
from services.kv.messages import PeerRank
from services.kv.transport import Transport
from services.runtime.errors import HandoffError

_log = logging.getLogger(__name__)


class Peers:
    """Peers of one rank's transport, by place. One thread calls."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._instances: dict[tuple[str, int], str] = {}  # (address, rank) -> its incarnation, as last heard

    def meet(self, rank: PeerRank) -> None:
        """Make `rank` a peer; an older incarnation of it gets nothing new. Raises HandoffError when it cannot be used."""
        place = rank.address, rank.rank
        before = self._instances.get(place)
        if before == rank.instance_id and self._transport.has_peer(rank.instance_id):
            return
        named = self._transport.add_peer(rank.peer)
        if named != rank.instance_id:
            message = f"the peer is instance {rank.instance_id} but its metadata belongs to {named}; register that rank again"
            raise HandoffError(common_pb2.PEER_GONE, message)
        if before is not None and before != named:
            _log.info("peer %s at %s rank %d replaces %s", named, *place, before)
            self._transport.close_peer(before)
        self._instances[place] = named
