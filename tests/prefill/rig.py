"""A prefill engine in one process: local transport, scripted forward, a clock that moves by hand, and a reader to hand over to."""

from collections.abc import Callable, Sequence

import torch

from proto.baton.v1 import common_pb2
from services.kv.layout import PAGE_SIZE, KvLayout, compatibility
from services.kv.local_transport import LocalFabric
from services.kv.messages import Announce, PeerRank, RequestKey, decode
from services.kv.pages import Holder, HolderKind
from services.kv.puller import PullEnded
from services.kv.rank_kv import RankKv, open_rank_kv
from services.model.params import SamplingParams
from services.prefill.engine import PrefillEngine
from services.prefill.first_token import FirstTokenSampler
from services.prefill.forward import PrefillChunk
from services.prefill.messages import Cancel, Command, Event, Redirect, Run
from services.runtime.config import PrefillSection
from services.runtime.engine import StepClock
from services.runtime.ipc import RankLoad

VOCAB = 32
EOS = 1
MAX_MODEL_LEN = 2048
LAYOUT = KvLayout(num_layers=2, kv_lora_rank=3, rope_dim=1, dtype="float32")


def open_kv(fabric: LocalFabric, clock: Callable[[], float], *, num_pages: int, revision: str = "r") -> RankKv:
    mine = compatibility({}, revision, LAYOUT, sampler_version=1)
    return open_rank_kv(layout=LAYOUT, num_pages=num_pages, transport="local", compatibility=mine, fabric=fabric, clock=clock)


def next_token(last: int, num_tokens: int) -> int:
    """What the scripted model says after `num_tokens` tokens that end in `last`; never EOS."""
    return 2 + (last + num_tokens) % (VOCAB - 2)


