"""Pools of a running cluster grow and shrink by whole nodes: what that takes, and doing it.

New nodes first, and only when every router knows them the youngest of the other pool or role leave: no pool is ever without a rank
that takes work. A node that leaves drains: its running requests move to the others.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from services.runtime.errors import ConfigError, SetupError
from services.runtime.local_cluster import ROLES, Cluster, Node

Tell = Callable[[str], None]


class Plan(NamedTuple):
    """What has to come, as ranks of each new node, and who has to leave, the youngest first."""

    grow: dict[str, list[int]]  # by role
    shrink: list[str]  # names of nodes


def parse_targets(words: Sequence[str]) -> dict[str, int]:
    """Ranks wanted a role, from words such as "prefill=3". Raises ConfigError."""
    wanted: dict[str, int] = {}
    for word in words:
        role, equals, number = word.partition("=")
        if not equals or role not in ROLES:
            raise ConfigError(f"{word!r} names no pool; write prefill=N or decode=N, N ranks")
        if not number.isascii() or not number.isdigit() or int(number) < 1:
            raise ConfigError(f"{role} is {number!r} but it must be a whole number of ranks, at least 1; Ctrl-C at `up` ends a cluster")
        if role in wanted:
            raise ConfigError(f"{role} is given twice; once is enough")
        wanted[role] = int(number)
    if not wanted:
        raise ConfigError("no pool is named; write prefill=N or decode=N, N ranks, or both")
    return wanted


def plan_of(nodes: Mapping[str, Node], wanted: Mapping[str, int], ranks_per_node: int) -> Plan:
    """How to get from `nodes` (the oldest first) to `wanted` ranks a role. Raises ConfigError when whole nodes cannot give that."""
    plan = Plan({}, [])
    for role, target in wanted.items():
        own = [(name, node.ranks) for name, node in nodes.items() if node.role == role]
        ranks = sum(number for _, number in own)
        while ranks > target:
            name, number = own.pop()
            plan.shrink.append(name)
            ranks -= number
        if missing := target - ranks:
            if missing % ranks_per_node or any(name in plan.shrink for name in nodes if nodes[name].role == role):
                sizes = f"nodes of {role} have {', '.join(str(node.ranks) for node in nodes.values() if node.role == role) or 'no'} ranks"
                raise ConfigError(f"{role}={target} cannot be had with whole nodes: {sizes}, new ones have {ranks_per_node}")
            plan.grow[role] = [ranks_per_node] * (missing // ranks_per_node)
    return plan


class Scaler:
    """Brings one running cluster to what is wanted, one wish at a time."""

    def __init__(self, cluster: Cluster, ranks_per_node: int) -> None:
        self._cluster = cluster
        self._ranks_per_node = ranks_per_node
        self._under_way = ""

    async def scale(self, words: Sequence[str], tell: Tell) -> None:
        """Start and drain nodes until `words`, such as prefill=3, hold, telling of each step. Raises SetupError."""
        wanted = parse_targets(words)
        if self._under_way:
            raise SetupError(f"the cluster is being scaled to {self._under_way}; try again when that is done")
        plan = plan_of(self._cluster.nodes, wanted, self._ranks_per_node)
        self._under_way = " ".join(words)

        def say(text: str) -> None:
            tell(text)
            self._cluster.report(text)

        try:
            for role, ranks in plan.grow.items():
                tell(f"starting {_count(len(ranks), 'node')} of {role}")  # the cluster names each by itself
                await self._cluster.grow(role, ranks)
                say(f"{role} has {_count(self._cluster.num_ranks(role), 'rank')}, and every router knows them")
            if plan.shrink:
                say(f"draining {', '.join(plan.shrink)}: what runs there moves")
                killed = await self._cluster.shrink(plan.shrink)
                for name in plan.shrink:
                    late = f"{name} had not drained after {self._cluster.drain_s + 10:g} s and was killed"
                    say(late if name in killed else f"{name} has left")
            say("; ".join(f"{role} has {_count(self._cluster.num_ranks(role), 'rank')}" for role in ROLES))
        finally:
            self._under_way = ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
