"""A holder and readers in one process over the local transport, with a clock that the test moves."""

import itertools

from services.kv.layout import Compatibility, KvLayout, compatibility
from services.kv.local_transport import LocalFabric
from services.kv.messages import HandoffState, Message, RequestKey, decode
from services.kv.pages import Holder, HolderKind
from services.kv.rank_kv import RankKv, open_rank_kv

LAYOUT = KvLayout(num_layers=2, kv_lora_rank=6, rope_dim=2, dtype="float32")
STATE = HandoffState(first_token=42, num_prompt_tokens=300)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def compatible(**changes: object) -> Compatibility:
    return compatibility({"num_hidden_layers": 2, **changes}, "revision", LAYOUT, sampler_version=1)


class Pair:
    """One fabric, a holder of `num_pages`, a reader of `num_pages`; every rank added knows every other."""

    def __init__(self, num_pages: int = 8) -> None:
        self.clock = Clock()
        self.fabric = LocalFabric()
        self.ranks: list[RankKv] = []
        self._num_pages = num_pages
        self._numbers = itertools.count()
        self.holder = self.rank()
        self.reader = self.rank()

    def rank(self) -> RankKv:
        new = open_rank_kv(
            layout=LAYOUT, num_pages=self._num_pages, transport="local", compatibility=compatible(), fabric=self.fabric, clock=self.clock
        )
        for other in self.ranks:
            new.transport.add_peer(other.transport.metadata())
            other.transport.add_peer(new.transport.metadata())
        self.ranks.append(new)
        return new

    def key(self, attempt: int = 0) -> RequestKey:
        return RequestKey(f"request{next(self._numbers)}", 0, attempt)

    def compute(self, key: RequestKey, num_pages: int, *, at: RankKv | None = None) -> list[int]:
        """Take and fill a holder's pages under an open lease; nothing is announced yet."""
        kv = at or self.holder
        pages = kv.pool.take(num_pages, request(key))
        for index, page in enumerate(pages):
            kv.memory.page_bytes_view()[page] = byte_of(key, index)
        kv.leases.open(key, [self.reader.instance_id])
        return pages

    def announce(self, key: RequestKey, pages: list[int], chunks: int = 2) -> None:
        """Announce all of `pages`, in so many announcements, the last with the state."""
        named = list(enumerate(pages))
        size = -(-len(named) // chunks)
        for chunk in range(chunks):
            part = named[chunk * size : (chunk + 1) * size]
            self.holder.leases.announce(key, part, STATE if chunk == chunks - 1 else None)

    def claim(self, key: RequestKey, num_pages: int, holder: RankKv | None = None) -> list[int]:
        """Claim and take destinations for every page at once."""
        self.reader.pulls.claim(key, (holder or self.holder).instance_id)
        return self.begin(key, num_pages)

    def begin(self, key: RequestKey, num_pages: int) -> list[int]:
        pages = self.reader.pool.take(num_pages, request(key))
        self.reader.pulls.begin(key, dict(enumerate(pages)))
        return pages

    def tick(self, rounds: int = 3) -> list:
        """Everybody's turn, a few times; engines' own holders are dropped as their engines would. Returns what ended."""
        ended = []
        for _ in range(rounds):
            for kv in self.ranks:
                for event in kv.exchange.tick():
                    if getattr(event, "handoff", None) is None:
                        kv.pool.release(request(event.key))
                    ended.append(event)
                kv.check_integrity()
        return ended

    def pass_time(self, seconds: float, step: float = 1.0) -> list:
        """Let time pass in steps, with everybody awake."""
        ended = []
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now = min(until, self.clock.now + step)
            ended += self.tick(1)
        return ended

    def arrived(self, key: RequestKey, pages: list[int]) -> bool:
        view = self.reader.memory.page_bytes_view()
        return all((view[page] == byte_of(key, index)).all() for index, page in enumerate(pages))

    def assert_all_free(self) -> None:
        """Conservation: nothing held anywhere, no table holds an entry."""
        for kv in self.ranks:
            kv.check_integrity()
            assert kv.pool.num_available == self._num_pages, f"{kv.instance_id} keeps pages"
            assert len(kv.leases) == len(kv.pulls) == kv.pulls.num_reads == 0


def request(key: RequestKey) -> Holder:
    return Holder(HolderKind.REQUEST, key)


def byte_of(key: RequestKey, index: int) -> int:
    return (int(key.request_id.removeprefix("request")) * 37 + index * 11 + 1) % 251


class Lossy:
    """A hook for LocalFabric.on_notify: `verdict(message)` -> how many copies arrive; -1 = kept until `deliver_kept`."""

    def __init__(self, fabric: LocalFabric, verdict) -> None:
        self._fabric = fabric
        self._verdict = verdict
        self._kept: list[tuple[str, str, bytes]] = []
        self.seen: list[Message] = []
        fabric.on_notify = self

    def __call__(self, sender: str, receiver: str, payload: bytes) -> list[bytes]:
        message = decode(payload)
        self.seen.append(message)
        copies = self._verdict(message)
        if copies < 0:
            self._kept.append((sender, receiver, payload))
        return [payload] * max(copies, 0)

    def deliver_kept(self, order: list[int]) -> None:
        for index in order:
            self._fabric.deliver(*self._kept[index])
        self._kept = []
