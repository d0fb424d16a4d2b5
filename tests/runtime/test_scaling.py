"""What scaling takes, and that it is done in an order that leaves no pool without ranks."""

import asyncio
from collections.abc import Sequence

import pytest

from services.runtime.errors import ConfigError, SetupError
from services.runtime.local_cluster import Node
from services.runtime.scaling import Plan, Scaler, parse_targets, plan_of

NODES = {"prefill": Node("prefill", 1), "decode": Node("decode", 1), "decode-2": Node("decode", 1), "decode-3": Node("decode", 1)}


@pytest.mark.parametrize(("words", "complaint"), [
    (["prefil=1"], "'prefil=1' names no pool"), (["prefill"], "names no pool"), (["decode=0"], "at least 1"), (["decode=-1"], "at least 1"),
    (["decode=two"], "'two'"), (["decode=²"], "whole number"), (["decode=1", "decode=2"], "twice"), ([], "no pool"),
])
def test_nonsense_is_refused_in_a_sentence(words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_targets(words)


def test_the_youngest_leave_and_new_nodes_are_of_the_usual_size() -> None:
    assert plan_of(NODES, {"decode": 1}, 1) == Plan({}, ["decode-3", "decode-2"])
    assert plan_of(NODES, {"decode": 2, "prefill": 3}, 1) == Plan({"prefill": [1, 1]}, ["decode-3"])
    assert plan_of(NODES, {"decode": 3}, 1) == Plan({}, [])
    big = {"prefill": Node("prefill", 2), "prefill-2": Node("prefill", 2)}
    assert plan_of(big, {"prefill": 8}, 2) == Plan({"prefill": [2, 2]}, [])
    assert plan_of(big, {"prefill": 2}, 2) == Plan({}, ["prefill-2"])


@pytest.mark.parametrize("target", [1, 3, 5])
def test_parts_of_a_node_cannot_be_had(target: int) -> None:
    nodes = {"prefill": Node("prefill", 2), "prefill-2": Node("prefill", 2)}
    with pytest.raises(ConfigError, match=f"prefill={target} cannot be had with whole nodes: nodes of prefill have 2, 2 ranks"):
        plan_of(nodes, {"prefill": target}, 2)


class FakeCluster:
    """Notes what is done to it, and by when."""

    drain_s = 60.0

    def __init__(self) -> None:
        self.nodes = dict(NODES)
        self.done: list[str] = []
        self.reports: list[str] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.late: list[str] = []

    def report(self, line: str) -> None:
        self.reports.append(line)

    def num_ranks(self, role: str) -> int:
        return sum(node.ranks for node in self.nodes.values() if node.role == role)

    async def grow(self, role: str, ranks: Sequence[int]) -> None:
        self.done.append(f"grow {role} {list(ranks)}")
        await self.goes_on.wait()
        self.nodes |= {f"{role}-{10 + i}": Node(role, number) for i, number in enumerate(ranks)}

    async def shrink(self, names: Sequence[str]) -> list[str]:
        self.done.append(f"shrink {list(names)}")
        for name in names:
            del self.nodes[name]
        return self.late


async def test_new_nodes_come_before_old_ones_leave_and_all_of_it_is_told() -> None:
    cluster, told = FakeCluster(), list[str]()
    cluster.late = ["decode-2"]
    await Scaler(cluster, 1).scale(["decode=1", "prefill=2"], told.append)  # pyright: ignore[reportArgumentType]
    assert cluster.done == ["grow prefill [1]", "shrink ['decode-3', 'decode-2']"]
    assert "prefill has 2 ranks, and every router knows them" in told and "decode-3 has left" in told
    assert "decode-2 had not drained after 70 s and was killed" in told
    assert told[-1] == cluster.reports[-1] == "prefill has 2 ranks; decode has 1 rank"


async def test_one_wish_at_a_time() -> None:
    cluster, told = FakeCluster(), list[str]()
    scaler = Scaler(cluster, 1)  # pyright: ignore[reportArgumentType]
    cluster.goes_on.clear()
    first = asyncio.ensure_future(scaler.scale(["prefill=2"], told.append))
    await asyncio.sleep(0)
    with pytest.raises(SetupError, match="being scaled to prefill=2; try again when that is done"):
        await scaler.scale(["decode=1"], told.append)
    cluster.goes_on.set()
    await first
    await scaler.scale(["decode=1"], told.append)
    assert told[-1] == "prefill has 2 ranks; decode has 1 rank"
