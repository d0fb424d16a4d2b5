"""The kinds of fault and their variants, as a table."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.doctor.chaos.stage import Node
from services.runtime.config import FaultRates

if TYPE_CHECKING:
    from services.doctor.chaos.actions import Actions

KINDS = ("sigkill", "sigstop", "partition", "restart", "slow reader", "router death", "drain", "page pressure")
_LOSSY = FaultRates(drop=0.2, duplicate=0.3, delay=0.3, reorder=0.3, delay_s=0.2)
_FAILING = FaultRates(fail_post=0.2, fail_read=0.3)
_STALLED = FaultRates(stall=0.7, stall_s=2.0)
_LATE = FaultRates(late=0.5, stall_s=9.0)  # beyond the read deadline: it lands in quarantine


@dataclass
class Fired:
    """One fault that struck; monotonic seconds. `released`: when it ended itself (SIGCONT, started again); `back`: all serves again.
    `hit`: whether it struck at the moment that it was armed for, None = it was not armed."""

    kind: str
    variant: str
    target: str
    at: float
    released: float = 0.0
    back: float = 0.0
    hit: bool | None = None
    breach: str = ""


@dataclass(frozen=True)
class Variant:
    """`role` of the victim, "" = the variant finds its own."""

    name: str
    role: str
    act: Callable[[Node, Fired], Awaitable[None]]


def variants(actions: "Actions") -> dict[str, Sequence[Variant]]:
    """Of each kind; the first ones are such that a run of three minutes sees every path."""
    return _of_processes(actions) | _of_links(actions) | _of_nodes(actions)


def _of_processes(actions: "Actions") -> dict[str, Sequence[Variant]]:
    kill, stop = actions.kill, actions.stop
    return {
        "sigkill": (
            Variant("decode engine while it fetches", "decode", kill("engine", "fetching")),
            Variant("prefill engine at the last announcement", "prefill", kill("engine", "announced_last")),
            Variant("decode engine while it verifies", "decode", kill("engine", "verifying")),
            Variant("decode front while it fetches", "decode", kill("front", "fetching")),
            Variant("prefill engine", "prefill", kill("engine")),
            Variant("prefill front at the last announcement", "prefill", kill("front", "announced_last")),
        ),
        "sigstop": (
            Variant("prefill node at the last announcement, long", "prefill", stop("node", long=True, moment="announced_last")),
            Variant("decode engine, short", "decode", stop("engine", long=False)),
            Variant("decode node while it fetches, long", "decode", stop("node", long=True, moment="fetching")),
            Variant("prefill engine at the last announcement, short", "prefill", stop("engine", long=False, moment="announced_last")),
            Variant("decode front, long", "decode", stop("front", long=True)),
            Variant("prefill engine, long", "prefill", stop("engine", long=True)),
            Variant("decode engine while it verifies, long", "decode", stop("engine", long=True, moment="verifying")),
            Variant("prefill front, long", "prefill", stop("front", long=True)),
        ),
    }


def _of_links(actions: "Actions") -> dict[str, Sequence[Variant]]:
    cut, proxy = actions.cut, actions.proxy
    return {
        "partition": (
            Variant("prefill node at the last announcement, long", "prefill", cut(long=True, moment="announced_last")),
            Variant("decode node, short", "decode", cut(long=False)),
            Variant("decode node while it fetches, long", "decode", cut(long=True, moment="fetching")),
            Variant("prefill node at the last announcement, short", "prefill", cut(long=False, moment="announced_last")),
        ),
        "slow reader": (
            Variant("clients that read slowly", "", actions.read_slowly),
            Variant("reads late, past their deadline", "decode", proxy(_LATE)),
            Variant("reads stalled", "decode", proxy(_STALLED)),
            Variant("reads that fail", "decode", proxy(_FAILING)),
            Variant("notifications of prefill lost, doubled, late", "prefill", proxy(_LOSSY)),
            Variant("notifications of decode lost, doubled, late", "decode", proxy(_LOSSY)),
        ),
    }


def _of_nodes(actions: "Actions") -> dict[str, Sequence[Variant]]:
    restart, drain, router = actions.restart, actions.drain, actions.kill_router
    return {
        "restart": (
            Variant("decode front killed while it fetches", "decode", restart(moment="fetching")),
            Variant("prefill front ended by a second signal", "prefill", restart(moment="")),
            Variant("prefill front killed at the last announcement", "prefill", restart(moment="announced_last")),
            Variant("decode front ended by a second signal", "decode", restart(moment="")),
        ),
        "router death": (Variant("first", "", router(0)), Variant("second", "", router(1))),
        "drain": (
            Variant("decode", "decode", drain("")),
            Variant("prefill", "prefill", drain("")),
            Variant("decode, its engine killed at a move's pause", "decode", drain("source")),
            Variant("decode", "decode", drain("")),
            Variant("decode, a target killed at a move's pause", "decode", drain("target")),
        ),
        "page pressure": (Variant("long requests", "", actions.press),),
    }
