"""The ranks that the router knows, by fingerprint and instance id, and how loaded it believes them to be.

All of it is rebuilt from what fronts say when they join: a router holds nothing that cannot be lost.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from typing import NamedTuple

from proto.baton.v1 import common_pb2, prefill_pb2, registry_pb2
from services.router.kv_events import KvEvents, Source
from services.router.prefix_index import PrefixIndex
from services.router.rank_state import RankState
from services.router.session import Session
from services.router.validate import Limits
from services.runtime.config import ADDRESS_PATTERN
from services.runtime.errors import ConfigError, InvalidRequest
from services.runtime.security import Security
from services.runtime.serve import WIRE_VERSION
from services.runtime.telemetry import count_incident

logger = logging.getLogger(__name__)

ROLES = ("prefill", "decode")
_USUAL_PAGES = 65536  # of a rank that does not say how many it has
_MAX_PAGES = 1 << 20  # believed of a rank, whatever it says


class Model(NamedTuple):
    """The usable ranks of one fingerprint and limits: only within one of these are ranks paired."""

    key: tuple[str, Limits]
    prefills: list[RankState]
    decodes: list[RankState]


class Pool:
    """All ranks of both roles."""

    def __init__(self, router_id: str, security: Security, prefix_wait_s: float = 1.0) -> None:
        """`prefix_wait_s`: how long a prompt may wait behind others at a rank that holds its prefix."""
        self.router_id = router_id
        self._security = security
        self._prefix_wait_s = prefix_wait_s
        self.index = PrefixIndex()
        self._events = KvEvents(self.index, security)
        self._ranks: dict[str, RankState] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._models: list[Model] | None = None  # as of the last change, once somebody has asked
        self._limits: Limits | None = None
        self.on_room: Callable[[], None] = lambda: None  # runs whenever ranks may take more than before
        self.model = ""

    def join(self, member: registry_pb2.Member) -> None:
        """A front says who it is, or that its ranks changed. Raises InvalidRequest when it cannot be served."""
        _check(member, self._security)
        for rank in member.ranks:
            if rank.instance_id not in self._ranks and rank.former_instance_id in self._ranks:
                self._renew(rank)
        listed = {rank.instance_id for rank in member.ranks}
        places = {(rank.role, rank.pool_address, rank.rank) for rank in member.ranks}
        for state in list(self._ranks.values()):
            place = (state.rank.role, state.rank.pool_address, state.rank.rank)
            if state.instance_id not in listed and (state.front_id == member.front_id or place in places):
                self._drop(state)
        for rank in member.ranks:
            if rank.instance_id not in self._ranks:
                self._add(rank, member)
            elif self._ranks[rank.instance_id].front_id == member.front_id:
                self._ranks[rank.instance_id].is_away = False
        sources = {each.instance_id: each for each in member.kv_events}
        for rank in member.ranks:
            source, max_pages = sources.get(rank.instance_id), _max_pages(member)
            self._events.follow(rank.instance_id, Source(source.endpoint, source.replay_endpoint, max_pages) if source else None)
        self.changed()

    def _renew(self, rank: common_pb2.Rank) -> None:
        """The rank keeps everything but its id; hand-offs under the old one are void."""
        former_id = rank.former_instance_id
        state = self._ranks.pop(former_id)
        state.renew(rank)
        self._ranks[rank.instance_id] = state
        self.index.rename(former_id, rank.instance_id)
        self._events.rename(former_id, rank.instance_id)
        for other in self._ranks.values():
            if other.session is not None:
                other.session.fence(former_id)
        count_incident("rank renewed", common_pb2.FENCED)
        logger.warning("%s rank %s goes on as %s; it was %s", rank.role, state.name, rank.instance_id, former_id)

    def _add(self, rank: common_pb2.Rank, member: registry_pb2.Member) -> None:
        channel = self._security.open_channel(rank.pool_address)
        slot = self.index.add(rank.instance_id, _max_pages(member))
        state = RankState(rank, member, channel, slot, on_room=lambda: self.on_room())
        if rank.role == "decode":
            state.session = Session(state.channel, self.router_id, rank, self.changed)
        self._ranks[rank.instance_id] = state
        self.model = member.model
        logger.info("%s rank %s joined as %s", rank.role, state.name, rank.instance_id)

    def report(self, load: registry_pb2.Load) -> None:
        state = self._ranks.get(load.instance_id)
        if state is None:
            count_incident("load report ignored", common_pb2.STALE_INSTANCE)
        else:
            state.report(load)
            self.on_room()

    def computed(self, state: RankState, reply: prefill_pb2.PrefillReply, num_prompt_tokens: int) -> None:
        """`state` has computed a prompt: that tells how fast it is."""
        state.prefilled(reply, num_prompt_tokens, self._prefix_wait_s)

    def leaving(self, front_id: str) -> None:
        """Nothing new goes there; what runs goes on."""
        for state in self._ranks.values():
            if state.front_id == front_id:
                state.is_leaving = True
        self.changed()

    def away(self, front_id: str) -> None:
        """The front's stream broke: nothing new goes to its ranks until it has dialled again; their sessions and calls tell what lives."""
        for state in self._ranks.values():
            if state.front_id == front_id:
                state.is_away = True
        self.changed()

    def lose(self, front_id: str) -> None:
        """The front is gone, and so are all its ranks."""
        for state in [state for state in self._ranks.values() if state.front_id == front_id]:
            self._drop(state)
        self.changed()

    def _drop(self, state: RankState) -> None:
        del self._ranks[state.instance_id]
        self._events.forget(state.instance_id)
        self.index.drop(state.instance_id)
        task = asyncio.create_task(state.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        logger.info("%s rank %s (%s) is gone", state.rank.role, state.name, state.instance_id)

    def is_member(self, state: RankState, instance_id: str) -> bool:
        """Whether `state` is known as this incarnation, though it may take nothing new. One that came back has another state."""
        return self._ranks.get(instance_id) is state

    def is_draining(self, role: str) -> bool:
        """Whether ranks of `role` are about to leave."""
        return any(state.rank.role == role and state.is_leaving for state in self._ranks.values())

    def usable(self, role: str) -> list[RankState]:
        """Ranks of `role` that take new requests."""
        return [state for state in self._ranks.values() if state.rank.role == role and state.is_usable]

    def models(self) -> list[Model]:
        """Every model that a usable rank serves. Asked for by every request, so worked out once a change; not to be written to."""
        if self._models is None:
            found: dict[tuple[str, Limits], Model] = {}
            for role in ROLES:
                for state in self.usable(role):
                    model = found.setdefault(state.model, Model(state.model, [], []))
                    (model.prefills if role == "prefill" else model.decodes).append(state)
            self._models = list(found.values())
        return self._models

    def pairable(self) -> set[tuple[str, Limits]]:
        """Models that both roles serve."""
        return {model.key for model in self.models() if model.prefills and model.decodes}

    def limits(self, fallback: Limits) -> Limits:
        """What every pair can take, so that any of them can serve and replay a request; `fallback` while there is none."""
        if self._limits is None:
            models = self.pairable()
            states = [state for state in self._ranks.values() if state.model in models]
            if not states:
                return fallback
            lengths = [min(state.limits.max_model_len, state.max_tokens) for state in states]
            self._limits = Limits(min(lengths), min(state.limits.vocab_size for state in states))
        return self._limits

    def changed(self) -> None:
        """Ranks came, went, opened or left: wake everybody who waits for one."""
        self._models = self._limits = None
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_room()

    async def wait_changed(self, timeout_s: float | None = None) -> None:
        """Until ranks come, go, open or leave. Raises TimeoutError."""
        # Not wait_for: on Python 3.11 it swallows a cancellation that comes in the same turn as the change.
        async with asyncio.timeout(timeout_s):
            await self._changed.wait()

    async def close(self) -> None:
        for state in list(self._ranks.values()):
            self._drop(state)
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._events.close()


def _max_pages(member: registry_pb2.Member) -> int:
    """Pages that each rank of `member` can hold."""
    return min(member.limits.num_pages or _USUAL_PAGES, _MAX_PAGES)


def _check(member: registry_pb2.Member, security: Security) -> None:
    """Refuse a front that this router cannot use. Raises InvalidRequest."""
    if member.wire_version != WIRE_VERSION:
        raise InvalidRequest("wire_version", member.wire_version, f"this router speaks {WIRE_VERSION}; run the same release everywhere")
    if member.role not in ROLES:
        raise InvalidRequest("role", member.role, f"it must be one of {', '.join(ROLES)}")
    if not member.front_id:
        raise InvalidRequest("front_id", "", "every front has an id of its own")
    if member.tp > 1:
        raise InvalidRequest("tp", member.tp, "this router pairs ranks of tp 1 only")
    for rank in member.ranks:
        if rank.role != member.role or not rank.instance_id:
            raise InvalidRequest("ranks", f"{rank.role} {rank.instance_id!r}", f"each has an id and the front's role {member.role}")
        if re.fullmatch(ADDRESS_PATTERN, rank.pool_address) is None or int(rank.pool_address.rpartition(":")[2]) == 0:
            raise InvalidRequest("pool_address", rank.pool_address[:80], "it must be host:port, where the router can dial the front")
        try:
            security.check_dial(rank.pool_address)
        except ConfigError as error:
            raise InvalidRequest("pool_address", rank.pool_address, f"this router must not dial it: {error}") from None
