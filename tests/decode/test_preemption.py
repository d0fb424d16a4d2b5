"""Requests that give their pages up: what stays cached, how they come back, and that the third time is the last."""
from collections.abc import Callable

from proto.baton.v1 import common_pb2
from services.decode.messages import Failed, Ready
from services.kv.messages import RequestKey
from tests.decode.rig import Rig, greedy, mono

OLD = [3 + 7 * i % 240 for i in range(60)]
YOUNG = [11 + 3 * i % 200 for i in range(60)]
MakeRig = Callable[..., Rig]


def run_to_preemption(rig: Rig, handle: int) -> None:
    for _ in range(400):
        rig.exchange()
        rig.step()
        if rig.of(Failed, handle):
            break
    end = rig.end(handle)
    assert isinstance(end, Failed) and end.reason == common_pb2.PREEMPTED


def test_preempted_twice_in_a_row(make_rig: MakeRig) -> None:
    """B22: text equals Mono, no token twice, one pull an attempt; the third time it has all its pages and nobody takes them."""
    rig = make_rig(num_pages=8)
    told: list[int] = []
    for attempt in range(2):
        rig.start(OLD, greedy(440), handle=10 + attempt)  # 2 pages, 8 in the end
        key = RequestKey("young", 0, attempt)
        rig.start(YOUNG + told, greedy(440), handle=attempt, num_output_tokens=len(told), num_preemptions=attempt, key=key)
        run_to_preemption(rig, attempt)
        before = len(told)
        told += rig.tokens(attempt)
        assert told == mono(YOUNG, len(told)) and len(told) > before, "every life adds what it told"
        rig.cancel(10 + attempt)
        rig.step()
    rig.start(YOUNG + told, greedy(440), handle=2, num_output_tokens=len(told), num_preemptions=2, key=RequestKey("young", 0, 2))
    rig.start(OLD, greedy(440), handle=12)
    rig.run(800)
    assert [len(request.pages) for request in rig.delivered if request.handle == 2] == [8], "pages for all its max_tokens"
    assert told + rig.tokens(2) == mono(YOUNG, 440) and rig.tokens(12) == mono(OLD, 440)
    assert [event.handle for event in rig.of(Ready)] == [10, 0, 11, 1, 2, 12], "one pull an attempt"


def test_preempted_before_its_first_step_comes_back(make_rig: MakeRig) -> None:
    """B22."""
    rig = make_rig(num_pages=6, max_running=1)
    rig.start(OLD, greedy(200), handle=1)
    rig.start(YOUNG + YOUNG, greedy(100), handle=2)
    run_to_preemption(rig, 2)
    assert rig.tokens(2) == mono(YOUNG + YOUNG, 1), "only its first token, which is prefill's"
    told = rig.tokens(2)
    rig.start(YOUNG + YOUNG + told, greedy(100), handle=3, num_output_tokens=1, num_preemptions=1, key=RequestKey("r2", 0, 1))
    rig.run()
    assert told + rig.tokens(3) == mono(YOUNG + YOUNG, 100) and rig.tokens(1) == mono(OLD, 200)


def test_final_pages_of_the_preempted_stay_cached_and_give_way(make_rig: MakeRig) -> None:
    rig = make_rig(num_pages=5)
    rig.start(OLD, greedy(250), handle=1)  # 5 pages in the end: all there are
    rig.start(YOUNG, greedy(100), handle=2)  # 2 pages: one becomes final, and 3 in the end
    run_to_preemption(rig, 2)
    held = 5 - rig.kv.pool.num_available
    assert rig.kv.pool.pages.num_idle_cached == 2 and held == 3, "two final pages; the third went to who needed it"
    rig.run()
    assert rig.tokens(1) == mono(OLD, 250), "evicted when they were needed"
