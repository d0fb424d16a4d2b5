"""The front's side: sessions over real gRPC, ranks replaced by a list of commands."""
import math
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from proto.baton.v1 import common_pb2, decode_pb2
from services.decode.messages import (
    Cancel,
    CaughtUp,
    Claimed,
    Failed,
    Finished,
    FirstToken,
    Granted,
    MovePause,
    MoveResume,
    MoveStart,
    Paused,
    Ready,
    Resumed,
    SessionLost,
    StepOut,
    Submit,
    TransferTimes,
)
from services.kv.messages import PeerRank, RequestKey
from services.runtime import resume
from services.runtime.serve import WIRE_VERSION
from tests.decode.front_rig import Rig, running, sampling, submit


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running() as made:
        yield made


async def test_submit_reaches_the_rank_whole(rig: Rig) -> None:
    call = await rig.opened()
    await call.write(submit())
    (command,) = await rig.commands(1)
    assert isinstance(command, Submit) and command.handle == 1
    spec = command.spec
    assert spec.key == RequestKey("q", 0, 3) and spec.token_ids == [5, 6, 7] and spec.num_output_tokens == 1 and spec.salt == b"s"
    assert spec.source == PeerRank("p1", "h:1", 4, b"blob") and spec.num_preemptions == 2 and spec.timeout_s == 2.5
    params = spec.params
    assert (params.temperature, params.top_k, params.min_tokens, params.max_tokens, params.stop_token_ids) == (0.5, 3, 1, 9, (4, 8))
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.5, 0.25, 0.5)
    assert (params.seed, params.logprobs, params.ignore_eos) == (2**64 - 1, 2, True)
    assert params.top_p == pytest.approx(0.9) and params.min_p == pytest.approx(0.1)
    call.cancel()


async def test_replies_are_numbered_and_complete(rig: Rig) -> None:
    call = await rig.opened()
    await call.write(submit(1))
    await call.write(submit(2))
    number = (await rig.commands(2))[0].session
    times = TransferTimes(num_pages=3, num_cached_pages=1, num_bytes=99, read_us=5, exposed_us=4, wait_us=6, transport="cma")
    rig.emit(
        Claimed(number, 1, 64),
        Ready(number, 1, 1, FirstToken(7, None, (), ()), times),
        Ready(number, 2, 1, FirstToken(7, -0.5, (7, 8), (-0.5, -1.0)), times),
        StepOut(session=number, handles=[1, 2], first_index=[2, 2], num_tokens=[1, 1], token_ids=[9, 8], logprobs=[math.nan, -0.25],
                top_ids=[[], [8]], top_logprobs=[[], [-0.25]], step_us=11),
        Finished(number, 1, common_pb2.STOP, 3, 9, 77),
        Failed(number, 2, common_pb2.PREEMPTED, "no page"),
    )
    replies = [await call.read() for _ in range(6)]
    assert [reply.sequence for reply in replies] == [1, 2, 3, 4, 5, 6]
    claimed, ready, asked, step, finished, failed = (getattr(reply, reply.WhichOneof("message")) for reply in replies)
    assert claimed == decode_pb2.Claimed(handle=1, num_cached_tokens=64)
    assert (ready.handle, ready.attempt, ready.position, ready.first_token.id) == (1, 3, 1, 7) and math.isnan(ready.first_token.logprob)
    assert ready.transfer == common_pb2.Transfer(
        num_pages=3, num_cached_pages=1, num_bytes=99, read_us=5, exposed_us=4, wait_us=6, transport="cma"
    )
    assert asked.first_token.logprob == -0.5 and list(asked.first_token.top_logprobs.token_ids) == [7, 8]
    assert (list(step.handles), list(step.attempts), list(step.first_index)) == ([1, 2], [3, 3], [2, 2])
    assert (list(step.num_tokens), list(step.token_ids), step.step_us) == ([1, 1], [9, 8], 11)
    assert math.isnan(step.logprobs[0]) and step.logprobs[1] == -0.25
    assert [list(top.token_ids) for top in step.top_logprobs] == [[], [8]]
    assert finished == decode_pb2.RequestFinished(
        handle=1, attempt=3, reason=common_pb2.STOP, num_output_tokens=3, stop_token_id=9, decode_us=77
    )
    assert failed == decode_pb2.RequestFailed(handle=2, attempt=3, reason=common_pb2.PREEMPTED, message="no page")
    assert rig.service.num_active() == 0
    call.cancel()


