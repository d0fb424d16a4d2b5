"""Lets requests in as the pools have room: at once while nobody waits, else in the order of admission.py.

Ranks have room by what pool.py believes: load reports, corrected by what this router sent and what has ended since. So a decode rank never
idles while somebody waits, and all replicas of the router see the same places. One request is let in at a time: the next one is decided
when it counts at its ranks.
"""

import asyncio
import math
import time
from collections.abc import Sequence

from services.router.admission import AdmissionRate, Expectation, FairQueue, Room, Waiter
from services.router.metrics import QUEUE_SECONDS, QUEUED, RUNNING
from services.router.pool import Model, Pool
from services.router.rank_state import RankState
from services.router.validate import Request
from services.runtime.config import RouterSection
from services.runtime.errors import BatonError, DeadlineExceeded, NoMember, Overloaded


class Admission:
    """A request's right to run, from the moment it is let in until leave()."""

    def __init__(self, gate: "Gate", waiter: Waiter) -> None:
        self._gate, self.waiter = gate, waiter
        self._is_over = False

    def booked(self) -> None:
        """It counts at its ranks from now on."""
        self._gate.booked(self)

    def leave(self, num_uncached_tokens: int, num_output_tokens: int) -> None:
        """It is over: what was computed of its prompt, and the tokens of all choices. May be called again."""
        if not self._is_over:
            self._is_over = True
            self._gate.left(self, num_uncached_tokens, num_output_tokens)


class _Place:
    """In the queue, as a coroutine holds it."""

    def __init__(self, waiter: Waiter, since: float) -> None:
        self.waiter, self.since = waiter, since
        self.turn: asyncio.Future[Admission] = asyncio.get_running_loop().create_future()

    def fail(self, error: BatonError) -> None:
        """Out of the queue with `error`, unless the client has left in this turn of the loop."""
        if not self.turn.done():
            self.turn.set_exception(error)


class Gate:
    """Counts choices, not requests. Everything happens in one event loop."""

    def __init__(self, pool: Pool, section: RouterSection) -> None:
        self._pool, self._section = pool, section
        self._queue = FairQueue(section.max_queued, section.tenants, section.background_share)
        self._expectation, self._rate = Expectation(), AdmissionRate()
        self._places: dict[Waiter, _Place] = {}
        self._arriving: Admission | None = None  # let in, does not count at its ranks yet
        self._is_deciding = False  # soon
        self._is_closed = False
        self.num_running = 0
        pool.on_room = self._decide_soon

    @property
    def num_queued(self) -> int:
        return self._queue.num_queued

    async def enter(self, request: Request, deadline: float | None) -> Admission:
        """Wait until `request` may run; does not yield when it may at once. `deadline`: a monotonic clock's time.

        Raises Overloaded, DeadlineExceeded, NoMember.
        """
        params, num_prompt_tokens = request.params, len(request.prompt_ids)
        waiter = Waiter(
            tenant=request.tenant, priority=request.priority, num_choices=request.n, needs_decode=params.max_tokens > 1,
            work=self._expectation.work(num_prompt_tokens, params.max_tokens, request.n),
        )
        if self._is_closed:
            raise _stopping()
        if request.n > self._section.max_requests:
            raise Overloaded(f"its {request.n} choices are more than the router's max_requests {self._section.max_requests}")
        if not self._places and self._arriving is None and self._fits(waiter) and _does_for(self._room(), waiter):
            return self._let_in(waiter, 0.0)
        return await self._wait(waiter, deadline)

    async def _wait(self, waiter: Waiter, deadline: float | None) -> Admission:
        displaced = self._queue.offer(waiter)
        if displaced is None:
            raise self._overloaded(self._full())
        for other in displaced:
            self._take(other).fail(self._overloaded(f"{self._full()}, of which its tenant had more than its share"))
        now = time.monotonic()
        place = self._places[waiter] = _Place(waiter, now)
        QUEUED.inc()
        ends_at = min(now + self._section.max_queue_s, math.inf if deadline is None else deadline)
        timer = asyncio.get_running_loop().call_at(ends_at, self._expire, place, deadline is not None and ends_at >= deadline)
        self._decide_soon()
        try:
            return await place.turn
        except asyncio.CancelledError:
            if waiter in self._places:
                self._queue.remove(waiter)
                self._take(waiter)
            elif place.turn.done() and not place.turn.cancelled() and place.turn.exception() is None:
                place.turn.result().leave(0, 0)  # let in and gone in one turn of the loop
            raise
        finally:
            timer.cancel()

    def _expire(self, place: _Place, is_deadline: bool) -> None:
        """It has waited too long."""
        if place.waiter not in self._places:
            return
        self._queue.remove(place.waiter)
        self._take(place.waiter)
        waited = f"waited {time.monotonic() - place.since:.1f} s at the router"
        if is_deadline:
            place.fail(DeadlineExceeded(f"the deadline passed while it {waited}"))
        else:
            place.fail(self._overloaded(f"it {waited} and max_queue_s is {self._section.max_queue_s:g}"))

    def _decide_soon(self) -> None:
        """Something may have become free. Not at once: the caller is in the midst of changing it."""
        if self._places and not self._is_deciding and self._arriving is None:
            self._is_deciding = True
            asyncio.get_running_loop().call_soon(self._decide)

    def _decide(self) -> None:
        """Let the next one in, if there is room."""
        self._is_deciding = False
        if self._arriving is not None or not self._places:
            return
        room = self._room()
        while (waiter := self._queue.next(room)) is not None and self._places[waiter].turn.cancelled():  # about to leave by itself
            self._queue.remove(waiter)
            self._take(waiter)
        if waiter is None or not self._fits(waiter):
            return
        self._queue.admit(waiter)
        place, now = self._take(waiter), time.monotonic()
        self._rate.admitted(now, waiter.num_choices, is_last=not self._places)
        self._arriving = self._let_in(waiter, now - place.since)
        place.turn.set_result(self._arriving)

    def _take(self, waiter: Waiter) -> _Place:
        """The place of one that is out of the queue."""
        QUEUED.dec()
        return self._places.pop(waiter)

    def _let_in(self, waiter: Waiter, waited_s: float) -> Admission:
        self.num_running += waiter.num_choices
        RUNNING.inc()
        QUEUE_SECONDS.observe(waited_s)
        return Admission(self, waiter)

    def booked(self, admission: Admission) -> None:
        if self._arriving is admission:
            self._arriving = None
            self._decide_soon()

    def left(self, admission: Admission, num_uncached_tokens: int, num_output_tokens: int) -> None:
        waiter = admission.waiter
        self.num_running -= waiter.num_choices
        RUNNING.dec()
        self._queue.settle(waiter, num_uncached_tokens + num_output_tokens)
        self.booked(admission)  # it may have failed before that
        self._decide_soon()

    def learn(self, request: Request, num_cached_tokens: int, num_output_tokens: int) -> None:
        """`request` has ended well: the next ones are expected to be alike."""
        num_prompt_tokens = len(request.prompt_ids)
        self._expectation.learn((num_prompt_tokens - num_cached_tokens) / num_prompt_tokens, num_output_tokens / request.n)

    def close(self) -> None:
        """The router stops: whoever waits is told to ask another replica, and so is everybody who comes."""
        self._is_closed = True
        for waiter in list(self._places):
            self._queue.remove(waiter)
            self._take(waiter).fail(_stopping())

    def _overloaded(self, why: str) -> BatonError:
        return Overloaded(why, self._rate.retry_after_s(time.monotonic(), self.num_queued))

    def _full(self) -> str:
        bounds = f"max_requests is {self._section.max_requests} and max_queued {self._section.max_queued}"
        return f"{self.num_running} requests run and {self.num_queued} wait, a choice counted as one; the router's {bounds}"

    def _fits(self, waiter: Waiter) -> bool:
        return self.num_running + waiter.num_choices <= self._section.max_requests

    def _room(self) -> Room:
        return room_of(self._pool.models(), self._section.prefill_queue_tokens, self._section.decode_lead, time.monotonic())


