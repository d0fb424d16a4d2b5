"""Requests that move from one decode rank to another: the text is the oracle's, and what goes along is all of it."""
from collections.abc import Callable
from typing import Any

import pytest
import torch

from proto.baton.v1 import common_pb2
from services.decode.messages import CaughtUp, Failed, Finished, Granted, MoveStart, Paused, Ready, RequestEvent, Resumed, Stop
from services.decode.moves import PAUSE_S
from services.kv.lease import LeaseEnded, LeaseState
from services.kv.messages import PeerRank, RequestKey
from services.model.params import SamplingParams
from tests.decode.move_rig import HANDLE, MoveRig
from tests.decode.rig import EOS, VOCAB, Rig, greedy, mono

PROMPT = [3 + 7 * i % 240 for i in range(150)]
MakeMoveRig = Callable[..., MoveRig]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 63, 64, 65])
@pytest.mark.parametrize("num_prompt_tokens", [1, 62, 63, 64, 65, 127, 128, 129])
def test_move_at_every_page_border(moving: MoveRig, num_prompt_tokens: int, num_tokens: int) -> None:
    prompt = PROMPT[:num_prompt_tokens]
    moving.start(prompt, greedy(72), num_tokens)
    moving.move()
    (paused,) = moving.of(Paused)
    (ready,) = moving.target.of(Ready, 1)
    assert ready.position == paused.num_output_tokens - 1 and ready.first_token.token_id == moving.source.tokens(HANDLE)[-1]
    (failed,) = moving.of(Failed)
    assert failed.reason == common_pb2.REPLACED and moving.source.kv.pool.num_available == 32, "the source holds nothing any more"
    num_steps = len(moving.source.forward.batches)
    moving.run()
    assert moving.text() == mono(prompt, 72)
    assert len(moving.source.forward.batches) == num_steps, "the source computed nothing after the pause"
    assert moving.source.loop.num_forwards + moving.target.loop.num_forwards == 71, "no token was computed twice"
    (finished,) = moving.target.of(Finished, 1)
    assert (finished.reason, finished.num_output_tokens) == (common_pb2.LENGTH, 72)


