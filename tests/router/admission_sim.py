"""A simulated overload: the real queue before pools that are places for so many choices. Time is counted in output tokens."""

import heapq
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from services.router.admission import Expectation, FairQueue, Room, Waiter


@dataclass
class Client:
    """A tenant that keeps `num_open` requests open: each one that ends, or is refused, is followed by another `pause` later."""

    tenant: str
    num_open: int
    priority: int = 0
    prompt: tuple[int, int] = (50, 400)
    output: tuple[int, int] = (20, 200)
    pause: float = 0.0
    stop_at: float = float("inf")


@dataclass
class Tally:
    """What a tenant got."""

    work: float = 0.0
    waits: list[float] = field(default_factory=list)
    num_refused: int = 0


class Simulation:
    """`num_places` choices run at once, each a token a time unit; prompts cost no time but count as work."""

    def __init__(self, num_places: int, queue: FairQueue, seed: int, on_event: Callable[["Simulation"], None] | None = None) -> None:
        self.num_free = num_places
        self.queue = queue
        self.tallies: dict[str, Tally] = defaultdict(Tally)
        self.now = 0.0
        self._expectation = Expectation()
        self._draw = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._waiting: dict[Waiter, tuple[Client, float, int, int]] = {}
        self._on_event = on_event

    def run(self, clients: list[Client], until: float) -> None:
        for client in clients:
            for _ in range(client.num_open):
                self._at(self._draw.uniform(0.0, 5.0), lambda client=client: self._send(client))
        while self._events and self.now < until:
            self.now, _, action = heapq.heappop(self._events)
            action()
            self._admit()
            if self._on_event is not None:
                self._on_event(self)

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, action))

    def _send(self, client: Client) -> None:
        if self.now >= client.stop_at:
            return
        num_prompt, num_output = self._draw.randint(*client.prompt), self._draw.randint(*client.output)
        work = self._expectation.work(num_prompt, 1000, 1)
        waiter = Waiter(tenant=client.tenant, priority=client.priority, num_choices=1, work=work, needs_decode=True)
        if self.num_free and not self.queue.num_waiters:
            self._begin(waiter, client, num_prompt, num_output, self.now)
            return
        displaced = self.queue.offer(waiter)
        for other in [waiter] if displaced is None else displaced:
            owner = client if other is waiter else self._waiting.pop(other)[0]
            self.tallies[owner.tenant].num_refused += 1
            self._at(self.now + 20.0, lambda owner=owner: self._send(owner))
        if displaced is not None:
            self._waiting[waiter] = client, self.now, num_prompt, num_output

    def _admit(self) -> None:
        while self.num_free and (waiter := self.queue.next(Room(True, True))) is not None:
            self.queue.admit(waiter)
            client, since, num_prompt, num_output = self._waiting.pop(waiter)
            self._begin(waiter, client, num_prompt, num_output, since)

    def _begin(self, waiter: Waiter, client: Client, num_prompt: int, num_output: int, since: float) -> None:
        self.num_free -= 1
        self.tallies[client.tenant].waits.append(self.now - since)
        self._at(self.now + num_output, lambda: self._end(waiter, client, num_prompt, num_output))

    def _end(self, waiter: Waiter, client: Client, num_prompt: int, num_output: int) -> None:
        self.num_free += 1
        self.tallies[client.tenant].work += num_prompt + num_output
        self.queue.settle(waiter, num_prompt + num_output)
        self._expectation.learn(1.0, num_output)
        self._at(self.now + client.pause, lambda: self._send(client))
