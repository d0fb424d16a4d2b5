"""Moves at random: commands in any order, reads and messages held and lost, time, cancels and renewed agents in between."""
import random
from collections.abc import Callable

import pytest

from proto.baton.v1 import common_pb2
from services.decode.messages import Failed, Finished, Ready
from tests.decode.move_rig import HANDLE, MoveRig
from tests.decode.rig import greedy, mono

PROMPT = [3 + 7 * i % 240 for i in range(150)]


class Chance:
    """One run: a router that makes mistakes, over a network that does too."""

    def __init__(self, moving: MoveRig, seed: int) -> None:
        self.moving, self.rng, self.attempt = moving, random.Random(seed), 0
        self.num_prompt, self.num_tokens = self.rng.choice([1, 63, 64, 65, 150]), self.rng.choice([20, 70, 140])
        moving.start(PROMPT[: self.num_prompt], greedy(self.num_tokens), self.rng.choice([1, 2, 10]))

    def act(self) -> None:
        moving, rng = self.moving, self.rng
        actions: list[tuple[int, Callable[[], object]]] = [
            (6, moving.step), (6, moving.exchange), (4, moving.settle), (2, moving.source.step), (1, moving.target.step),
            (3, self.submit), (3, lambda: moving.begin(self.named())), (3, lambda: moving.pause(self.named())),
            (1, lambda: moving.resume(self.named())), (1, self.cancel_target), (2, self.toggle_reads), (1, self.toggle_messages),
            (1, self.pass_time), (1, self.renew), (2, self.finish_read),
        ]
        rng.choices([action for _, action in actions], [weight for weight, _ in actions])[0]()

    def named(self) -> int:
        return self.attempt if self.rng.random() < 0.9 else self.rng.randint(0, self.attempt + 1)

    def submit(self) -> None:
        if not self.moving.ends(self.moving.source, HANDLE):
            self.attempt += 1
            self.moving.submit(self.attempt, self.rng.choice([0, 0, 1, 5]))

    def cancel_target(self) -> None:
        if self.attempt:
            self.moving.cancel(self.moving.target, self.attempt)

    def toggle_reads(self) -> None:
        self.moving.fabric.hold_reads = not self.moving.fabric.hold_reads

    def toggle_messages(self) -> None:
        fabric, counts = self.moving.fabric, self.rng.choice([[0, 1, 1, 2], [0, 1, 1, 2], [0]])
        fabric.on_notify = None if fabric.on_notify else lambda sender, receiver, payload: [payload] * self.rng.choice(counts)

    def pass_time(self) -> None:
        self.moving.clock.now += self.rng.choice([0.1, 0.5, 1.0, 2.0, 6.0])

    def renew(self) -> None:
        rig = self.rng.choice([self.moving.source, self.moving.target])
        if self.rng.random() < 0.3:
            rig.kv.renew_agent()

    def finish_read(self) -> None:
        if self.moving.fabric.reads:
            read = self.rng.choice(self.moving.fabric.reads)
            self.rng.choices([read.copy, read.fail, read.complete], [3, 1, 6])[0]()


@pytest.mark.parametrize("seed", range(30))
def test_random_moves(moving: MoveRig, seed: int) -> None:
    print(f"{seed=}")
    chance = Chance(moving, seed)
    for _ in range(80):
        chance.act()
    moving.heal()
    moving.let(36, stride=2.0)  # leases that nobody renews expire
    for attempt in range(1, chance.attempt + 1):
        if not moving.ends(moving.target, attempt):
            moving.cancel(moving.target, attempt)
    moving.run()
    prompt = PROMPT[: chance.num_prompt]
    expected = mono(prompt, chance.num_tokens)
    (end,) = moving.ends(moving.source, HANDLE)
    told = moving.source.tokens(HANDLE)
    assert told == expected[: len(told)] and (len(told) == len(expected) or isinstance(end, Failed))
    for attempt in range(1, chance.attempt + 1):
        moved = moving.target.tokens(attempt)
        if moved:
            (ready,) = moving.target.of(Ready, attempt)
            assert moved == expected[ready.position : ready.position + len(moved)]
    if isinstance(end, Failed):
        assert end.reason == common_pb2.REPLACED
        attempt = int(end.message.removeprefix("moved to attempt ").split(",")[0])
        (ready,) = moving.target.of(Ready, attempt)
        assert ready.position == len(told) - 1, "it went on exactly where the source stopped"
    else:
        assert isinstance(end, Finished) and told == expected