def room_of(models: Sequence[Model], queue_tokens: int, lead: float, now: float) -> Room:
    """What usable ranks can take. Where there is no rank at all there is room: pairing says then what is missing.

    A prefill rank takes requests while less than `queue_tokens` uncached tokens are in flight there; a decode rank while fewer requests
    than its max_running, and `lead` of it more, are: while they are prefilled their places are free for others.
    """
    is_pair_free = is_prefill_free = has_pair = has_prefill = False
    for model in models:
        if not model.prefills:
            continue
        has_prefill, has_pair = True, has_pair or bool(model.decodes)
        if not any(_prefill_has_room(state, queue_tokens) for state in _warm(model.prefills, now)):
            continue
        is_prefill_free = True
        if any(_decode_has_room(state, lead) for state in _warm(model.decodes, now)):
            is_pair_free = True
            break
    return Room(pair=is_pair_free or not has_pair, prefill=is_prefill_free or not has_prefill)


def _prefill_has_room(state: RankState, queue_tokens: int) -> bool:
    return state.num_tokens < queue_tokens or _is_poor(state, state.num_own_tokens, state.num_tokens, queue_tokens, queue_tokens)


def _decode_has_room(state: RankState, lead: float) -> bool:
    num_ahead = max(math.ceil(lead * state.max_running), 1)
    limit = state.max_running + num_ahead
    return state.num_requests < limit or _is_poor(state, state.num_own_requests, state.num_requests, limit, num_ahead)


def _is_poor(state: RankState, own: int, total: int, limit: int, more: int) -> bool:
    """Whether this router has less than its part of a rank that is full. A router fills a place that one of its own requests leaves at
    once, before the others hear of it, so one that comes later would never see any: it may go `more` beyond the limit, and has every
    place that comes free there until it has its part."""
    return state.num_routers > 1 and own < limit / state.num_routers and total < limit + more


def _warm(ranks: Sequence[RankState], now: float) -> Sequence[RankState]:
    """Those that requests go to: the policy takes a rank that cools down only where there is no other."""
    return [state for state in ranks if state.cool_down.until <= now] or ranks


def _does_for(room: Room, waiter: Waiter) -> bool:
    return room.pair if waiter.needs_decode else room.prefill


def _stopping() -> NoMember:
    return NoMember("this router is stopping; ask another replica")
