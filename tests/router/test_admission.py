"""The queue before the pools: order, shares, bounds; one rule at a time, then overloads simulated."""

import random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.admission import MAX_RETRY_S, MIN_RETRY_S, AdmissionRate, Expectation, FairQueue, Room, Waiter
from tests.router.admission_sim import Client, Simulation

ROOM = Room(pair=True, prefill=True)


def waiter(tenant: str = "a", priority: int = 0, n: int = 1, work: float = 100.0, needs_decode: bool = True) -> Waiter:
    return Waiter(tenant=tenant, priority=priority, num_choices=n, work=work, needs_decode=needs_decode)


def queue(max_queued: int = 1000, share: float = 0.0, **weights: float) -> FairQueue:
    return FairQueue(max_queued, weights, share)


def admitted(line: FairQueue, number: int, room: Room = ROOM) -> list[Waiter]:
    """The next `number`, as far as there are so many."""
    found: list[Waiter] = []
    while len(found) < number and (chosen := line.next(room)) is not None:
        line.admit(chosen)
        found.append(chosen)
    return found


def order(line: FairQueue, number: int) -> str:
    return "".join(chosen.tenant for chosen in admitted(line, number))


def test_one_tenant_is_served_first_come_first_served() -> None:
    line = queue()
    sent = [waiter(work=random.Random(i).uniform(1, 1000), needs_decode=i % 3 > 0) for i in range(20)]
    for one in sent:
        assert line.offer(one) == []
    assert admitted(line, 99) == sent and line.num_queued == line.num_waiters == 0


def test_tenants_take_turns_by_work_and_weight() -> None:
    line = queue(c=2.0)
    for _ in range(12):
        line.offer(waiter("a"))
    for _ in range(12):
        line.offer(waiter("b", work=50.0))
        line.offer(waiter("c"))
    served = order(line, 20)  # work of 100 to a, of 100 to b, of 200 to c
    assert (served.count("a"), served.count("b"), served.count("c")) == (4, 8, 8), served
    assert served[:3] == "abc", "all begin equal: the first to come is the first"


def test_a_tenant_that_was_idle_has_no_credit_but_debts() -> None:
    line = queue()
    for _ in range(10):
        line.offer(waiter("a"))
    line.offer(waiter("d", work=1000.0))
    assert order(line, 5) == "adaaa"
    line.offer(waiter("b"))
    line.offer(waiter("b"))
    line.offer(waiter("b"))
    line.offer(waiter("d"))
    assert order(line, 6) == "abab" + "ab", "b is level with a from where a stands; d was given much more than they"


def test_what_a_request_was_in_truth_counts() -> None:
    line = queue()
    for _ in range(6):
        line.offer(waiter("a"))
        line.offer(waiter("b"))
    first, second = admitted(line, 2)
    assert (first.tenant, second.tenant) == ("a", "b")
    line.settle(first, 300.0)  # a was to get 100
    line.settle(second, 100.0)
    assert order(line, 6) == "bbabab"


def test_nothing_is_remembered_when_nobody_waits() -> None:
    line = queue()
    line.offer(waiter("a", work=1e6))
    last = admitted(line, 1)[0]
    assert line.num_remembered == 0
    line.settle(last, 1e9)
    for tenant in "ab":
        line.offer(waiter(tenant))
    assert order(line, 2) == "ab"


def test_classes_come_in_order_and_none_starves() -> None:
    line = queue(share=0.0)
    for priority in (3, 0, 1):
        line.offer(waiter(str(priority), priority))
    assert order(line, 3) == "013"
    line = queue(share=0.1)
    for _ in range(100):
        line.offer(waiter("o", 0))
        line.offer(waiter("b", 1, work=200.0))
        line.offer(waiter("z", 9))
    served = order(line, 100)
    work = {tenant: sum(200 if tenant == "b" else 100 for one in served if one == tenant) for tenant in "obz"}
    assert (work["b"] + work["z"]) / sum(work.values()) == pytest.approx(0.1, abs=0.02), work
    assert work["b"] and work["z"], "the oldest of all later classes is next, whichever class that is"


def test_no_decode_room_holds_up_only_those_who_need_it() -> None:
    line = queue()
    for tenant, needs_decode in (("a", True), ("a", False), ("b", False), ("b", True)):
        line.offer(waiter(tenant, needs_decode=needs_decode))
    no_decode = Room(pair=False, prefill=True)
    assert [(one.tenant, one.needs_decode) for one in admitted(line, 9, no_decode)] == [("a", False), ("b", False)]
    assert line.next(Room(pair=False, prefill=False)) is None
    assert order(line, 9) == "ab"


