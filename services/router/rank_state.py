"""One rank as the router knows it: what its front said, what was sent there since, and how loaded it is believed to be."""

from collections.abc import Callable

import grpc.aio

from proto.baton.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc, registry_pb2
from services.router.policy import STICKY_TOKENS, CoolDown, PrefillSpeed
from services.router.session import Session
from services.router.validate import Limits


class RankState:
    """One engine incarnation: what its front said, what was sent there since."""

    def __init__(
        self, rank: common_pb2.Rank, member: registry_pb2.Member, channel: grpc.aio.Channel, slot: int, on_room: Callable[[], None]
    ) -> None:
        """`slot`: its place in what the prefix index tells of all ranks; `on_room` runs whenever something is over there."""
        self.rank = rank
        self.front_id = member.front_id
        self.fingerprint = member.fingerprint
        self.limits = Limits(member.limits.max_model_len, member.limits.vocab_size)
        self.max_running = member.limits.max_running or 2**31
        self.max_tokens = max((member.limits.num_pages - 1) * member.limits.page_size, 0) or 2**31  # one request's, in an empty pool
        self.group = f"{member.front_id}/{rank.rank // max(member.ep, 1)}"
        self.model = self.fingerprint, self.limits  # what two ranks must have in common to be paired
        self.channel = channel
        self.prefill = prefill_pb2_grpc.PrefillStub(channel) if rank.role == "prefill" else None
        self.session: Session | None = None  # decode only
        self.is_leaving = False
        self.is_away = False  # its front's stream broke; it may dial again
        self.cool_down = CoolDown()
        self.slot = slot
        # What the policies look at for every request: plain numbers, worked out when something changes and not when they are read.
        # Prefill: uncached tokens not yet computed; decode: tokens of running and claimed requests.
        self.num_tokens = 0
        self.num_requests = 0  # decode: running and claimed
        self.num_routers = 1  # that it has joined
        self.sticky_tokens = STICKY_TOKENS  # prefill
        self._speed = PrefillSpeed()
        self._on_room = on_room
        self._load = registry_pb2.Load()
        self._num_own_tokens = 0  # in flight there from this router
        self._num_own_requests = 0
        self._num_tokens_since = 0  # sent since the last report, less what has ended since
        self._num_requests_since = 0

    @property
    def instance_id(self) -> str:
        return self.rank.instance_id

    @property
    def name(self) -> str:
        return f"{self.rank.pool_address}/{self.rank.rank}"

    @property
    def is_usable(self) -> bool:
        """Whether new requests may be sent there."""
        return not (self.is_leaving or self.is_away) and (self.session is None or self.session.is_usable)

    def report(self, load: registry_pb2.Load) -> None:
        """A load report came: it includes what was sent before it."""
        self._load = load
        self.num_routers = max(load.num_routers, 1)
        self._num_tokens_since = self._num_requests_since = 0
        self._count()

    def begin(self, num_tokens: int) -> None:
        """A request of `num_tokens` goes there."""
        self._num_own_tokens += num_tokens
        self._num_own_requests += 1
        self._num_tokens_since += num_tokens
        self._num_requests_since += 1
        self._count()

    def end(self, num_tokens: int) -> None:
        """It is over there."""
        self._num_own_tokens -= num_tokens
        self._num_own_requests -= 1
        # A rank that is as loaded as when it last said so says nothing: what came and went in between must not count for ever.
        self._num_tokens_since -= num_tokens
        self._num_requests_since -= 1
        self._count()
        self._on_room()

    def prefilled(self, reply: prefill_pb2.PrefillReply, num_prompt_tokens: int, wait_s: float) -> None:
        """A prompt was computed there; for its prefix others may wait `wait_s` from now on."""
        self._speed.computed(num_prompt_tokens - reply.num_cached_tokens, reply.compute_us * 1e-6)
        self.sticky_tokens = self._speed.sticky_tokens(wait_s)

    def _count(self) -> None:
        """A report may be stale: our own count corrects it."""
        load = self._load
        reported = load.num_queued_tokens if self.rank.role == "prefill" else load.num_running_tokens
        self.num_tokens = max(self._num_own_tokens, reported + self._num_tokens_since)
        self.num_requests = max(self._num_own_requests, load.num_running + load.num_claims + self._num_requests_since)

    @property
    def num_own_requests(self) -> int:
        """From this router, as num_requests counts."""
        return self._num_own_requests

    @property
    def num_own_tokens(self) -> int:
        """From this router, as num_tokens counts."""
        return self._num_own_tokens

    def renew(self, rank: common_pb2.Rank) -> None:
        """The engine goes on under the new instance id of `rank`: what runs there stays."""
        self.rank = rank
        if self.session is not None:
            self.session.renew(rank)

    async def close(self) -> None:
        """Tell everybody who waits for it: its session breaks, its calls are cancelled."""
        if self.session is not None:
            await self.session.close()
        await self.channel.close()