@pytest.mark.parametrize("num_steps", [1, 62, 63, 64, 65, 110])
def test_source_runs_on_while_the_target_pulls(moving: MoveRig, num_steps: int) -> None:
    moving.under_way(PROMPT, greedy(200), 5)
    moving.fabric.hold_reads = True
    for _ in range(num_steps):
        moving.step()
    assert not moving.target.of(CaughtUp)
    moving.fabric.hold_reads = False
    moving.exchange()
    assert len(moving.target.of(CaughtUp)) == 1
    moving.pause()
    moving.run()
    assert moving.text() == mono(PROMPT, 200) and len(moving.target.of(CaughtUp)) == 1
    transfer = moving.target.of(Ready, 1)[0].transfer
    assert transfer.num_pages == -(-(150 + 6 + num_steps) // 64)


def test_events_of_a_move_are_in_order(moving: MoveRig) -> None:
    moving.start(PROMPT, greedy(20), 5)
    moving.move()
    moving.run()
    kinds: list[type[RequestEvent]] = [type(event) for event in moving.target.events]
    assert [kind.__name__ for kind in kinds[:4]] == ["Claimed", "Granted", "CaughtUp", "Ready"]
    kinds = [type(event) for event in moving.source.events]
    assert [kind.__name__ for kind in kinds[-3:]] == ["StepOut", "Paused", "Failed"]


@pytest.mark.parametrize("behind", [0, 1, 3, 70])
def test_router_may_be_behind_the_source(moving: MoveRig, behind: int) -> None:
    moving.start(PROMPT, greedy(160), 80)
    moving.move(behind=behind)
    moving.run()
    assert moving.text() == mono(PROMPT, 160)


def test_short_request_announces_nothing_before_the_pause(moving: MoveRig) -> None:
    moving.under_way([7], greedy(40), 3)
    moving.exchange()
    assert moving.target.of(CaughtUp) and not moving.target.kv.transport.stats.num_pages, "an empty announcement is one"
    moving.pause()
    moving.run()
    assert moving.text() == mono([7], 40)


def test_pages_the_target_has_are_not_pulled(moving: MoveRig) -> None:
    moving.target.start(PROMPT, greedy(3), 9)
    moving.target.run()
    moving.start(PROMPT, greedy(60), 5)
    moving.move()
    assert (transfer := moving.target.of(Ready, 1)[0].transfer).num_cached_pages == 2 and transfer.num_pages == 1
    moving.run()
    assert moving.text() == mono(PROMPT, 60)


def test_pulled_output_pages_are_a_prefix_there(moving: MoveRig) -> None:
    moving.start(PROMPT, greedy(60), 55)
    moving.move()
    moving.run()
    moving.target.start(PROMPT + mono(PROMPT, 60), greedy(2), 9)
    moving.target.run()
    assert moving.target.of(Ready, 9)[0].transfer.num_cached_pages == 3


def test_replayed_request_moves(moving: MoveRig) -> None:
    sent = mono(PROMPT, 5)
    moving.start(PROMPT + sent, greedy(30), 3, num_output_tokens=5, key=RequestKey("r1", 0, 1))
    source = moving.source
    spec = source.delivered[0].spec
    moving.spec = spec
    told = source.tokens(HANDLE)
    moving.submit(2, token_ids=[*spec.token_ids, *told], num_output_tokens=5 + len(told))
    moving.step()
    moving.begin(2)
    moving.step()
    moving.pause(2)
    moving.run()
    assert moving.target.of(Ready, 2)[0].position == len(source.tokens(HANDLE)) + 4
    assert sent + source.tokens(HANDLE)[:-1] + moving.target.tokens(2) == mono(PROMPT, 30)


# ---- what goes along


def unmoved(params: Any, row: torch.Tensor, first_token: int) -> Rig:
    """The oracle: the same request on one rank."""
    rig = Rig()
    rig.forward.row = row
    spec = rig.spec(PROMPT, params)
    rig.submit(spec, HANDLE)
    rig.holder.hand_off(spec, rig.kv, first_token=first_token)
    rig.run()
    return rig


@pytest.mark.parametrize("fields", [
    {"frequency_penalty": 0.2},
    {"presence_penalty": 0.3, "repetition_penalty": 1.3, "logprobs": 3},
    {"logprobs": 0},
    {"min_tokens": 25, "logprobs": 2},
    {"temperature": 0.9, "seed": 11, "top_k": 20, "top_p": 0.9, "frequency_penalty": 0.5, "logprobs": 1},
    {"stop_token_ids": (9,), "frequency_penalty": 0.04},
])
@pytest.mark.parametrize("num_tokens", [1, 2, 12])
def test_sampling_goes_on_where_the_source_stopped(moving: MoveRig, fields: dict[str, Any], num_tokens: int) -> None:
    row = torch.full((VOCAB,), -4.0)
    row[5:15] = torch.linspace(1.0, 0.6, 10)
    row[EOS] = 9.0 if "min_tokens" in fields else -9.0
    params = SamplingParams(**{"max_tokens": 40, "seed": 1, "temperature": 0.0} | fields)
    oracle = unmoved(params, row, 5)
    moving.source.forward.row = moving.target.forward.row = row
    spec = moving.spec = moving.source.spec(PROMPT, params)
    moving.source.submit(spec, HANDLE)
    moving.source.holder.hand_off(spec, moving.source.kv, first_token=5)
    moving.exchange()
    assert moving.source.loop.take_waiting()
    while len(moving.source.tokens(HANDLE)) < num_tokens:
        moving.source.step()
    moving.move()
    moving.run()
    assert moving.text() == oracle.tokens(HANDLE) and len(moving.text()) > num_tokens
    ours, theirs = moving.target.end(1), oracle.end(HANDLE)
    assert isinstance(ours, Finished) and isinstance(theirs, Finished)
    assert (ours.reason, ours.num_output_tokens, ours.stop_token_id) == (theirs.reason, theirs.num_output_tokens, theirs.stop_token_id)
    if params.logprobs >= 0:
        theirs_by_index = {event.first_index[0]: event for event in oracle.events if type(event).__name__ == "StepOut"}
        for index, (logprob, top_ids, top_logprobs) in moving.columns().items():
            event = theirs_by_index[index]
            assert logprob == event.logprobs[0]
            assert (top_ids, top_logprobs) == (event.top_ids[0] if event.top_ids else [], event.top_logprobs[0] if event.top_ids else [])
        ready, index = moving.target.of(Ready, 1)[0].first_token, moving.target.of(Ready, 1)[0].position
        if index:
            event = theirs_by_index[index]
            assert ready.logprob == event.logprobs[0] and list(ready.top_ids) == (event.top_ids[0] if event.top_ids else [])
            assert list(ready.top_logprobs) == (event.top_logprobs[0] if event.top_ids else [])


def test_request_moves_on_and_back(moving: MoveRig) -> None:
    moving.start(PROMPT, greedy(120), 10)
    moving.move()
    for _ in range(10):
        moving.step()
    there = moving.target
    back = MoveRig.__new__(MoveRig)  # the same two ranks, the other way round
    back.source, back.target, back.clock, back.fabric, back.dead = there, moving.source, moving.clock, moving.fabric, set()
    back.spec, told = there.delivered[0].spec, moving.text()
    back.submit(2, token_ids=PROMPT + told, num_output_tokens=len(told))
    back.step()
    back.begin(2)
    back.step()
    back.pause(2)
    back.run()
    (ready,) = moving.source.of(Ready, 2)
    assert mono(PROMPT, 120)[ready.position :] == moving.source.tokens(2)
    assert there.end(1).reason == common_pb2.REPLACED


def test_request_that_waits_for_its_turn_moves(make_move_rig: MakeMoveRig) -> None:
    """READY, not RUNNING."""
    moving = make_move_rig(max_running=1)
    moving.source.start([9] * 20, greedy(30), handle=8)
    moving.source.exchange()
    moving.source.step()
    moving.start(PROMPT, greedy(20))
    moving.move()
    assert moving.source.tokens(HANDLE) == mono(PROMPT, 1), "it never ran there"
    moving.run()
    assert moving.text() == mono(PROMPT, 20) and moving.source.tokens(8) == mono([9] * 20, 30)


def test_others_run_on_while_one_moves(moving: MoveRig) -> None:
    moving.source.start([9] * 20, greedy(150), handle=8)
    moving.target.start([8] * 70, greedy(150), handle=9, key=RequestKey("other", 0, 0))
    moving.start(PROMPT, greedy(50), 4)
    moving.move()
    moving.run()
    assert moving.text() == mono(PROMPT, 50)
    assert moving.source.tokens(8) == mono([9] * 20, 150) and moving.target.tokens(9) == mono([8] * 70, 150)


# ---- what comes to nothing


def run_on(moving: MoveRig, num_tokens: int = 60, attempt: int = 1) -> None:
    """The source goes on as if nothing had been."""
    moving.run()
    assert moving.source.tokens(HANDLE) == mono(PROMPT, num_tokens)
    assert isinstance(moving.source.end(HANDLE), Finished)
    assert moving.text(attempt) == mono(PROMPT, num_tokens)


def test_request_that_outgrows_its_reserve_runs_on(moving: MoveRig) -> None:
    moving.under_way(PROMPT, greedy(400), 5)
    moving.exchange()
    for _ in range(240):
        moving.step()
    (failed,) = moving.target.of(Failed, 1)
    assert failed.reason == common_pb2.OVERLOADED and "outgrew" in failed.message
    (resumed,) = moving.of(Resumed)
    assert resumed.reason == common_pb2.OVERLOADED
    run_on(moving, 400)


def test_tokens_that_differ_from_the_submitted_are_refused(moving: MoveRig) -> None:
    moving.start(PROMPT, greedy(60), 5)
    moving.submit(token_ids=[*PROMPT, 4, 4, 4, 4], num_output_tokens=4)
    moving.step()
    moving.begin()
    moving.step()
    moving.pause()
    moving.settle()
    (failed,) = moving.target.of(Failed, 1)
    assert failed.reason == common_pb2.INTERNAL and "4 that the router submitted" in failed.message
    assert moving.of(Resumed)[0].reason == common_pb2.INTERNAL, "the source hears of it before it gives anything up"
    run_on(moving)


@pytest.mark.parametrize("phase", ["started", "paused"])
def test_router_calls_it_off(moving: MoveRig, phase: str) -> None:
    moving.under_way(PROMPT, greedy(60), 5)
    moving.fabric.hold_reads = True
    moving.step()
    if phase == "paused":
        moving.pause()
    moving.resume()
    assert moving.of(Resumed)[0].reason == common_pb2.CANCELLED
    moving.exchange()
    assert moving.target.end(1).reason == common_pb2.CANCELLED
    for read in list(moving.fabric.reads):
        read.complete()
    moving.fabric.hold_reads = False
    run_on(moving)


def test_pause_ends_by_itself(moving: MoveRig) -> None:
    moving.under_way(PROMPT, greedy(60), 5)
    moving.step()
    moving.fabric.hold_reads = True
    moving.pause()
    moving.clock.now += PAUSE_S - 0.1
    moving.step()
    assert not moving.of(Resumed)
    moving.clock.now += 0.1
    moving.step()
    (resumed,) = moving.of(Resumed)
    assert resumed.reason == common_pb2.DEADLINE and "2 s" in resumed.message
    moving.exchange()
    assert moving.target.end(1).reason == common_pb2.DEADLINE
    for read in list(moving.fabric.reads):
        assert moving.target.kv.pool.num_available < 32, "the read in flight holds its page"
        read.complete()
    moving.fabric.hold_reads = False
    run_on(moving)


def test_moved_again_after_it_was_called_off(moving: MoveRig) -> None:
    moving.start(PROMPT, greedy(60), 5)
    moving.submit(1)
    moving.step()
    moving.begin(1)
    moving.step()
    moving.pause(1)
    moving.resume(1)
    moving.settle()
    moving.move(2)
    moving.run()
    assert moving.text(2) == mono(PROMPT, 60) and len(moving.of(Paused)) == 2


def test_start_of_a_later_attempt_replaces_the_one_under_way(moving: MoveRig) -> None:
    moving.start(PROMPT, greedy(60), 5)
    moving.submit(1)
    moving.step()
    moving.begin(1)
    moving.step()
    moving.pause(1)
    moving.submit(2)
    moving.begin(2)
    moving.step()
    moving.pause(2)
    moving.settle()
    assert moving.target.end(1).reason == common_pb2.REPLACED
    moving.run()
    assert moving.text(2) == mono(PROMPT, 60) and not moving.of(Resumed)


@pytest.mark.parametrize("command", ["pause", "resume", "begin"])
def test_commands_of_another_attempt_are_without_effect(moving: MoveRig, command: str) -> None:
    moving.start(PROMPT, greedy(60), 5)
    moving.pause(1)
    moving.resume(1)
    assert not moving.of(Paused) and not moving.of(Resumed), "nothing moves yet"
    moving.submit(2)
    moving.step()
    moving.begin(2)
    moving.step()
    getattr(moving, command)(1)
    assert not moving.of(Paused) and not moving.of(Resumed)
    moving.pause(2)
    moving.pause(2)
    assert len(moving.of(Paused)) == 1
    moving.run()
    assert moving.text(2) == mono(PROMPT, 60)


def test_start_of_an_attempt_that_runs_here_is_refused(moving: MoveRig) -> None:
    moving.start(PROMPT, greedy(60), 5)
    moving.begin(0)
    assert moving.of(Resumed)[0].reason == common_pb2.STALE_ATTEMPT and not moving.source.loop.num_moves
    run_on(moving)


def test_an_attempt_is_started_once(moving: MoveRig) -> None:
    """The end of its first lease is still on the way, and would be taken for the second one's."""
    moving.start(PROMPT, greedy(60), 5)
    moving.submit(1)
    moving.exchange()
    moving.begin(1)
    moving.resume(1)
    moving.begin(1)
    assert [event.reason for event in moving.of(Resumed)] == [common_pb2.CANCELLED, common_pb2.STALE_ATTEMPT]
    assert not moving.source.loop.num_moves and not len(moving.source.kv.leases)
    moving.settle()
    run_on(moving)


def test_reader_that_is_no_peer_is_told_to_the_router(moving: MoveRig) -> None:
    moving.start(PROMPT, greedy(60), 5)
    moving.target.kv.transport.metadata = lambda: b"garbage"  # type: ignore[method-assign]
    moving.begin()
    (resumed,) = moving.of(Resumed)
    assert resumed.reason and not moving.source.loop.num_moves
    run_on(moving)


def test_reader_that_is_a_peer_no_more_is_told_to_the_router(moving: MoveRig) -> None:
    """Met by the handoff thread, closed before the main loop came to it."""
    moving.start(PROMPT, greedy(60), 5)
    reader = PeerRank(moving.target.kv.instance_id, "decode:2", 0, moving.target.kv.transport.metadata())
    command = MoveStart(1, HANDLE, 1, reader)
    assert moving.source.fetcher.meet_reader(command)
    moving.source.kv.transport.close_peer(reader.instance_id)
    moving.command(command)
    assert moving.of(Resumed)[0].reason == common_pb2.PEER_GONE and not moving.source.loop.num_moves
    run_on(moving)


def test_fence_at_the_source_lets_it_run_on(moving: MoveRig) -> None:
    spec = moving.under_way(PROMPT, greedy(60), 5)
    moving.step()
    with moving.source.kv.lock:
        moving.source.kv.leases.abort(spec.key, common_pb2.FENCED, "the rank renews its agent")
    moving.settle()
    assert moving.of(Resumed)[0].reason == common_pb2.FENCED and moving.target.end(1).reason == common_pb2.FENCED
    run_on(moving)


def test_lease_that_ends_unheard_holds_nobody_for_ever(moving: MoveRig) -> None:
    spec = moving.under_way(PROMPT, greedy(60), 5)
    moving.step()
    moving.pause()
    with moving.source.kv.lock:
        moving.source.kv.leases.abort(spec.key, common_pb2.FENCED, "")
        moving.source.kv.leases.take_ended()
    moving.clock.now += PAUSE_S
    moving.source.step()
    assert not moving.of(Resumed), "its end may be on the way"
    moving.clock.now += PAUSE_S
    moving.source.step()
    assert moving.of(Resumed)[0].reason == common_pb2.INTERNAL
    run_on(moving)


def test_reader_done_too_early_moves_nothing(moving: MoveRig) -> None:
    spec = moving.under_way(PROMPT, greedy(60), 5)
    moving.source.loop.inbox.put(LeaseEnded(spec.key, LeaseState.RELEASED, 0, ""))
    assert moving.source.loop.take_waiting()
    assert moving.of(Resumed)[0].reason == common_pb2.INTERNAL
    moving.cancel(moving.target, 1)
    moving.settle()
    with moving.source.kv.lock:
        moving.source.kv.leases.abort(spec.key, common_pb2.CANCELLED, "")
    run_on(moving)


def test_loop_with_none_but_paused_requests_keeps_their_time(moving: MoveRig) -> None:
    """The very loop of the engine: it wakes without a message, runs the request to its end, and stops."""
    moving.under_way(PROMPT, greedy(20), 5)
    moving.step()
    moving.pause()
    moving.clock.now += PAUSE_S
    loop, events = moving.source.loop, moving.source.events

    def emit(event: RequestEvent) -> None:
        events.append(event)
        if isinstance(event, Finished):
            loop.inbox.put(Stop())

    loop._emit = loop._moves._emit = emit  # type: ignore[attr-defined]
    loop.run()
    assert moving.of(Resumed) and moving.source.tokens(HANDLE) == mono(PROMPT, 20)
    moving.settle()
    assert moving.target.of(Granted, 1) and moving.target.end(1).reason == common_pb2.DEADLINE
