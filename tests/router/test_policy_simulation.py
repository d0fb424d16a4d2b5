"""What the choices do to a cluster: bursts of one prefix, replicas of the router with stale loads, ranks of unlike speed."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from services.kv.hash import page_digests
from services.router.policy import STICKY_TOKENS, choose_decode, choose_prefill
from services.router.prefix_index import PrefixIndex

TICK_S = 0.01


@dataclass
class View:
    """A prefill rank as one replica believes it to be, by the rules of rank_state.py."""

    own: int = 0
    reported: int = 0
    since: int = 0
    sticky_tokens: int = STICKY_TOKENS

    @property
    def num_tokens(self) -> int:
        return max(self.own, self.reported + self.since)


@dataclass
class Rank:
    """A prefill rank that computes first come first served."""

    tokens_per_s: float
    queue: deque[list[float]] = field(default_factory=deque)  # tokens left, tokens, replica, when it came
    num_computed: float = 0.0

    @property
    def num_queued(self) -> int:
        return int(sum(each[0] for each in self.queue))


Choose = Callable[[list[View], int, int], int]


def ours(views: list[View], num_tokens: int, draw: int) -> int:
    return choose_prefill(views, [0] * len(views), num_tokens, draw).position


def at_random(views: list[View], num_tokens: int, draw: int) -> int:
    return draw % len(views)


def simulate(speeds: list[float], num_replicas: int, report_s: float, load: float, choose: Choose) -> tuple[float, list[Rank]]:
    """20 s of prompts with heavy-tailed lengths at `load` of all that the ranks compute, each at a random replica.

    Every replica hears of every rank once in `report_s`. Returns the mean seconds from arrival to computed, and the ranks.
    """
    rng = random.Random(7)
    ranks = [Rank(speed) for speed in speeds]
    views = [[View() for _ in ranks] for _ in range(num_replicas)]
    phases = [[rng.random() for _ in ranks] for _ in range(num_replicas)]
    waits: list[float] = []
    offered = 0.0
    for tick in range(int(20 / TICK_S)):
        now = tick * TICK_S
        for i, rank in enumerate(ranks):
            left = rank.tokens_per_s * TICK_S
            while rank.queue and left > 0:
                first = rank.queue[0]
                done = min(left, first[0])
                first[0], left, rank.num_computed = first[0] - done, left - done, rank.num_computed + done
                if first[0] <= 0:
                    rank.queue.popleft()
                    views[int(first[2])][i].own -= int(first[1])
                    waits.append(now - first[3])
        for of_replica, phase in zip(views, phases, strict=True):
            for view, rank, offset in zip(of_replica, ranks, phase, strict=True):
                if int(now / report_s + offset) != int((now - TICK_S) / report_s + offset):
                    view.reported, view.since = rank.num_queued, 0
        offered += load * sum(speeds) * TICK_S
        while offered > 0:
            length, replica = min(int(rng.paretovariate(1.3) * 400), 16_000), rng.randrange(num_replicas)
            offered -= length
            index = choose(views[replica], length, rng.getrandbits(32))
            views[replica][index].own += length
            views[replica][index].since += length
            ranks[index].queue.append([length, length, replica, now])
    return sum(waits) / len(waits), ranks


@pytest.mark.parametrize("report_s", [0.05, 0.5])
@pytest.mark.parametrize("num_replicas", [2, 8])
def test_replicas_with_stale_loads_do_not_herd(num_replicas: int, report_s: float) -> None:
    """Prompts wait little longer than behind one router that knows everything, and far less than dealt out at random."""
    speeds = [10_000.0] * 8
    one, _ = simulate(speeds, 1, TICK_S, 0.85, ours)
    many, ranks = simulate(speeds, num_replicas, report_s, 0.85, ours)
    dealt, _ = simulate(speeds, num_replicas, report_s, 0.85, at_random)
    assert many < 2.0 * one and many < 0.6 * dealt, (one, many, dealt)
    done = [rank.num_computed for rank in ranks]
    assert max(done) < 1.1 * sum(done) / len(done), done


def test_slow_ranks_get_what_they_can_do() -> None:
    """Ranks three times as fast get most of the work, though nobody says so: their queues empty sooner."""
    speeds = [15_000.0] * 4 + [5_000.0] * 4
    wait, ranks = simulate(speeds, 4, 0.05, 0.8, ours)
    dealt, _ = simulate(speeds, 4, 0.05, 0.8, at_random)
    fast, slow = (sum(rank.num_computed for rank in part) for part in (ranks[:4], ranks[4:]))
    assert 2.0 < fast / slow < 4.5, (fast, slow)
    assert wait < 0.3 * dealt, (wait, dealt)


def burst(num_requests: int, gap_s: float) -> list[int]:
    """Ranks that one prefix of 1,024 tokens, with 128 of each prompt's own behind it, goes to within a burst; 8 ranks, none computes."""
    rng = random.Random(3)
    index = PrefixIndex()
    slots = [index.add(str(i), 1000) for i in range(8)]
    views = [View() for _ in slots]
    shared = [rng.randrange(1000) for _ in range(1024)]
    chosen: list[int] = []
    for i in range(num_requests):
        digests, now = page_digests([*shared, *(rng.randrange(1000) for _ in range(128))]), i * gap_s
        hits = index.hit_tokens(digests, now)
        best = choose_prefill(views, hits, 1152, rng.getrandbits(32)).position
        views[best].own += 1152 - hits[best]
        index.expect(str(best), digests, now)
        chosen.append(best)
    return chosen