@pytest.mark.parametrize("fields", [{"instance_id": "d0"}, {"wire_version": WIRE_VERSION + 1}])
async def test_other_incarnation_or_version_is_refused(rig: Rig, fields: dict[str, object]) -> None:
    call = await rig.open(**fields)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert str(next(iter(fields.values()))) in str(caught.value.details())


@pytest.mark.parametrize("request_", [submit(), decode_pb2.SessionRequest()])
async def test_first_message_must_open(rig: Rig, request_: decode_pb2.SessionRequest) -> None:
    call = rig.stub.Session()
    await call.write(request_)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("second", [submit(1), decode_pb2.SessionRequest(open=decode_pb2.SessionOpen())])
async def test_broken_protocol_ends_the_session(rig: Rig, second: decode_pb2.SessionRequest) -> None:
    call = await rig.opened()
    await call.write(submit(1))
    await call.write(second)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance((await rig.commands(2))[1], SessionLost)


async def test_cancel_is_passed_on_and_ends_the_request_here(rig: Rig) -> None:
    call = await rig.opened()
    await call.write(submit(1))
    await call.write(decode_pb2.SessionRequest(cancel=decode_pb2.Cancel(handle=1, reason=common_pb2.SLOW_CLIENT)))
    await call.write(decode_pb2.SessionRequest(cancel=decode_pb2.Cancel(handle=1)))
    await call.write(submit(2))
    submitted, cancelled, _ = await rig.commands(3)
    assert cancelled == Cancel(submitted.session, 1, common_pb2.SLOW_CLIENT)
    rig.emit(Failed(submitted.session, 1, common_pb2.INTERNAL, "late"), Claimed(submitted.session, 2, 0))
    assert (await call.read()).claimed.handle == 2, "what crossed the cancel is dropped"
    call.cancel()


async def test_broken_session_is_told_to_the_rank(rig: Rig) -> None:
    call = await rig.opened()
    await call.write(submit(1))
    await rig.commands(1)
    call.cancel()
    submitted, lost = await rig.commands(2)
    assert lost == SessionLost(submitted.session)


async def test_sessions_do_not_mix(rig: Rig) -> None:
    first, second = await rig.opened("r1"), await rig.opened("r2")
    await first.write(submit(1))
    await rig.commands(1)
    await second.write(submit(1))
    one, two = await rig.commands(2)
    assert one.session != two.session
    rig.emit(Claimed(two.session, 1, 64), Claimed(one.session, 1, 128))
    assert (await first.read()).claimed.num_cached_tokens == 128
    assert (await second.read()).claimed.num_cached_tokens == 64
    first.cancel()
    second.cancel()


async def test_engine_death_fails_requests_and_ends_the_stream(rig: Rig) -> None:
    call = await rig.opened()
    await call.write(submit(1))
    await rig.commands(1)
    rig.rank.is_down = True
    rig.service.on_down(rig.rank, "d1")  # type: ignore[arg-type]
    failed = (await call.read()).failed
    assert (failed.handle, failed.attempt, failed.reason) == (1, 3, common_pb2.ENGINE_DIED)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and "d1" in str(caught.value.details())


async def test_drain_refuses_new_requests_and_keeps_old_ones(rig: Rig) -> None:
    call = await rig.opened()
    await call.write(submit(1))
    (submitted,) = await rig.commands(1)
    rig.service.drain()
    await call.write(submit(2))
    assert (await call.read()).draining.seconds_left == 7
    failed = (await call.read()).failed
    assert (failed.handle, failed.reason) == (2, common_pb2.DRAINING)
    assert rig.service.num_active() == 1
    rig.emit(Finished(submitted.session, 1, common_pb2.LENGTH, 9, 0, 1))
    assert (await call.read()).finished.num_output_tokens == 9
    assert rig.service.num_active() == 0
    call.cancel()


