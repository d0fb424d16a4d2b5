"""The state machine: Hypothesis chooses which event comes next, `world.py` does it, every invariant is proved after it."""

from collections import Counter
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.kv.pull import PullState
from tests.model_based.requests import LENGTHS, MAX_TOKENS, Ask
from tests.model_based.world import World

MAX_ASKS = 5
SOON, RENEWAL, DEADLINE, SILENCE, TTL = 0.06, 5.0, 5.5, 16.0, 31.0  # seconds beyond the product's own

number = st.integers(0, 15)
side = st.integers(0, 1)
yes = st.booleans()


class HandoffMachine(RuleBasedStateMachine):
    """One world a run. `transitions` counts over all runs."""

    transitions: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.world = World(type(self).transitions)
        self.was_calm = False

    def check_invariants(self, *args, **kwargs) -> None:
        self.world.check()

    def open_asks(self) -> list[Ask]:
        return [ask for ask in self.world.asks if ask.is_open]

    # ---- requests

    @initialize(how=st.integers(0, 31), rounds=st.integers(0, 3), then=st.sampled_from(["usurp", "move", "be_late", "lose_reader", "calm"]))
    def begin(self, how: int, rounds: int, then: str) -> None:
        """One request is on its way, or runs; and something rare may happen to it at once."""
        self.world.submit(0, 0, LENGTHS[how % len(LENGTHS)], MAX_TOKENS[-1], how % 2, how // 2 % 2, stops_at_once=False)
        for _ in range(rounds + 3 * (then == "move")):
            self._exchange_once(reads_end=how < 24 and then != "usurp")
        if then == "usurp":
            self._usurp(how, LENGTHS[how // 4 % len(LENGTHS)])
        elif then == "move":
            self._move(how, how % 6)
        elif then == "be_late" and self.world.fabric.reads:
            self._be_late(landed=how % 2 == 1)
        elif then == "calm":
            self.calm_down(8)
        elif then == "lose_reader":
            self._lose_reader(how % 16, how % 2)
        self.world.check()

    @precondition(lambda self: len(self.world.asks) < MAX_ASKS)
    @rule(prompt=st.integers(0, 3), length=st.sampled_from(LENGTHS), max_tokens=st.sampled_from(MAX_TOKENS), how=st.integers(0, 31))
    def submit(self, prompt: int, length: int, max_tokens: int, how: int) -> None:
        self.world.submit(prompt % 2, prompt // 2, length, max_tokens, how % 2, how // 2 % 2, stops_at_once=how >= 28)

    @precondition(lambda self: self.open_asks())
    @rule(which=number, pair=st.integers(0, 7))
    def retry(self, which: int, pair: int) -> None:
        ask = self.open_asks()[which % len(self.open_asks())]
        self.world.retry(ask, pair % 2, pair // 2 % 2, cancels=pair < 4)

    def redirectable(self) -> list[Ask]:
        return [ask for ask in self.open_asks() if ask.attempts[-1].failed and ask.attempts[-1].leg and not ask.attempts[-1].leg.lease_over]

    @precondition(lambda self: self.redirectable())
    @rule(which=number, reader=side)
    def redirect(self, which: int, reader: int) -> None:
        self.world.redirect(self.redirectable()[which % len(self.redirectable())], reader)

    @precondition(lambda self: self.open_asks())
    @rule(which=number, reader=side)
    def lose_reader(self, which: int, reader: int) -> None:
        """The reader gives a request up, or loses its session; the router redirects before anybody has moved."""
        self._lose_reader(which, reader)

    def _lose_reader(self, which: int, reader: int) -> None:
        ask = self.open_asks()[which % len(self.open_asks())]
        if which >= 12 and not ask.attempt.reader.is_dead:
            self.world.lose_session(self.world.readers.index(ask.attempt.reader), ask.attempt.session)
        self.world.redirect(ask, reader)

    def movable(self) -> list[Ask]:
        return [ask for ask in self.open_asks() if ask.attempt.ready and not ask.attempt.failed]

    @precondition(lambda self: self.movable())
    @rule(which=number, how=st.integers(0, 5))
    def move(self, which: int, how: int) -> None:
        """And the rounds in which source and target agree, or none of them."""
        self._move(which, how)

    def _move(self, which: int, how: int) -> None:
        if not (movable := self.movable()):
            return
        ask = movable[which % len(movable)]
        self.world.move(ask, 1 - self.world.readers.index(ask.attempt.reader))
        for _ in range(how):
            self._exchange_once(reads_end=how >= 3)

    @precondition(lambda self: self.open_asks())
    @rule(which=number, legs=st.sampled_from([(True, True), (True, False), (False, True)]))
    def cancel(self, which: int, legs: tuple[bool, bool]) -> None:
        asks = self.open_asks()
        self.world.cancel(asks[which % len(asks)], at_holder=legs[0], at_reader=legs[1])

    @precondition(lambda self: self.world.asks)
    @rule(reader=side, session=side)
    def lose_session(self, reader: int, session: int) -> None:
        self.world.lose_session(reader, session)

    # ---- ranks

    @precondition(lambda self: self.world.asks)
    @rule(how=st.integers(0, 3))
    def turn(self, how: int) -> None:
        self.world.turn(how % 2, tick_during=how >= 2)

    @precondition(lambda self: self.world.asks)
    @rule(which=side)
    def hear_as_holder(self, which: int) -> None:
        self.world.hear(self.world.holders[which])

    @precondition(lambda self: self.world.asks)
    @rule(which=side)
    def hear_as_reader(self, which: int) -> None:
        self.world.hear(self.world.readers[which])

    @precondition(lambda self: self.world.asks)
    @rule(how=st.integers(0, 7))
    def step(self, how: int) -> None:
        self.world.step(how % 2, 1 + how // 4, tick_during=how // 2 % 2 == 1)

    @precondition(lambda self: self.world.asks)
    @rule(which=st.integers(0, 3))
    def restart(self, which: int) -> None:
        self.world.restart(self.world.ranks[which])

    @precondition(lambda self: self.world.asks)
    @rule(which=st.integers(0, 3), num_pages=st.integers(1, 6))
    def evict(self, which: int, num_pages: int) -> None:
        self.world.evict(self.world.ranks[which], num_pages)

    @precondition(lambda self: self.world.asks)
    @rule(how=st.integers(0, 5))
    def progress(self, how: int) -> None:
        """Some rounds in which everybody does what is next; reads end well or stay in flight."""
        for _ in range(1 + how // 2):
            self._exchange_once(reads_end=how % 2 == 1)

    def _exchange_once(self, *, reads_end: bool) -> None:
        world = self.world
        if reads_end:
            world.complete_all()
        for index in range(2):
            world.turn(index)
            world.hear(world.readers[index])
            world.hear(world.holders[index])
            if world.is_moving:
                world.step(index)

    # ---- network

    @precondition(lambda self: self.world.wire)
    @rule(which=number)
    def lose(self, which: int) -> None:
        self.world.lose(which)

    @precondition(lambda self: self.world.wire)
    @rule(which=number)
    def duplicate(self, which: int) -> None:
        self.world.duplicate(which)

    @precondition(lambda self: self.world.wire)
    @rule(which=number)
    def delay(self, which: int) -> None:
        self.world.delay(which)

    @precondition(lambda self: self.world.late)
    @rule(which=number)
    def deliver_late(self, which: int) -> None:
        self.world.deliver_late(which)

    @precondition(lambda self: self.world.history and self.open_asks())
    @rule(which=number, index=st.integers(0, 23))
    def stray(self, which: int, index: int) -> None:
        asks = self.open_asks()
        self.world.stray(index, asks[which % len(asks)])

    @precondition(lambda self: self.world.fabric.reads and len(self.world.asks) < 2 * MAX_ASKS)
    @rule(which=number, length=st.sampled_from(LENGTHS))
    def usurp(self, which: int, length: int) -> None:
        """A lease goes while its pages are read, and another prompt is computed into them."""
        self._usurp(which, length)

    def _usurp(self, which: int, length: int) -> None:
        world = self.world
        reading = (PullState.FETCHING, PullState.VERIFYING)
        asks = [ask for ask in world.asks if ask.attempt.reader.kv.pulls.state(ask.attempt.key) in reading]
        holders = [ask for ask in asks if ask.attempt.leg and ask.attempt.is_intact]
        if holders:
            ask = holders[which % len(holders)]
            world.let_lease_go(ask, expires=which >= 12)
            holder = world.holders.index(ask.attempt.holder)  # type: ignore[arg-type]
            world.evict(ask.attempt.holder, 6)
            world.submit(2, len(world.asks), length, 3, holder, which % 2, stops_at_once=False)
            world.turn(holder)
            for _ in range(2 * (which % 2)):  # pages, then epochs
                world.complete_all()
                world.hear(ask.attempt.reader)

    # ---- reads

    @precondition(lambda self: self.world.fabric.reads)
    @rule(which=number, num_pages=st.integers(0, 3))
    def land(self, which: int, num_pages: int) -> None:
        self.world.land(which, num_pages or None)

    @precondition(lambda self: self.world.fabric.reads)
    @rule(which=number, landed_before=yes)
    def complete(self, which: int, landed_before: bool) -> None:
        self.world.complete(which, landed_before=landed_before)

    @precondition(lambda self: self.world.fabric.reads)
    @rule()
    def complete_all(self) -> None:
        self.world.complete_all()

    @precondition(lambda self: self.world.fabric.reads)
    @rule(landed=yes)
    def be_late(self, landed: bool) -> None:
        """Reads stay out beyond their deadline, whether or not their bytes have landed."""
        self._be_late(landed=landed)

    def _be_late(self, *, landed: bool) -> None:
        if landed:
            self.world.land(0, 1)
        self.world.clock.now += DEADLINE
        for rank in self.world.readers:
            self.world.hear(rank)

    @precondition(lambda self: self.world.fabric.reads)
    @rule(which=number, others_end=yes)
    def fail(self, which: int, others_end: bool) -> None:
        """One read ends in an error; all others may end well before anybody looks."""
        self.world.fail(which)
        if others_end:
            self.world.complete_all()

    # ---- time

    @precondition(lambda self: self.world.asks)
    @rule(seconds=st.sampled_from([SOON, RENEWAL, DEADLINE, SILENCE, TTL]))
    def pass_time(self, seconds: float) -> None:
        self.world.clock.now += seconds

    @precondition(lambda self: self.world.asks and not self.was_calm)
    @rule(rounds=st.integers(5, 9))
    def calm(self, rounds: int) -> None:
        self.calm_down(rounds)

    def calm_down(self, rounds: int) -> None:
        self.was_calm = True  # once a run: it takes long
        self.world.calm(rounds, RENEWAL)

    def teardown(self) -> None:
        try:
            self.world.end()
        finally:
            self.world.dispose()