def test_a_burst_of_one_prefix_stays_together_until_the_bound() -> None:
    """The first computes the prefix, those behind it wait for it there: up to STICKY_TOKENS, then it spreads to one more at a time."""
    num_first = 1 + 1 + (STICKY_TOKENS - 1152) // 192  # the last shared page covers the id after it, too
    chosen = burst(num_first + 8, 0.0)
    assert len(set(chosen[:num_first])) == 1
    assert chosen[num_first] != chosen[0] and len(set(chosen[num_first:])) == 1
    everybody = burst(400, 0.0)
    assert max(everybody.count(rank) for rank in range(8)) <= 1.5 * 400 / 8


def test_prompts_of_one_prefix_far_apart_are_no_burst() -> None:
    """Without events or a reply nothing is believed for longer than 2 s: then the least work decides."""
    assert len(set(burst(8, 3.0))) == 8


def test_prefixes_find_their_ranks() -> None:
    """Eight system prompts of ten pages on four ranks: every request but the first finds its prefix, and no rank starves."""
    rng = random.Random(6)
    index = PrefixIndex()
    slots = [index.add(str(i), 1000) for i in range(4)]
    prefixes = [[bytes([p, page]) + bytes(14) for page in range(10)] for p in range(8)]
    hits, counts = 0, [0] * 4
    for i in range(400):
        digests = prefixes[rng.randrange(8)]
        choice = choose_prefill([View() for _ in slots], index.hit_tokens(digests, float(i)), 700, rng.getrandbits(32))
        hits += choice.reason.startswith("prefix")
        counts[choice.position] += 1
        index.keep(str(choice.position), digests)
    assert hits == 400 - 8, hits
    assert min(counts) > 0, counts


@dataclass
class DecodeView:
    """A decode rank with a group of its own."""

    group: str
    num_tokens: int = 0
    num_requests: int = 0
    max_running: int = 10_000


def test_decode_ranks_stay_level() -> None:
    """2,000 requests with heavy-tailed lengths on 8 decode ranks stay far more level than dealing them out in turn."""
    rng = random.Random(5)
    ranks, in_turn = [DecodeView(str(i)) for i in range(8)], [0] * 8
    worst, worst_in_turn = 0, 0
    for i in range(2000):
        length = int(min(rng.paretovariate(1.1) * 50, 8000))
        ranks[choose_decode(ranks, [0] * 8, length, rng.getrandbits(32)).position].num_tokens += length
        in_turn[i % 8] += length
        if i % 50 == 49:  # everybody finishes a part
            in_turn = [n * 3 // 4 for n in in_turn]
            for rank in ranks:
                rank.num_tokens = rank.num_tokens * 3 // 4
        sizes = [rank.num_tokens for rank in ranks]
        worst, worst_in_turn = max(worst, max(sizes) - min(sizes)), max(worst_in_turn, max(in_turn) - min(in_turn))
    assert worst <= 8000 < worst_in_turn, (worst, worst_in_turn)
