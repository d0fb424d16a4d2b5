"""Two holders, two readers, a router and a network, all driven by hand: every method is one event.

Messages wait in `wire` until their receiver's thread turns, unless they are lost, doubled or delayed before; reads stay in flight until
something ends them; time stands still until told. What must always be true is in `checks.py`.
"""

from collections import Counter, deque
from typing import NamedTuple

import msgspec

from proto.baton.v1 import common_pb2
from services.decode import messages as decode_messages
from services.decode.request import RequestSpec
from services.kv.local_transport import LocalRead
from services.kv.messages import Message, RequestKey, encode
from services.kv.transport import TransferState
from services.prefill import messages as prefill_messages
from tests.model_based.checks import Checks
from tests.model_based.ranks import HolderRank, Rank, ReaderRank
from tests.model_based.requests import Ask, Attempt, RunLeg, make_ask

HOLDER_PAGES, READER_PAGES = 6, 6
CALM_ATTEMPTS = 6  # of one request, once nothing goes wrong any more
TTL_OVER_S = 31.0


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class OnWire(NamedTuple):
    """A message on its way."""

    sender: str
    receiver: str
    payload: bytes
    message: Message


class World(Checks):
    """See the module."""

    def __init__(self, transitions: Counter[str]) -> None:
        super().__init__(transitions)
        self.clock = Clock()
        self.fabric.hold_reads, self.fabric.on_notify = True, self._notified
        self.wire: list[OnWire] = []
        self.late: list[OnWire] = []
        self.history: deque[OnWire] = deque(maxlen=24)
        self.asks: list[Ask] = []
        self._attempts: dict[RequestKey | int, Attempt] = {}  # by key and by handle
        self.num_incarnations = 0
        self._num_handles = 0
        self.holders = [self._new(HolderRank, f"prefill{i}", HOLDER_PAGES) for i in range(2)]
        self.readers = [self._new(ReaderRank, f"decode{i}", READER_PAGES) for i in range(2)]

    def _new(self, kind: type, name: str, num_pages: int):
        return kind(self, name, num_pages)

    def new_instance(self, name: str) -> str:
        """Id of a new incarnation, or of a renewed agent."""
        self.num_incarnations += 1
        return f"{name}.{self.num_incarnations}"

    def renewed(self, rank: Rank, former: str) -> None:
        """A rank has a new transfer agent; what was on its way to the old one is lost."""
        self.transitions["agent renewed"] += 1
        for each in [each for each in self.wire if each.receiver == former]:
            self._lose(each)

    @property
    def ranks(self) -> list[Rank]:
        return [*self.holders, *self.readers]

    # ---- the router

    def submit(self, first: int, rest: int, length: int, max_tokens: int, holder: int, reader: int, *, stops_at_once: bool) -> None:
        """A new request."""
        ask = make_ask(len(self.asks), first, rest, length, max_tokens, stops_at_once=stops_at_once)
        self.asks.append(ask)
        self.know(ask)
        self._begin(ask, holder, reader)

    def retry(self, ask: Ask, holder: int, reader: int, *, cancels: bool = True) -> None:
        """Give the present attempts up and try another pair: prompt and sent tokens."""
        self._give_up(ask, at_holder=cancels, at_reader=cancels)
        self._begin(ask, holder, reader)

    def _give_up(self, ask: Ask, *, at_holder: bool, at_reader: bool) -> None:
        for attempt in ask.attempts:
            if not attempt.failed:
                attempt.failed = True
                if at_holder:
                    self._cancel_holder(attempt)
                if at_reader:
                    self._cancel_reader(attempt)

    def _begin(self, ask: Ask, holder: int, reader: int) -> None:
        source, target = self.holders[holder], self.readers[reader]
        key = RequestKey(ask.name, 0, len(ask.attempts))
        attempt = self._claim(ask, source, target, RunLeg(key, len(ask.sent)))
        source.channel.commands.append(prefill_messages.Run(
            key=attempt.key, instance_id=source.id, token_ids=ask.prompt + ask.sent, num_output_tokens=attempt.base, salt=b"",
            params=ask.params, readers=[target.peer()],
        ))

    def _claim(self, ask: Ask, holder: Rank, reader: ReaderRank, leg: RunLeg | None, source: Attempt | None = None) -> Attempt:
        """A new attempt, booked at its reader."""
        self._num_handles += 1
        base = leg.base if leg else len(ask.sent)
        attempt = Attempt(
            ask, RequestKey(ask.name, 0, len(ask.attempts)), holder, reader, session=self._num_handles % 2, handle=self._num_handles,
            base=base, leg=leg, source=source,
        )
        ask.attempts.append(attempt)
        self._attempts[attempt.key] = self._attempts[attempt.handle] = attempt
        reader.commands.append(decode_messages.Submit(attempt.session, attempt.handle, RequestSpec(
            key=attempt.key, token_ids=ask.prompt + ask.sent[:base], num_output_tokens=base, params=ask.params, source=holder.peer(),
            num_preemptions=ask.num_preemptions, is_move=leg is None,
        )))
        return attempt

    def redirect(self, ask: Ask, reader: int) -> None:
        """Decode was lost while nothing beyond prefill's first token was sent: another rank reads the lease."""
        former = ask.attempts[-1]
        if former.leg is None or not isinstance(former.holder, HolderRank) or former.holder.is_dead or len(ask.sent) > former.leg.base + 1:
            return
        self._give_up(ask, at_holder=False, at_reader=True)
        for other in ask.attempts:  # or the holder would take the newest of those for the one that is meant
            if other.leg is not former.leg:
                self._cancel_holder(other)
        attempt = self._claim(ask, former.holder, self.readers[reader], former.leg)
        former.holder.channel.commands.append(prefill_messages.Redirect(
            key=attempt.key, instance_id=former.holder.id, reader=self.readers[reader].peer()
        ))

    def move(self, ask: Ask, reader: int) -> None:
        """The rank that runs a request drains: another one pulls its pages."""
        source, target = ask.attempt, self.readers[reader]
        if source.ready and not source.failed and not source.claim_over and source.reader in self.readers and source.reader is not target:
            self._claim(ask, source.reader, target, None, source)

    @property
    def is_moving(self) -> bool:
        """Whether some move is under way."""
        return any(attempt.source and not attempt.ready and not attempt.failed for attempt in self.attempts)

    def drop_orphans(self) -> None:
        """A move whose source is lost before its target was ready comes to nothing."""
        for attempt in self.attempts:
            source = attempt.source
            if source and not attempt.ready and not attempt.failed and (source.failed or source.claim_over or source.reader.is_dead):
                attempt.failed = True
                self._cancel_reader(attempt)

    def cancel(self, ask: Ask, *, at_holder: bool, at_reader: bool) -> None:
        """The client is gone, or one leg is given up."""
        ask.cancelled |= at_holder and at_reader
        self._give_up(ask, at_holder=at_holder, at_reader=at_reader)

    def _cancel_holder(self, attempt: Attempt) -> None:
        leg = attempt.leg
        if leg is None or attempt.holder.is_dead or (leg.over and (leg.lease_over or not leg.leased)):
            return
        assert isinstance(attempt.holder, HolderRank)
        for key in {attempt.key, leg.key}:
            attempt.holder.channel.commands.append(prefill_messages.Cancel(key, common_pb2.CANCELLED, "no longer wanted"))

    def _cancel_reader(self, attempt: Attempt) -> None:
        if not attempt.reader.is_dead and not attempt.claim_over and not attempt.claim_cancelled:
            attempt.claim_cancelled = True
            attempt.reader.commands.append(decode_messages.Cancel(attempt.session, attempt.handle, common_pb2.CANCELLED))

    def lose_session(self, reader: int, session: int) -> None:
        """A router's stream breaks."""
        rank = self.readers[reader]
        rank.commands.append(decode_messages.SessionLost(session))
        for attempt in self.attempts:
            if attempt.reader is rank and attempt.session == session:
                attempt.claim_cancelled = attempt.failed = True

    @property
    def attempts(self) -> list[Attempt]:
        return list(dict.fromkeys(self._attempts.values()))

    # ---- ranks

    def turn(self, holder: int, *, tick_during: bool = False) -> None:
        """A step of a prefill rank."""
        rank = self.holders[holder]
        rank.turn(tick_during=tick_during)
        self._hear_holder(rank)

    def hear(self, rank: Rank) -> None:
        """A turn of a rank's hand-off thread."""
        rank.hear()
        self.collect(rank)

    def step(self, reader: int, times: int = 1, *, tick_during: bool = False) -> None:
        """Steps of a decode rank."""
        rank = self.readers[reader]
        for _ in range(times):
            rank.step(tick_during=tick_during)
        self._hear_reader(rank)

    def restart(self, rank: Rank) -> None:
        """It dies; a new incarnation comes up at its address."""
        rank.kv.close()
        rank.is_dead = True
        for attempt in self.attempts:
            if rank is attempt.reader:
                attempt.failed = attempt.claim_over = True
            elif rank is attempt.holder and (attempt.leg is not None or not attempt.ready):
                attempt.failed = attempt.failed or not attempt.ready  # what runs at its reader goes on
                if attempt.leg is not None:
                    attempt.leg.over = attempt.leg.lease_over = True
        if isinstance(rank, HolderRank):
            self.holders[self.holders.index(rank)] = self._new(HolderRank, rank.name, HOLDER_PAGES)
        else:
            self.readers[self.readers.index(rank)] = self._new(ReaderRank, rank.name, READER_PAGES)  # type: ignore[arg-type]
        self.buried.append(rank)

    def evict(self, rank: Rank, num_pages: int) -> None:
        """The prefix cache gives pages up, as when something else needs them."""
        with rank.kv.lock:
            rank.kv.pool.cache.evict(num_pages)
        self.touched.add(rank)

    # ---- network

    def _notified(self, sender: str, receiver: str, payload: bytes) -> list[bytes]:
        message = self.check_sent(sender, payload)
        self.wire.append(OnWire(sender, receiver, payload, message))
        self.history.append(self.wire[-1])
        return []

    def deliver_to(self, rank: Rank) -> None:
        """Everything on its way to `rank` arrives."""
        mine = [each for each in self.wire if each.receiver == rank.id]
        self.wire = [each for each in self.wire if each.receiver != rank.id]
        for each in mine:
            self.fabric.deliver(each.sender, each.receiver, each.payload)

    def lose(self, index: int) -> None:
        """A message never arrives."""
        self._lose(self.wire[index % len(self.wire)])

    def _lose(self, lost: OnWire) -> None:
        self.wire.remove(lost)
        self.not_told.add(lost.message.key)

    def duplicate(self, index: int) -> None:
        """A message arrives twice, the second time last."""
        self.wire.append(self.wire[index % len(self.wire)])

    def delay(self, index: int) -> None:
        """A message arrives some time, behind what is sent after it."""
        self.late.append(self.wire.pop(index % len(self.wire)))
        self.not_told.add(self.late[-1].message.key)

    def stray(self, index: int, ask: Ask) -> None:
        """A message of former times arrives in the name of a request's present attempt: an instance that is no party to it is ignored."""
        attempt = ask.attempt
        if not attempt.is_intact:
            return
        for old in [*list(self.history)[index:], *list(self.history)[:index]]:
            to_reader = old.message.holder == old.sender
            rank, other = (attempt.reader, attempt.holder) if to_reader else (attempt.holder, attempt.reader)
            table = rank.kv.pulls if to_reader else rank.kv.leases
            if old.sender != other.id and table.state(attempt.key) is not None:
                break
        else:
            return
        before = rank.kv.pulls.num_ignored + rank.kv.leases.num_ignored
        message = msgspec.structs.replace(old.message, key=attempt.key, **{"reader" if to_reader else "holder": rank.id})
        with rank.kv.lock:
            rank.kv.exchange._route(old.sender, encode(message))
        ignored = rank.kv.pulls.num_ignored + rank.kv.leases.num_ignored - before
        assert ignored == 1, f"{rank.id} takes {message} from {old.sender}, which is not {other.id}"

    def let_lease_go(self, ask: Ask, *, expires: bool) -> None:
        """A lease ends, its router or its ttl being over, and its reader does not hear of it."""
        attempt = ask.attempt
        if expires:
            self.clock.now += TTL_OVER_S
            self.hear(attempt.holder)
        else:
            self._cancel_holder(attempt)
            self.turn(self.holders.index(attempt.holder))  # type: ignore[arg-type]
        for each in [each for each in self.wire if each.sender == attempt.holder.id and each.message.key == attempt.key]:
            self._lose(each)

    def deliver_late(self, index: int) -> None:
        """A delayed message goes on."""
        self.wire.append(self.late.pop(index % len(self.late)))

    # ---- reads in flight

    def land(self, index: int, num_pages: int | None = None) -> LocalRead:
        """Bytes of a read arrive, all or some; it stays in flight."""
        read = self.fabric.reads[index % len(self.fabric.reads)]
        self.landed(read, read.local_pages[:num_pages])
        read.copy(num_pages)
        return read

    def complete(self, index: int, *, landed_before: bool = False) -> None:
        """A read is DONE; what landed before may have been the last to land."""
        read = self.fabric.reads[index % len(self.fabric.reads)]
        if not (landed_before and self.has_landed(read)):
            self.land(index)
        read.state = TransferState.DONE
        self.fabric.reads.remove(read)

    def fail(self, index: int) -> None:
        """A read ends in an error."""
        read = self.fabric.reads.pop(index % len(self.fabric.reads))
        read.fail()

    def complete_all(self) -> None:
        """Every read ends well."""
        while self.fabric.reads:
            self.complete(0)

    # ---- what the router hears

    def collect(self, rank: Rank) -> None:
        """Take a rank's events in."""
        if isinstance(rank, HolderRank):
            self._hear_holder(rank)
        elif isinstance(rank, ReaderRank):
            self._hear_reader(rank)

    def _hear_holder(self, rank: HolderRank) -> None:
        self.touched.add(rank)
        for event in rank.take_events():
            attempt = self._of_key(event.key)  # type: ignore[union-attr]
            leg = attempt.leg
            assert leg is not None
            if isinstance(event, prefill_messages.RedirectDone):
                if event.reason:
                    self._failed(attempt, event.reason, event.message)
                continue
            if isinstance(event, prefill_messages.LeaseOver):
                assert leg.leased and not leg.lease_over, f"a second LeaseOver of {leg.key}"
                leg.lease_over = True
                continue
            assert not leg.over, f"{leg.key} was answered before {event}"
            leg.over = True
            mine = [attempt for attempt in attempt.ask.attempts if attempt.leg is leg]
            if isinstance(event, prefill_messages.RunDone):
                (choice,) = event.choices
                leg.leased = choice.leased
                self._token(mine[-1], leg.base, choice.token_id)
                if choice.finish_reason != common_pb2.FINISH_UNSPECIFIED:
                    self._finished(mine[-1], leg.base + 1)
            elif not mine[-1].ready:  # prefill that fails after `ready` is no failure
                self._failed(mine[-1], event.reason, event.message)

    def _hear_reader(self, rank: ReaderRank) -> None:
        self.touched.add(rank)
        for event in rank.take_events():
            if isinstance(event, decode_messages.StepOut):
                for handle, index, token in zip(event.handles, event.first_index, event.token_ids, strict=True):
                    self._token(self._of_handle(handle), index, token)
                continue
            attempt = self._of_handle(event.handle)
            if isinstance(event, decode_messages.Ready):
                assert attempt.source or event.position == attempt.base, f"{event} of {attempt.key}, which has {attempt.base} tokens"
                attempt.ready = True
                self._token(attempt, event.position, event.first_token.token_id)
                if attempt.source:
                    self.transitions["moved"] += 1
                    attempt.source.failed = True
            elif isinstance(event, decode_messages.Finished | decode_messages.Failed):
                assert not attempt.claim_over, f"{attempt.key} ended before {event}"
                attempt.claim_over = True
                if isinstance(event, decode_messages.Finished):
                    told = None if event.reason == common_pb2.FINISH_UNSPECIFIED and attempt.source else event.num_output_tokens
                    self._finished(attempt, told)
                else:
                    attempt.ask.num_preemptions += event.reason == common_pb2.PREEMPTED
                    self._failed(attempt, event.reason, event.message)
            else:
                self._hear_move(attempt, event)

    def _hear_move(self, attempt: Attempt, event: decode_messages.RequestEvent) -> None:
        """What the two sides of a move say on the way; the source gets its next command."""
        source, command = attempt.source, None
        if isinstance(event, decode_messages.Resumed):
            self.transitions["move came to nothing"] += 1
        elif source is None or source.reader.is_dead or source.claim_over or attempt.failed:
            return
        elif isinstance(event, decode_messages.Granted):
            command = decode_messages.MoveStart(source.session, source.handle, attempt.key.attempt, attempt.reader.peer())
        elif isinstance(event, decode_messages.CaughtUp):
            command = decode_messages.MovePause(source.session, source.handle, attempt.key.attempt)
        if command:
            source.reader.commands.append(command)

    def _of_key(self, key: RequestKey) -> Attempt:
        return self._attempts[key]

    def _of_handle(self, handle: int) -> Attempt:
        return self._attempts[handle]

    def _token(self, attempt: Attempt, index: int, token: int) -> None:
        ask = attempt.ask
        expected = ask.expected[index] if index < len(ask.expected) else None
        assert token == expected, f"token {index} of {attempt.key} is {token}, not {expected}"
        if index == len(ask.sent) and not ask.cancelled:
            ask.sent.append(token)
            ask.done = len(ask.sent) == len(ask.expected)  # the router counts by itself: nothing is tried again after the last

    def _finished(self, attempt: Attempt, num_output_tokens: int | None) -> None:
        ask = attempt.ask
        right = num_output_tokens is None or num_output_tokens == len(ask.expected)
        assert right, f"{attempt.key} ended after {num_output_tokens} tokens of {len(ask.expected)}"
        ask.done |= not attempt.failed

    def _failed(self, attempt: Attempt, reason: int, message: str) -> None:
        self.check_failure(attempt, reason, message)
        attempt.failed, attempt.reason = True, reason
        source = attempt.source
        if source is not None and not attempt.ready and not source.reader.is_dead and not source.claim_over:
            source.reader.commands.append(decode_messages.MoveResume(source.session, source.handle, attempt.key.attempt))

    # ---- the end

    def calm(self, rounds: int, seconds: float) -> None:
        """Time passes without any fault or work: messages arrive, reads end, the hand-off threads turn."""
        for index in range(2):
            self.turn(index)  # until then a holder does not know its newest readers
        for number in range(rounds):
            self.clock.now += seconds
            self.complete_all()
            for rank in self.ranks:
                self.hear(rank)
            self.is_calm = number >= 3  # what had begun to go wrong before shows in the first rounds
        self.check_told()
        self.is_calm = False

    def run_calmly(self, rounds: int = 120) -> None:
        """Nothing goes wrong any more: every request gets to its end, by as many attempts as it takes."""
        self.wire += self.late
        self.late = []
        for _ in range(2):
            self.complete_all()
            for rank in self.ranks:
                self.hear(rank)
        self.check_told()
        for attempt in self.attempts:
            if attempt.failed and not any(other.leg is attempt.leg and not other.failed for other in attempt.ask.attempts):
                self._cancel_holder(attempt)
            if attempt.failed:
                self._cancel_reader(attempt)
        self.flawless_from = self._num_handles
        attempts_before = {ask: len(ask.attempts) for ask in self.asks}
        for number in range(rounds):
            self.drop_orphans()
            for ask in self.asks:
                if ask.is_open and not ask.is_served:
                    used = len(ask.attempts) - attempts_before[ask]
                    assert used < CALM_ATTEMPTS, f"{ask.name} does not get done though nothing goes wrong"
                    self.retry(ask, number % 2, (number // 2) % 2)
            self.clock.now += 0.3
            for rank in self.ranks:
                self.hear(rank)
            self.complete_all()
            for index in range(2):
                self.turn(index)
                self.step(index, 2)
            if not any(ask.is_open for ask in self.asks) and number > 2:
                return
        raise AssertionError(f"not done after {rounds} calm rounds: {[ask.name for ask in self.asks if ask.is_open]}")

    def end(self) -> None:
        """Everything ends, is told, expires and is forgotten; then nothing is left."""
        self.run_calmly()
        for attempt in self.attempts:
            attempt.failed = True
            self._cancel_holder(attempt)
            self._cancel_reader(attempt)
        for _ in range(3):
            self.clock.now += 31.0
            self.complete_all()
            for index in range(2):
                self.turn(index)
                self.step(index)
            for rank in self.ranks:
                self.hear(rank)
            self.check()
        self.check_nothing_left()

    def dispose(self) -> None:
        for rank in [*self.ranks, *self.buried]:
            rank.dispose()

