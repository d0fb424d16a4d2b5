"""Who waits at the router and who is admitted next: pure bookkeeping of one queue, tested without clock or network.

Classes come first: a request of priority p waits while one of a lower number can be admitted, except for a small share of the work that
later classes get together, the oldest of them first, so that they never starve. Within a class tenants share by work, each by its weight:
the next is of the tenant that has been given least since somebody waited. A tenant that comes (back) starts where the one that was given
least stands: it has no credit for having been idle. Within a tenant it is first come first served.

Work is charged as expected when a request is admitted and set right when it ends. What was admitted while nobody waited costs nothing,
because nobody lost by it; so all that is remembered of tenants ends with the queue.
"""

import heapq
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_MAX_IDLE = 1024  # tenants of a class remembered while they do not wait: those that were given most
_FIRST_GUESS = 256.0  # output tokens of a choice
_MEAN_WEIGHT = 0.05  # of the newest request in the running means
_RATE_WEIGHT = 0.1  # of the newest admission in the rate
MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0
UNKNOWN_RETRY_S = 1.0  # nobody was admitted from the queue yet


class Room(NamedTuple):
    """What the pools can take now."""

    pair: bool  # a prefill rank and a decode rank that fit together
    prefill: bool  # a prefill rank, for requests whose first token is the last


class Waiter:
    """One request; its place in the queue, later what it was charged."""

    __slots__ = ("flow", "needs_decode", "num_choices", "number", "priority", "tenant", "work")

    def __init__(self, *, tenant: str, priority: int, num_choices: int, work: float, needs_decode: bool) -> None:
        """`work`: tokens, as expected."""
        self.tenant, self.priority, self.num_choices, self.work, self.needs_decode = tenant, priority, num_choices, work, needs_decode
        self.number = 0  # order of arrival
        self.flow: _Flow | None = None  # from its arrival on


class _Flow:
    """One tenant in one class."""

    def __init__(self, weight: float, given: float) -> None:
        self.weight = weight
        self.given = given  # work over weight, since somebody waited
        self.lines: tuple[dict[Waiter, None], dict[Waiter, None]] = ({}, {})  # by needs_decode, in order of arrival

    @property
    def is_empty(self) -> bool:
        return not any(self.lines)

    def newest_first(self) -> Iterator[Waiter]:
        return heapq.merge(*(reversed(line) for line in self.lines), key=lambda waiter: -waiter.number)