@pytest.mark.parametrize(("fields", "reason", "words"), [
    ({"fingerprint": "g"}, common_pb2.FINGERPRINT_MISMATCH, ["f here", "g at the holder"]),
    ({"prompt": common_pb2.Prompt()}, common_pb2.INVALID, ["num_output_tokens"]),
    ({"prompt": common_pb2.Prompt(token_ids=[1], num_output_tokens=1)}, common_pb2.INVALID, ["num_output_tokens"]),
    ({"sampling": common_pb2.Sampling(grammar=b"x", max_tokens=3)}, common_pb2.INVALID, ["grammar"]),
    ({"sampling": sampling(stop_token_ids=[5, 4_000_000_000])}, common_pb2.INVALID, ["stop_token_ids is 4000000000", "260"]),
    ({"sampling": sampling(temperature=math.nan)}, common_pb2.INVALID, ["temperature is nan"]),
    ({"sampling": sampling(logprobs=100_000)}, common_pb2.INVALID, ["logprobs is 100000", "20"]),
    ({"prompt": common_pb2.Prompt(token_ids=[1, 260])}, common_pb2.INVALID, ["prompt.token_ids[1] is 260", "vocab_size 260"]),
])
async def test_refusals_are_typed(rig: Rig, fields: dict[str, object], reason: int, words: list[str]) -> None:
    call = await rig.opened()
    await call.write(submit(1, **fields))
    failed = (await call.read()).failed
    assert failed.reason == reason and all(word in failed.message for word in words)
    assert rig.rank.commands == []
    call.cancel()


async def test_rank_that_takes_no_command_fails_the_request(rig: Rig) -> None:
    call = await rig.opened()
    rig.rank.is_down = True
    await call.write(submit(1))
    assert (await call.read()).failed.reason == common_pb2.ENGINE_DIED
    call.cancel()


async def test_an_engine_that_takes_no_command_costs_no_other_request_its_session(rig: Rig) -> None:
    """Between an engine's death and the front's hearing of it: a cancel or a step of a move must not break the stream of all."""
    call = await rig.opened()
    await call.write(submit(1))
    await call.write(submit(2))
    submitted, _ = await rig.commands(2)
    rig.rank.is_down = True
    await call.write(decode_pb2.SessionRequest(cancel=decode_pb2.Cancel(handle=1)))
    await call.write(move(decode_pb2.Move.PAUSE, handle=2))
    resumed = (await call.read()).resumed
    assert (resumed.handle, resumed.reason) == (2, common_pb2.ENGINE_DIED)
    rig.emit(Claimed(submitted.session, 2, 0))
    assert (await call.read()).claimed.handle == 2, "the session lives until its engine is known to be dead"
    assert rig.service.num_active() == 1
    call.cancel()


def move(step: decode_pb2.Move.Step, handle: int = 1, **fields: object) -> decode_pb2.SessionRequest:
    return decode_pb2.SessionRequest(move=decode_pb2.Move(handle=handle, step=step, new_attempt=4, **fields))  # type: ignore[arg-type]


READER = common_pb2.Rank(instance_id="d2", role="decode", pool_address="h:2", rank=1, peer=b"blob")


async def test_a_move_is_passed_through_both_ways(rig: Rig) -> None:
    call = await rig.opened()
    await call.write(submit(1))
    await call.write(move(decode_pb2.Move.START, reader=READER, fingerprint="f"))
    await call.write(move(decode_pb2.Move.PAUSE))
    await call.write(move(decode_pb2.Move.RESUME))
    submitted, *steps = await rig.commands(4)
    number = submitted.session
    assert steps == [MoveStart(number, 1, 4, PeerRank("d2", "h:2", 1, b"blob")), MovePause(number, 1, 4), MoveResume(number, 1, 4)]
    rig.emit(Granted(number, 1), CaughtUp(number, 1), Paused(number, 1, 7), Resumed(number, 1, common_pb2.PEER_GONE, "no target"),
             Failed(number, 1, common_pb2.REPLACED, "moved"))
    granted, caught_up, paused, resumed, failed = [await call.read() for _ in range(5)]
    assert granted.granted == decode_pb2.Granted(handle=1, attempt=3)
    assert caught_up.caught_up == decode_pb2.CaughtUp(handle=1, attempt=3)
    assert paused.paused == decode_pb2.Paused(handle=1, attempt=3, num_output_tokens=7)
    assert resumed.resumed == decode_pb2.Resumed(handle=1, attempt=3, reason=common_pb2.PEER_GONE, message="no target")
    assert failed.failed.reason == common_pb2.REPLACED and rig.service.num_active() == 0
    call.cancel()


async def test_a_move_to_another_model_is_refused_and_the_request_stays(rig: Rig) -> None:
    call = await rig.opened()
    await call.write(submit(1))
    await call.write(move(decode_pb2.Move.START, reader=READER, fingerprint="g"))
    resumed = (await call.read()).resumed
    assert (resumed.handle, resumed.attempt, resumed.reason) == (1, 3, common_pb2.FINGERPRINT_MISMATCH)
    assert "f here and g" in resumed.message and len(rig.rank.commands) == 1 and rig.service.num_active() == 1
    call.cancel()