def test_full_queue_makes_room_for_who_has_less_than_its_share() -> None:
    line = queue(4)
    flood = [waiter("a") for _ in range(4)]
    for one in flood:
        line.offer(one)
    assert line.offer(waiter("a")) is None and line.num_queued == 4
    assert line.offer(waiter("b")) == [flood[3]], "the newest goes"
    assert line.offer(waiter("b", priority=5)) == [flood[2]], "shares are the tenants', whatever their classes"
    assert line.offer(waiter("b", priority=5)) is None and line.offer(waiter("a", priority=5)) is None, "each has two of four, its share"
    assert line.offer(waiter("c")) == [flood[1]] and line.offer(waiter("c")) is None, "a share of four thirds is one place"
    assert line.offer(waiter("d")) is not None and line.offer(waiter("e")) is None, "all have one place now"


def test_ones_own_later_class_gives_way_first() -> None:
    line = queue(3)
    ordinary, background, later = waiter("a"), waiter("a", 1), waiter("a", 2)
    for one in (later, background, ordinary):
        line.offer(one)
    assert line.offer(waiter("a", 2)) is None and line.offer(waiter("a", 1)) == [later]
    assert line.offer(waiter("b")) is not None, "a has more than its share: its latest class's newest goes"
    assert ordinary in admitted(line, 3)


def test_choices_take_so_many_places_and_nobody_goes_in_vain() -> None:
    line = queue(8)
    small = [waiter("a") for _ in range(8)]
    for one in small:
        line.offer(one)
    assert line.offer(waiter("b", n=4)) == small[:3:-1]
    assert line.num_queued == 8 and line.num_waiters == 5
    assert line.offer(waiter("c", n=5)) is None and line.num_waiters == 5, "more than its share: nobody else goes"
    assert queue(4).offer(waiter(n=5)) is None
    assert queue(0).offer(waiter()) is None


TENANTS = st.sampled_from("abcdefgh")


@settings(max_examples=60, deadline=None)
@given(st.lists(
    st.tuples(st.sampled_from(["offer", "offer", "offer", "admit", "leave", "settle"]), TENANTS, st.integers(0, 9), st.integers(1, 16)),
    max_size=120,
), st.integers(0, 24))
def test_bounded_and_consistent_under_any_input(steps: list[tuple[str, str, int, int]], max_queued: int) -> None:
    line, waiting, running = FairQueue(max_queued, {"a": 3.0, "b": 0.1}, 0.05), dict[Waiter, None](), list[Waiter]()
    for action, tenant, priority, n in steps:
        if action == "offer":
            one = waiter(tenant, priority, n, work=float(n * 7), needs_decode=n % 5 > 0)
            displaced = line.offer(one)
            if displaced is not None:
                waiting[one] = None
                for other in displaced:
                    del waiting[other]
        elif action == "admit":
            chosen = line.next(ROOM)
            assert (chosen is None) == (not waiting), "somebody is served while anybody waits"
            if chosen is not None:
                rivals = [one for one in waiting if one.priority == chosen.priority]
                assert chosen is min(rivals, key=lambda one: (one.flow.given if one.flow else 0.0, one.number)), "the one given least"
                line.admit(chosen)
                del waiting[chosen]
                running.append(chosen)
        elif action == "leave" and waiting:
            one = next(iter(waiting))
            line.remove(one)
            del waiting[one]
        elif action == "settle" and running:
            line.settle(running.pop(), float(n))
        assert line.num_queued == sum(one.num_choices for one in waiting) <= max_queued
        assert line.num_waiters == len(waiting) and line.num_remembered <= 8 * 10
    assert sorted(one.number for one in admitted(line, 999)) == sorted(one.number for one in waiting)
    assert (line.num_queued, line.num_remembered) == (0, 0)


def test_tenants_remembered_are_bounded() -> None:
    line = queue(10)
    line.offer(waiter("first", work=1e9))
    line.offer(waiter("second"))
    for i in range(5000):
        line.offer(waiter(f"tenant {i}", work=float(i + 1)))
        admitted(line, 1)
    assert line.num_remembered <= 1100


def test_expected_work_follows_what_requests_were() -> None:
    expectation = Expectation()
    assert expectation.work(100, 500, 2) == 100 + 2 * 256, "nothing is known yet"
    for _ in range(200):
        expectation.learn(0.25, 40.0)
    assert expectation.work(100, 500, 2) == pytest.approx(25 + 80, rel=0.02)
    assert expectation.work(100, 8, 1) == pytest.approx(25 + 8, rel=0.02), "never more than it asks for"


