"""Who is a rank's peer when routers name its incarnations in whatever order they heard of them."""

import pytest

from services.kv.layout import KvLayout
from services.kv.local_transport import LocalFabric
from services.kv.messages import PeerRank
from services.kv.peers import Peers
from services.kv.rank_kv import RankKv, open_rank_kv
from services.kv.transport import new_instance_id
from tests.kv.rig import LAYOUT, Clock, compatible


def rank(fabric: LocalFabric, clock: Clock, layout: KvLayout = LAYOUT) -> RankKv:
    return open_rank_kv(layout=layout, num_pages=2, transport="local", compatibility=compatible(), fabric=fabric, clock=clock)


def named(kv: RankKv) -> PeerRank:
    return PeerRank(kv.instance_id, "decode:1", 0, kv.transport.metadata())


def test_instance_ids_sort_by_age() -> None:
    ids = [new_instance_id() for _ in range(1000)]
    assert ids == sorted(ids) and len(set(ids)) == 1000


@pytest.mark.parametrize("order", ["old new", "old new old", "old new old new", "new old", "old new new old"])
def test_a_router_that_names_a_former_incarnation_closes_no_newer_one(order: str) -> None:
    """Two routers hear of a renewal at different times. The newer incarnation stays open; the older one, named before it, is closed."""
    clock, fabric = Clock(), LocalFabric()
    mine = rank(fabric, clock)
    ranks = {"old": named(rank(fabric, clock)), "new": named(rank(fabric, clock))}
    peers = Peers(lambda: mine.transport, clock)
    for name in order.split():
        peers.meet(ranks[name])
    assert mine.transport.has_peer(ranks["new"].instance_id)
    if order == "old new":
        assert not mine.transport.has_peer(ranks["old"].instance_id)
    assert len(peers) == 1