class _Class:
    """All tenants of one priority: `flows` of those that wait, `idle` of those that were given something while others wait."""

    def __init__(self) -> None:
        self.flows: dict[str, _Flow] = {}
        self._idle: dict[str, _Flow] = {}
        self._arrivals: tuple[dict[Waiter, None], dict[Waiter, None]] = ({}, {})  # of all tenants, by needs_decode
        # The first waiter of each flow's lines, by needs_decode, with what the flow was given then: entries that are no longer so are
        # passed over when they come up.
        self._heads: tuple[list[tuple[float, int, Waiter]], list[tuple[float, int, Waiter]]] = ([], [])

    @property
    def num_remembered(self) -> int:
        return len(self.flows) + len(self._idle)

    def add(self, waiter: Waiter, weight: float) -> None:
        flow = self.flows.get(waiter.tenant)
        if flow is None:
            least = min((head[0] for needs_decode in (False, True) if (head := self._head(needs_decode)) is not None), default=0.0)
            flow = self._idle.pop(waiter.tenant) if waiter.tenant in self._idle else _Flow(weight, least)
            flow.given = max(flow.given, least)
            self.flows[waiter.tenant] = flow
        waiter.flow = flow
        flow.lines[waiter.needs_decode][waiter] = None
        self._arrivals[waiter.needs_decode][waiter] = None
        if len(flow.lines[waiter.needs_decode]) == 1:
            self.moved(flow)

    def remove(self, waiter: Waiter) -> None:
        flow = self.flows[waiter.tenant]
        del flow.lines[waiter.needs_decode][waiter]
        del self._arrivals[waiter.needs_decode][waiter]
        if flow.is_empty:
            self._idle[waiter.tenant] = self.flows.pop(waiter.tenant)
        else:
            self.moved(flow)
        if not self.flows:
            self._idle.clear()
        elif len(self._idle) > _MAX_IDLE:
            self._idle = dict(heapq.nlargest(_MAX_IDLE // 2, self._idle.items(), key=lambda item: item[1].given))

    def moved(self, flow: _Flow) -> None:
        """`flow`, of those that wait, was given something, or another one is first in a line of it."""
        for line, heads in zip(flow.lines, self._heads, strict=True):
            if line:
                first = next(iter(line))
                heapq.heappush(heads, (flow.given, first.number, first))
            if len(heads) > 4 * len(self.flows) + 64:
                heads[:] = [head for head in heads if self._is_true(head)]
                heapq.heapify(heads)

    def next(self, room: Room) -> Waiter | None:
        """Who is served next if `room` is all there is."""
        heads = [head for needs_decode in _kinds(room) if (head := self._head(needs_decode)) is not None]
        return min(heads)[2] if heads else None

    def oldest(self, room: Room) -> float:
        """Number of the one that has waited longest, of those that `room` would do for."""
        arrivals = [self._arrivals[needs_decode] for needs_decode in _kinds(room)]
        return min((next(iter(line)).number for line in arrivals if line), default=math.inf)

    def _head(self, needs_decode: bool) -> tuple[float, int, Waiter] | None:
        heads = self._heads[needs_decode]
        while heads and not self._is_true(heads[0]):
            heapq.heappop(heads)
        return heads[0] if heads else None

    def _is_true(self, head: tuple[float, int, Waiter]) -> bool:
        given, _, waiter = head
        flow = self.flows.get(waiter.tenant)
        return flow is not None and flow.given == given and next(iter(flow.lines[waiter.needs_decode]), None) is waiter


def _kinds(room: Room) -> list[bool]:
    """Values of needs_decode that `room` will do for."""
    return [needs_decode for needs_decode, is_free in ((False, room.prefill), (True, room.pair)) if is_free]


class FairQueue:
    """The requests that wait. Choices are counted, not requests: one with n choices takes n places."""

    def __init__(self, max_queued: int, weights: Mapping[str, float], background_share: float) -> None:
        """`weights` of tenants, 1 for those without; `background_share` (below 1) of the work goes to later classes."""
        self._max_queued, self._weights = max_queued, weights
        self._owed_a_work = background_share / (1.0 - background_share)
        self._owed = 0.0  # work, to classes that came later than those that were served
        self._classes: dict[int, _Class] = {}  # those with somebody waiting
        self._queued: dict[str, int] = {}  # choices of each tenant that waits
        self._total_weight = 0.0  # of these tenants
        self._next_number = 0
        self.num_queued = 0
        self.num_waiters = 0

    @property
    def num_remembered(self) -> int:
        """Tenants of which anything is known, in each class."""
        return sum(line.num_remembered for line in self._classes.values())

    def offer(self, waiter: Waiter) -> list[Waiter] | None:
        """Take `waiter` in. Returns who had to go for it and is out now; None: it is refused itself and nothing has changed."""
        displaced = self._displaced_by(waiter)
        if displaced is None:
            return None
        for other in displaced:
            self.remove(other)
        waiter.number, self._next_number = self._next_number, self._next_number + 1
        self._classes.setdefault(waiter.priority, _Class()).add(waiter, self._weight(waiter.tenant))
        if waiter.tenant not in self._queued:
            self._total_weight += self._weight(waiter.tenant)
        self._queued[waiter.tenant] = self._queued.get(waiter.tenant, 0) + waiter.num_choices
        self.num_queued += waiter.num_choices
        self.num_waiters += 1
        return displaced

    def remove(self, waiter: Waiter) -> None:
        """`waiter` waits no more, for whatever reason."""
        line = self._classes[waiter.priority]
        line.remove(waiter)
        if not line.flows:
            del self._classes[waiter.priority]
        self._queued[waiter.tenant] -= waiter.num_choices
        if not self._queued[waiter.tenant]:
            del self._queued[waiter.tenant]
            self._total_weight = self._total_weight - self._weight(waiter.tenant) if self._queued else 0.0
        self.num_queued -= waiter.num_choices
        self.num_waiters -= 1

    def next(self, room: Room) -> Waiter | None:
        """Who is to be admitted, None when `room` will do for nobody. Changes nothing: admit() does."""
        lines = [line for _, line in sorted(self._classes.items()) if line.oldest(room) < math.inf]
        chosen = lines[0].next(room) if lines else None
        if len(lines) > 1:
            later = min(lines[1:], key=lambda line: line.oldest(room)).next(room)
            if later is not None and later.work <= self._owed:
                chosen = later
        return chosen

    def admit(self, waiter: Waiter) -> None:
        """`waiter`, of next(), goes to the pools: its tenant is charged."""
        if min(self._classes) < waiter.priority:
            self._owed = max(self._owed - waiter.work, 0.0)
        elif max(self._classes) > waiter.priority:
            self._owed += self._owed_a_work * waiter.work
        else:
            self._owed = 0.0
        assert waiter.flow is not None
        waiter.flow.given += waiter.work / waiter.flow.weight
        self.remove(waiter)

    def settle(self, waiter: Waiter, work: float) -> None:
        """An admitted request is over: it was `work` in truth. Its tenant's next ones come the sooner or later for it."""
        flow, line = waiter.flow, self._classes.get(waiter.priority)
        if flow is not None:
            flow.given += (work - waiter.work) / flow.weight
            if line is not None and line.flows.get(waiter.tenant) is flow:
                line.moved(flow)

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _displaced_by(self, waiter: Waiter) -> list[Waiter] | None:
        """Who must go so that `waiter` can be taken in: the newest of the tenant most above its share of the queue, of its latest
        class first; or requests of later classes of its own tenant. None: it has no right to anybody's place."""
        num_lacking = self.num_queued + waiter.num_choices - self._max_queued
        if num_lacking <= 0:
            return []
        own, mine = self._weight(waiter.tenant), self._queued.get(waiter.tenant, 0) + waiter.num_choices
        place = self._max_queued / (self._total_weight + (0.0 if waiter.tenant in self._queued else own))  # of a weight of 1
        is_below = mine <= max(place * own, 1.0)
        counts, found = dict(self._queued), dict[Waiter, None]()
        while num_lacking > 0:
            tenant = max(counts, key=lambda name: counts[name] / self._weight(name), default=waiter.tenant) if is_below else waiter.tenant
            if tenant != waiter.tenant and counts[tenant] <= max(place * self._weight(tenant), 1.0):
                tenant = waiter.tenant  # nobody else has too much
            victim = self._newest(tenant, found, after=waiter.priority if tenant == waiter.tenant else -1)
            if victim is None:
                return None
            found[victim] = None
            counts[tenant] -= victim.num_choices
            num_lacking -= victim.num_choices
        return list(found)

    def _newest(self, tenant: str, but: Mapping[Waiter, None], after: int) -> Waiter | None:
        """The newest request of `tenant` in its latest class, if that comes after class `after`, none of `but`."""
        for priority in sorted(self._classes, reverse=True):
            flow = self._classes[priority].flows.get(tenant) if priority > after else None
            for waiter in flow.newest_first() if flow is not None else ():
                if waiter not in but:
                    return waiter
        return None


class Expectation:
    """What a request will be, by what recent ones were."""

    def __init__(self) -> None:
        self._uncached_share = 1.0  # of prompts
        self._num_output_tokens = _FIRST_GUESS  # of a choice

    def work(self, num_prompt_tokens: int, max_tokens: int, num_choices: int) -> float:
        """Uncached prompt tokens and output tokens to be expected."""
        return max(num_prompt_tokens * self._uncached_share + num_choices * min(max_tokens, self._num_output_tokens), 1.0)

    def learn(self, uncached_share: float, num_output_tokens: float) -> None:
        """A request has ended so; output tokens a choice."""
        self._uncached_share += _MEAN_WEIGHT * (uncached_share - self._uncached_share)
        self._num_output_tokens += _MEAN_WEIGHT * (num_output_tokens - self._num_output_tokens)


class AdmissionRate:
    """How fast the queue moves. Times are a monotonic clock's seconds."""

    def __init__(self) -> None:
        self._interval_s: float | None = None  # mean, a choice
        self._last_at: float | None = None

    def admitted(self, now: float, num_choices: int, *, is_last: bool) -> None:
        """A request left the queue; `is_last`: nobody waits behind it, so the time to the next one will tell nothing."""
        if self._last_at is not None:
            interval_s = (now - self._last_at) / num_choices
            mean_s = interval_s if self._interval_s is None else self._interval_s
            self._interval_s = mean_s + _RATE_WEIGHT * (interval_s - mean_s)
        self._last_at = None if is_last else now

    def retry_after_s(self, now: float, num_ahead: int) -> float:
        """When `num_ahead` choices will have been admitted; longer than recently if nobody has been for a while."""
        if self._interval_s is None:
            return UNKNOWN_RETRY_S
        standing_s = now - self._last_at if self._last_at is not None else 0.0
        return min(max(max(self._interval_s, standing_s) * (num_ahead + 1), MIN_RETRY_S), MAX_RETRY_S)