async def test_a_move_of_a_request_that_is_over_is_ignored(rig: Rig) -> None:
    call = await rig.opened()
    await call.write(move(decode_pb2.Move.PAUSE, handle=9))
    await call.write(submit(1))
    (command,) = await rig.commands(1)
    assert isinstance(command, Submit)
    call.cancel()


async def test_an_unknown_step_of_a_move_ends_the_session(rig: Rig) -> None:
    call = await rig.opened()
    await call.write(submit(1))
    await call.write(move(decode_pb2.Move.STEP_UNSPECIFIED))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "START, PAUSE or RESUME" in str(caught.value.details())


async def test_router_that_reads_nothing_loses_its_session(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "MAX_UNACKED", 5)
    call = await rig.opened()
    await call.write(submit(1))
    (submitted,) = await rig.commands(1)
    rig.emit(*[Claimed(submitted.session, 1, 0)] * 6)  # in one turn of the event loop: nothing is written meanwhile
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance((await rig.commands(2))[1], SessionLost)


@pytest.mark.parametrize("event", [
    lambda number: Failed(number, 1, 999, "from a newer peer"), lambda number: Finished(number, 1, 77, 9, 0, 1),
])
async def test_an_enum_value_of_a_newer_release_is_passed_on(rig: Rig, event: Callable[[int], object]) -> None:
    call = await rig.opened()
    await call.write(submit(1))
    (submitted,) = await rig.commands(1)
    rig.emit(event(submitted.session))
    reply = await call.read()
    assert reply.failed.reason == 999 or reply.finished.reason == 77
    call.cancel()


def step_of(number: int, handle: int, **changes: object) -> StepOut:
    columns = {"handles": [handle], "first_index": [2], "num_tokens": [1], "token_ids": [5], "logprobs": [], "top_ids": []}
    return StepOut(session=number, step_us=1, top_logprobs=[], **(columns | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("event", "is_end"), [
    (lambda number: Failed(number, 1, 2**40, "no enum holds this"), True),
    (lambda number: Finished(number, 1, common_pb2.STOP, -1, 0, 1), True),
    (lambda number: Claimed(number, 1, -1), False),
    (lambda number: step_of(number, 1, token_ids=[-1]), False),
    (lambda number: step_of(number, 1, top_ids=[[1]]), False),
])
async def test_an_event_that_is_no_reply_fails_its_request_alone(rig: Rig, event: Callable[[int], object], is_end: bool) -> None:
    """And the engine hears of it, unless the request is over there."""
    call = await rig.opened()
    await call.write(submit(1))
    await call.write(submit(2))
    number = (await rig.commands(2))[0].session
    rig.emit(event(number))
    failed = (await call.read()).failed
    assert (failed.handle, failed.attempt, failed.reason) == (1, 3, common_pb2.INTERNAL) and "cannot be sent" in failed.message
    cancels = (await rig.commands(2 if is_end else 3))[2:]
    assert cancels == ([] if is_end else [Cancel(number, 1, common_pb2.INTERNAL)])
    rig.emit(step_of(number, 2), step_of(number, 1))  # what follows of the failed one is dropped with it
    assert list((await call.read()).step.handles) == [2]
    rig.emit(Finished(number, 2, common_pb2.LENGTH, 9, 0, 1))
    replies = [await call.read(), await call.read()]
    assert replies[-1].finished.handle == 2 and rig.service.num_active() == 0
    call.cancel()


@pytest.mark.parametrize(("said", "means"), [
    (999, common_pb2.CANCELLED), (-5, common_pb2.CANCELLED), (0, common_pb2.CANCELLED), (common_pb2.SLOW_CLIENT, common_pb2.SLOW_CLIENT),
])
async def test_a_cancel_for_an_unknown_reason_is_a_cancel(rig: Rig, said: int, means: int) -> None:
    call = await rig.opened()
    await call.write(submit(1))
    await call.write(decode_pb2.SessionRequest(cancel=decode_pb2.Cancel(handle=1, reason=said)))  # type: ignore[arg-type]
    submitted, cancel = await rig.commands(2)
    assert cancel == Cancel(submitted.session, 1, means)
    call.cancel()