def test_retry_hint_follows_the_queue() -> None:
    rate = AdmissionRate()
    assert rate.retry_after_s(0.0, 50) == 1.0
    for i in range(100):
        rate.admitted(i * 0.5, 1, is_last=False)
    assert rate.retry_after_s(49.5, 9) == pytest.approx(5.0)
    assert rate.retry_after_s(49.5 + 3.0, 9) == pytest.approx(30.0), "nobody has been admitted for a while"
    assert rate.retry_after_s(49.5, 10**6) == MAX_RETRY_S
    rate.admitted(50.0, 1, is_last=True)
    rate.admitted(5000.0, 1, is_last=False)
    assert rate.retry_after_s(5000.0, 9) == pytest.approx(5.0), "a time in which nobody waited says nothing"
    for i in range(1000):
        rate.admitted(5000.0 + i * 1e-5, 4, is_last=False)
    assert rate.retry_after_s(5000.01, 0) == MIN_RETRY_S


def conserves_work(simulation: Simulation) -> None:
    assert not (simulation.num_free and simulation.queue.num_waiters), "a place is idle while somebody waits"


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("max_queued", [60, 1000])
def test_a_flood_costs_modest_tenants_little(seed: int, max_queued: int) -> None:
    """Tenant a sends ten times as much as b and c, in longer requests: each still gets its third."""
    simulation = Simulation(16, queue(max_queued), seed, conserves_work)
    flood = Client("a", 240, prompt=(100, 1500), output=(100, 400))
    simulation.run([flood, Client("b", 20), Client("c", 20)], until=20_000.0)
    tallies = simulation.tallies
    total = sum(tally.work for tally in tallies.values())
    for tenant in "abc":
        assert tallies[tenant].work / total == pytest.approx(1 / 3, rel=0.1), {name: tally.work / total for name, tally in tallies.items()}
    assert (tallies["a"].num_refused > 0) == (max_queued == 60) and tallies["b"].num_refused == tallies["c"].num_refused == 0
    assert mean(tallies["b"].waits) < mean(tallies["a"].waits) / 4


def test_modest_tenants_hardly_wait() -> None:
    """b and c want less than their share: they get all that they want, and wait for a place or two."""
    simulation = Simulation(16, queue(1000), 3, conserves_work)
    simulation.run([Client("a", 200), Client("b", 2), Client("c", 2)], until=20_000.0)
    place = 110 / 16  # time from one place that comes free to the next
    for tenant in "bc":
        assert mean(simulation.tallies[tenant].waits) < 4 * place and max(simulation.tallies[tenant].waits) < 16 * place


def test_weights_are_shares_of_the_work() -> None:
    simulation = Simulation(16, queue(500, b=2.0), 4, conserves_work)
    simulation.run([Client("a", 200), Client("b", 60, output=(100, 200)), Client("c", 60, prompt=(5, 20))], until=20_000.0)
    work = {name: tally.work for name, tally in simulation.tallies.items()}
    assert work["b"] / work["a"] == pytest.approx(2.0, rel=0.1) and work["c"] / work["a"] == pytest.approx(1.0, rel=0.1), work


def test_background_takes_what_is_left_and_its_small_share() -> None:
    busy = [Client("a", 60), Client("b", 60, priority=1), Client("c", 60, priority=4)]
    simulation = Simulation(16, queue(500, share=0.05), 5, conserves_work)
    simulation.run(busy, until=20_000.0)
    work = {name: tally.work for name, tally in simulation.tallies.items()}
    assert (work["b"] + work["c"]) / sum(work.values()) == pytest.approx(0.05, abs=0.015), work
    assert min(work["b"], work["c"]) > 0.01 * sum(work.values()), work
    busy[0].num_open = 4  # a quarter of the places
    simulation = Simulation(16, queue(500, share=0.05), 6, conserves_work)
    simulation.run(busy, until=20_000.0)
    work = {name: tally.work for name, tally in simulation.tallies.items()}
    assert work["b"] > 2 * work["a"] and mean(simulation.tallies["a"].waits) < 2 * 110 / 16


def test_new_names_bring_no_more_than_their_share() -> None:
    """A tenant that comes and goes is no better off than one that stays."""
    simulation = Simulation(8, queue(500), 7, conserves_work)
    simulation.run([Client("a", 100), Client("b", 20), Client("c", 20, pause=50.0)], until=20_000.0)
    work = {name: tally.work for name, tally in simulation.tallies.items()}
    assert work["b"] == pytest.approx(work["a"], rel=0.1) and work["c"] <= 1.1 * work["a"], work