class ScriptedForward:
    """Writes each token's id into its slot, checks that the prefix is there, and wants `next_token`."""

    def __init__(self) -> None:
        self.batches: list[list[PrefillChunk]] = []
        self.during: Callable[[], None] = lambda: None
        self.tokens: dict[int, list[float]] = {}  # length of a prompt -> its logits, instead of the rule

    def run(self, pages: torch.Tensor, batch: Sequence[PrefillChunk]) -> torch.Tensor:
        self.batches.append([PrefillChunk(list(c.token_ids), c.start, list(c.page_table), c.want_logits) for c in batch])
        self.during()
        for chunk in batch:
            for position, token in zip(chunk.positions, chunk.token_ids, strict=True):
                pages[chunk.page_table[position // PAGE_SIZE], :, position % PAGE_SIZE] = token + 1
            assert (self.entries(pages, chunk.page_table, chunk.positions.stop) > 0).all(), "a position before the chunk was never written"
        rows = [self._logits(chunk) for chunk in batch if chunk.want_logits]
        return torch.tensor(rows, dtype=torch.float32).view(-1, VOCAB)

    @staticmethod
    def entries(pages: torch.Tensor, page_table: Sequence[int], num_tokens: int) -> torch.Tensor:
        """Token ids + 1 that the pages hold for positions 0 .. num_tokens - 1."""
        return pages[list(page_table), 0, :, 0].flatten()[:num_tokens]

    def _logits(self, chunk: PrefillChunk) -> list[float]:
        length = chunk.positions.stop
        return self.tokens.get(length, [9.0 if token == next_token(chunk.token_ids[-1], length) else 0.0 for token in range(VOCAB)])


class FakeChannel:
    """Commands put in by the test, events in the order they were sent (load reports apart)."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.events: list[Event] = []
        self.loads: list[RankLoad] = []

    def receive(self, timeout_s: float) -> list[Command]:
        commands, self.commands = self.commands, []
        return commands

    def send(self, event: Event) -> None:
        (self.loads if isinstance(event, RankLoad) else self.events).append(event)


class Rig:
    """One engine and one reader; nothing runs by itself."""

    def __init__(self, *, num_pages: int = 16, **section: int) -> None:
        self.now = 100.0
        self.fabric = LocalFabric()
        self.sent: list[bytes] = []  # payloads that the engine's rank sent, before faults
        self.kv = open_kv(self.fabric, self.clock, num_pages=num_pages)
        self.reader_kv = open_kv(self.fabric, self.clock, num_pages=num_pages)
        self.reader_kv.transport.add_peer(self.kv.transport.metadata())
        self.more_readers: list[RankKv] = []
        self.fabric.on_notify = self._notify
        self.forward, self.channel = ScriptedForward(), FakeChannel()
        self.engine = PrefillEngine(
            kv=self.kv, forward=self.forward, sampler=FirstTokenSampler((EOS,), MAX_MODEL_LEN), section=PrefillSection(**section),
            channel=self.channel, step_clock=StepClock(), clock=self.clock,
        )

    def clock(self) -> float:
        return self.now

    def _notify(self, sender: str, receiver: str, payload: bytes) -> list[bytes]:
        if sender == self.kv.instance_id:
            self.sent.append(payload)
        return [payload]

    def add_reader(self) -> RankKv:
        """A further decode rank."""
        kv = open_kv(self.fabric, self.clock, num_pages=self.kv.pool.num_pages)
        kv.transport.add_peer(self.kv.transport.metadata())
        self.more_readers.append(kv)
        return kv

    def reader(self, kv: RankKv | None = None) -> PeerRank:
        kv = kv or self.reader_kv
        rank = self.more_readers.index(kv) + 1 if kv in self.more_readers else 0
        return PeerRank(instance_id=kv.instance_id, address="decode:1", rank=rank, peer=kv.transport.metadata())

    def run(
        self, *, num_tokens: int, name: str = "r", read: bool = True, first: int = 2, num_output: int = 0,
        n: int = 1, first_choice: int = 0, attempt: int = 0, readers: Sequence[RankKv] = (), **params: object,
    ) -> RequestKey:
        """Send a Run of `num_tokens` ids that differ by `first`; what params say goes over greedy defaults.

        Choices are read by `readers`, by the rig's reader when there are none, by nobody when `read` is false.
        """
        sampling: dict[str, object] = {"max_tokens": 8, "seed": 7, "temperature": 0.0}
        key = RequestKey(name, first_choice, attempt)
        self.channel.commands.append(
            Run(
                key=key, instance_id=self.kv.instance_id, n=n, token_ids=[(first + i) % VOCAB for i in range(num_tokens)],
                num_output_tokens=num_output, salt=b"", params=SamplingParams(**(sampling | params)),  # pyright: ignore[reportArgumentType]
                readers=[self.reader(kv) for kv in readers or [self.reader_kv] * n] if read else [],
            )
        )
        return key

    def redirect(self, key: RequestKey, reader: RankKv) -> None:
        """Send a Redirect; `key` has the new attempt."""
        self.channel.commands.append(Redirect(key=key, instance_id=self.kv.instance_id, reader=self.reader(reader)))

    def cancel(self, key: RequestKey) -> None:
        """Send a Cancel."""
        self.channel.commands.append(Cancel(key, common_pb2.CANCELLED, "no longer wanted"))

    def turn(self, times: int = 1) -> None:
        """Main loop and hand-off thread by turns; the pool is proved after each."""
        for _ in range(times):
            self.engine.handoffs.tick()
            assert self.engine.turn()
            self.kv.check_integrity()

    def events(self) -> list[Event]:
        """Events since the last call."""
        events, self.channel.events = self.channel.events, []
        return events

    def announcements(self) -> list[Announce]:
        return [message for message in map(decode, self.sent) if isinstance(message, Announce)]

    def claim(self, key: RequestKey, num_tokens: int, kv: RankKv | None = None) -> list[int]:
        """A reader claims and takes pages for a hand-off, as a decode rank does; its pages in the request's order."""
        kv = kv or self.reader_kv
        with kv.lock:
            pages = kv.pool.take(-(-num_tokens // PAGE_SIZE), Holder(HolderKind.REQUEST, key))
            kv.pulls.claim(key, self.kv.instance_id)
            kv.pulls.begin(key, dict(enumerate(pages)))
        return pages

    def pull(self, kv: RankKv | None = None) -> PullEnded:
        """Run both sides until the reader's only claim ends; time moves, so that it renews and hears what it missed."""
        for _ in range(20):
            self.now += 3.0
            self.turn()
            for ended in (kv or self.reader_kv).exchange.tick():
                assert isinstance(ended, PullEnded)
                return ended
        raise AssertionError("the pull did not end within 20 turns")

    def assert_conserved(self) -> None:
        """Everything that the pool owns is free or cached, and no table knows a request."""
        assert self.kv.pool.num_available == self.kv.pool.num_pages
        assert self.kv.pool.pages.num_holds(HolderKind.REQUEST) == self.kv.pool.pages.num_holds(HolderKind.LEASE) == 0
        assert len(self.kv.leases) == self.engine.scheduler.num_queued == self.engine.scheduler.num_computing == 0
        assert self.engine.num_requests == self.engine.num_leased == 0
