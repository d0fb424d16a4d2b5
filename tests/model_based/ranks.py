"""The ranks of a world: the product's own engines without process, network or thread."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.decode.fetch import Fetcher
from services.decode.loop import DecodeLoop
from services.decode.messages import Cancel, MoveCommand, MoveStart, RequestEvent, SessionLost, Submit
from services.decode.request import Request
from services.kv.event_log import KvEventLog
from services.kv.exchange import Exchange, HandoffEvent
from services.kv.lease import LeaseEnded
from services.kv.local_transport import LocalTransport
from services.kv.messages import PeerRank
from services.kv.pages import Holder, HolderKind
from services.kv.rank_kv import FenceRule, RankKv
from services.prefill.engine import PrefillEngine
from services.prefill.first_token import FirstTokenSampler
from services.prefill.messages import Command, Event
from services.runtime.config import PrefillSection
from services.runtime.engine import StepClock
from services.runtime.ipc import RankLoad
from tests.model_based.scripted import EOS, PAGE, SAME, ScriptedDecode, ScriptedPrefill, borrow_memory, give_memory_back

if TYPE_CHECKING:
    from tests.model_based.world import World

MAX_MODEL_LEN = 64
FENCE_RULES = FenceRule(share=0.1), FenceRule(share=0.9)  # at the first late read, or after a minute


class WatchedKv(RankKv):
    """A rank's KV whose lease tables, the one after a fence too, are watched."""

    def __init__(self, world: "World", name: str, num_pages: int) -> None:
        self._world = world
        memory = borrow_memory(num_pages)

        def open_transport(_: str) -> LocalTransport:  # ids that sort and repeat, unlike random ones
            return LocalTransport(world.new_instance(name), memory, SAME, world.fabric)

        self.told = KvEventLog(0)
        super().__init__(memory, open_transport, SAME, world.clock, FENCE_RULES[world.num_incarnations % 2], self.told)

    def _new_exchange(self, ended: list[HandoffEvent] | None = None) -> Exchange:
        exchange = super()._new_exchange(ended)
        self._world.watch_leases(exchange.leases, self)
        return exchange


class Rank:
    """One incarnation of a rank: its KV, its page checks."""

    def __init__(self, world: "World", name: str, num_pages: int) -> None:
        self.world, self.name, self.is_dead = world, name, False
        self.kv = WatchedKv(world, name, num_pages)
        self.memory = self.kv.memory
        insert, match = self.kv.pool.insert, self.kv.pool.match

        def checked_insert(digests: Sequence[bytes], pages: Sequence[int], token_ids: Sequence[int]) -> list[bytes]:
            world.check_cached(self, digests, pages, "enters the prefix cache")
            return insert(digests, pages, token_ids)

        def checked_match(digests: Sequence[bytes], holder: Holder) -> list[int]:
            pages = match(digests, holder)
            world.check_cached(self, digests[: len(pages)], pages, "is a hit of the prefix cache")
            return pages

        self.kv.pool.insert, self.kv.pool.match = checked_insert, checked_match  # type: ignore[method-assign]

    @property
    def id(self) -> str:
        return self.kv.instance_id

    def peer(self) -> PeerRank:
        """As the router names it."""
        return PeerRank(self.id, self.name, 0, self.kv.transport.metadata())

    def stored(self, page: int) -> list[float]:
        """Values of a page, one a token."""
        return self.memory.pages.numpy()[page, 0, :, 0].tolist()

    def written(self, page: int) -> None:
        """A page that is written to has one holder, a request."""
        holders = self.kv.pool.pages.holders_of(page)
        if [holder.kind for holder in holders] != [HolderKind.REQUEST]:
            self.world.violations.append(f"{self.id} writes page {page}, which is held by {sorted(map(str, holders))}")

    def dispose(self) -> None:
        give_memory_back(self.memory)


class Channel:
    """Commands put in by the world, events in their order."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.events: list[Event] = []

    def receive(self, timeout_s: float) -> list[Command]:
        commands, self.commands = self.commands, []
        return commands

    def send(self, event: Event) -> None:
        if not isinstance(event, RankLoad):
            self.events.append(event)


class HolderRank(Rank):
    """A prefill rank."""

    def __init__(self, world: "World", name: str, num_pages: int) -> None:
        super().__init__(world, name, num_pages)
        self.channel = Channel()
        self.forward = ScriptedPrefill(self.written)
        self.engine = PrefillEngine(
            kv=self.kv, forward=self.forward, sampler=FirstTokenSampler((EOS,), MAX_MODEL_LEN),
            section=PrefillSection(chunk_tokens=PAGE + 1, max_running=2, max_queued=8), channel=self.channel, step_clock=StepClock(),
            clock=world.clock,
        )

    def turn(self, *, tick_during: bool = False) -> None:
        """One turn of the main loop; the hand-off thread may tick amid the forward."""
        self.forward.during = self.hear if tick_during else None
        assert self.engine.turn()
        self.forward.during = None

    def hear(self) -> None:
        """One turn of the hand-off thread."""
        self.world.deliver_to(self)
        self.engine.handoffs.tick()

    def take_events(self) -> list[Event]:
        events, self.channel.events = self.channel.events, []
        return events


class ReaderRank(Rank):
    """A decode rank."""

    def __init__(self, world: "World", name: str, num_pages: int) -> None:
        super().__init__(world, name, num_pages)
        self.commands: list[Submit | Cancel | SessionLost | MoveCommand] = []
        self.events: list[RequestEvent] = []
        self.fetcher = Fetcher(
            self.kv, max_claims=8, max_model_len=MAX_MODEL_LEN, emit=self.events.append, deliver=self._deliver, clock=world.clock
        )
        self.forward = ScriptedDecode(self.written, self._seen)
        self.loop = DecodeLoop(
            self.forward, self.kv, max_running=2, eos_token_ids=(EOS,), emit=self.events.append,
            clock=StepClock(), num_claims=lambda: self.fetcher.num_claims, now=world.clock,
        )

    def _deliver(self, item: Request | LeaseEnded) -> None:
        if isinstance(item, Request):
            self.world.check_ready(self, item)
        self.loop.inbox.put(item)

    def _seen(self, page_table: list[int], stored: list[float]) -> None:
        request = next(request for request in self.loop.scheduler.requests if request.pages is page_table)
        if stored != request.token_ids[: len(stored)]:
            self.world.violations.append(f"{self.id} computes a token of {request.key} from {stored}, not from {request.token_ids}")

    def hear(self) -> None:
        """One turn of the hand-off thread, in the order of decode/engine.py."""
        commands, self.commands = self.commands, []
        for command in commands:
            if isinstance(command, Submit):
                self.fetcher.submit(command)
            elif isinstance(command, Cancel):
                if not self.fetcher.cancel(command):
                    self.loop.inbox.put(command)
            elif isinstance(command, MoveStart):
                if self.fetcher.meet_reader(command):
                    self.loop.inbox.put(command)
            else:
                if isinstance(command, SessionLost):
                    self.fetcher.session_lost(command)
                self.loop.inbox.put(command)
        self.world.deliver_to(self)
        self.fetcher.tick()
        if former := self.kv.renew_if_due():
            self.world.renewed(self, former)

    def step(self, *, tick_during: bool = False) -> None:
        """One turn of the main loop; the hand-off thread may tick amid the forward."""
        self.forward.during = self.hear if tick_during else None
        assert self.loop.take_waiting()
        self.loop.step()
        self.forward.during = None

    def take_events(self) -> list[RequestEvent]:
        events = list(self.events)
        self.events.clear()
        return events
