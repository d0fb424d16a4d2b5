"""Runs of several choices, redirects, cancels, refusals, pulls, expiries in seeded random order: each is answered once, nothing stays."""

import random
from collections import Counter

import pytest

from proto.baton.v1 import common_pb2
from services.kv.layout import PAGE_SIZE
from services.kv.messages import RequestKey
from services.kv.pages import Holder, HolderKind
from services.kv.pull import PullState
from services.kv.puller import PullEnded
from services.kv.rank_kv import RankKv
from services.prefill.messages import Cancel, LeaseOver, RedirectDone, RunDone, RunFailed
from tests.prefill.rig import VOCAB, Rig, ScriptedForward


class Soak:
    """A rig, three readers, and what is out: attempts by choice, claims by key."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rig = Rig(num_pages=24, chunk_tokens=128, max_queued=6)
        self.readers = [self.rig.reader_kv, self.rig.add_reader(), self.rig.add_reader()]
        self.prompts: dict[str, tuple[int, int]] = {}  # name -> (first id, number of tokens)
        self.runs: list[RequestKey] = []
        self.attempts: dict[tuple[str, int], int] = {}
        self.reader_of: dict[RequestKey, RankKv] = {}
        self.redirects: Counter[RequestKey] = Counter()
        self.claims: dict[RequestKey, tuple[RankKv, list[int]]] = {}
        self.num_ready = 0
        self.answers: Counter[RequestKey] = Counter()
        self.leased: Counter[RequestKey] = Counter()
        self.over: Counter[RequestKey] = Counter()
        self.redirected: Counter[RequestKey] = Counter()

    def act(self) -> None:
        kinds = ["run"] * 3 + ["claim"] * 9 + ["redirect"] * 2 + ["cancel", "refuse", "wait"]
        getattr(self, self.rng.choice(kinds))()

    def run(self) -> None:
        name, n = f"r{len(self.prompts)}", self.rng.choice([1, 1, 2, 4])
        num_tokens, first = self.rng.choice([1, 63, 64, 65, 130, 300, 500]), self.rng.randrange(VOCAB)
        self.prompts[name] = first, num_tokens
        readers = self.rng.choices(self.readers, k=n)
        self.reader_of |= {RequestKey(name, choice, 0): reader for choice, reader in enumerate(readers)}
        self.runs.append(self.rig.run(num_tokens=num_tokens, first=first, name=name, n=n, readers=readers))
        self.attempts |= {(name, choice): 0 for choice in range(n)}

    def some_choice(self) -> RequestKey | None:
        if not self.attempts:
            return None
        (name, choice), number = self.rng.choice(list(self.attempts.items())[-8:])
        return RequestKey(name, choice, number)

    def claim(self) -> None:
        key = self.some_choice()
        if key is None or key in self.claims:
            return
        kv = self.rng.choice([self.reader_of[key]] * 9 + self.readers)
        num_pages = -(-self.prompts[key.request_id][1] // PAGE_SIZE)
        if kv.pool.num_available >= num_pages:
            self.claims[key] = kv, self.rig.claim(key, self.prompts[key.request_id][1], kv)

    def redirect(self) -> None:
        key = self.some_choice()
        if key is not None:
            again = RequestKey(key.request_id, key.choice, key.attempt + self.rng.choice([0, 1, 1, 1]))
            self.attempts[key.request_id, key.choice] = again.attempt
            self.redirects[again] += 1
            self.reader_of[again] = self.rng.choice(self.readers)
            self.rig.redirect(again, self.reader_of[again])

    def cancel(self) -> None:
        key = self.rng.choice([*self.runs[-4:], self.some_choice()])
        if key is not None:
            self.rig.channel.commands.append(Cancel(key, common_pb2.CANCELLED, ""))

    def refuse(self) -> None:
        key = self.some_choice()
        if key is not None and key not in self.claims:
            with (kv := self.reader_of[key]).lock:
                kv.pulls.refuse(key, self.rig.kv.instance_id, common_pb2.OVERLOADED, "")

    def wait(self) -> None:
        self.rig.now += self.rng.choice([0.1, 2, 6, 16])

    def turn(self) -> None:
        if self.rng.random() < 0.5:  # the two threads' turns in either order
            self.rig.engine.handoffs.tick()
        assert self.rig.engine.turn()
        self.rig.engine.handoffs.tick()
        self.rig.kv.check_integrity()
        for kv in self.readers:
            for ended in kv.exchange.tick():
                self.pulled(kv, ended)
        for event in self.rig.events():
            if isinstance(event, RunDone | RunFailed):
                self.answers[event.key] += 1
                self.leased.update(choice.key for choice in event.choices if choice.leased) if isinstance(event, RunDone) else None
            elif isinstance(event, RedirectDone):
                self.redirected[event.key] += 1
                if event.former in self.leased:
                    self.leased[event.key] = self.leased.pop(event.former)
            elif isinstance(event, LeaseOver):
                self.over[event.key] += 1

    def pulled(self, kv: RankKv, ended: object) -> None:
        if not isinstance(ended, PullEnded):
            return
        _, pages = self.claims.pop(ended.key)
        if ended.state is PullState.READY:
            self.num_ready += 1
            first, num_tokens = self.prompts[ended.key.request_id]
            entries = ScriptedForward.entries(kv.memory.pages, pages, num_tokens).tolist()
            assert entries == [(first + i) % VOCAB + 1 for i in range(num_tokens)], f"{ended.key} was handed other tokens"
        with kv.lock:
            kv.pool.release(Holder(HolderKind.REQUEST, ended.key))


@pytest.mark.parametrize("seed", range(200, 420))
def test_each_command_is_answered_once_and_nothing_stays(seed: int):
    soak = Soak(seed)
    for _ in range(150):
        soak.act()
        soak.turn()
    for _ in range(60):
        soak.rig.now += 2
        soak.turn()
    for key, (kv, _) in list(soak.claims.items()):  # claims of what never came here: their router cancels them
        with kv.lock:
            kv.pulls.cancel(key, common_pb2.CANCELLED, "")
            kv.pool.release(Holder(HolderKind.REQUEST, key))
    for _ in range(3):
        soak.turn()
    assert dict(soak.answers) == dict.fromkeys(soak.runs, 1)
    assert soak.redirected == soak.redirects and soak.over == soak.leased
    assert True, "the schedule must get somewhere"
    soak.rig.assert_conserved()
    assert all(kv.pool.num_available == kv.pool.num_pages for kv in soak.readers)
    soak.rig.engine.close()
