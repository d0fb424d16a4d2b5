"""Admission, preemption and ends, without a model."""
import pytest

from proto.baton.v1 import common_pb2
from services.decode.request import RequestState
from services.decode.scheduler import Scheduler, finish_reason
from tests.decode.test_claims import request

EOS = (1,)


def test_admission_keeps_order_and_bound() -> None:
    scheduler = Scheduler(max_running=2)
    requests = [request(number) for number in range(4)]
    for each in requests:
        each.state = RequestState.READY
        scheduler.add(each)
    scheduler.admit()
    assert scheduler.running == requests[:2] and list(scheduler.ready) == requests[2:]
    assert [each.state for each in requests] == [RequestState.RUNNING] * 2 + [RequestState.READY] * 2
    scheduler.remove(requests[0])
    scheduler.remove(requests[3])
    scheduler.admit()
    assert scheduler.running == [requests[1], requests[2]] and len(scheduler) == 2
    assert scheduler.get(1, 2) is requests[2] and scheduler.get(1, 3) is None
    assert scheduler.num_running_tokens == 20


def test_victim_is_the_most_recently_admitted_that_is_not_spared() -> None:
    scheduler = Scheduler(max_running=3)
    old, spared, young, waiting = (request(number, 64, 200) for number in range(4))
    for each, num_pages in ((old, 1), (spared, 5), (young, 2), (waiting, 2)):
        each.pages = list(range(num_pages))
        each.append(9)  # the first token: position 64
        scheduler.add(each)
    scheduler.admit()
    assert scheduler.lacking_page() == [old]
    assert scheduler.victim(1) is None
    order = []
    while (victim := scheduler.victim(0)) is not None:
        order.append(victim)
        scheduler.remove(victim)
    assert order == [waiting, young, old], "who has all its pages is never a victim"
    assert scheduler.requests == [spared]


def test_paused_request_keeps_its_place_and_takes_part_in_no_step() -> None:
    scheduler = Scheduler(max_running=2)
    first, second, third = (request(number) for number in range(3))
    for each in (first, second, third):
        each.state = RequestState.READY
        scheduler.add(each)
    scheduler.admit()
    scheduler.pause(first)
    scheduler.pause(third)
    scheduler.admit()
    assert scheduler.batch() == [second] and len(scheduler) == 3 and not scheduler.is_idle
    scheduler.remove(second)
    scheduler.admit()
    assert scheduler.batch() == [] and scheduler.running == [first, third] and scheduler.is_idle
    scheduler.resume(third)
    scheduler.resume(first)
    assert scheduler.batch() == [first, third] and first.state is third.state is RequestState.RUNNING
    scheduler.pause(first)
    scheduler.remove(first)
    assert scheduler.requests == [third]


@pytest.mark.parametrize(("token", "fields", "reason"), [
    (9, {}, common_pb2.FINISH_UNSPECIFIED),
    (1, {}, common_pb2.STOP),
    (9, {"max_tokens": 1}, common_pb2.LENGTH),
    (1, {"max_tokens": 1}, common_pb2.STOP),
    (9, {"num_tokens": 999}, common_pb2.LENGTH),
])
def test_finish_reason(token: int, fields: dict[str, int], reason: int) -> None:
    each = request(1, **fields)
    each.append(token)
    assert finish_reason(each, EOS) == reason
