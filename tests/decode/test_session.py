"""A front's half of a session that resumes, spoken to message by message."""
from collections.abc import AsyncIterator

import grpc
import pytest

from proto.baton.v1 import common_pb2, decode_pb2
from services.decode.messages import Cancel, Claimed, SessionLost, Submit
from services.runtime.telemetry import INCIDENTS
from tests.decode.front_rig import Rig, running, submit
from tests.runtime.waiting import until

LONG_S = 60.0  # longer than any test


def numbered(sequence: int, request: decode_pb2.SessionRequest, ack: int = 0) -> decode_pb2.SessionRequest:
    request.sequence, request.ack = sequence, ack
    return request


async def late() -> AsyncIterator[decode_pb2.SessionRequest]:
    yield numbered(2, submit(2))


async def opened(rig: Rig, **fields: object) -> tuple[grpc.aio.StreamStreamCall, decode_pb2.SessionOpened]:
    call = await rig.open(**fields)
    first = await call.read()
    assert first.WhichOneof("message") == "opened" and first.sequence == 0
    return call, first.opened


async def test_a_stream_goes_on_where_the_last_one_broke() -> None:
    async with running(resume_s=LONG_S) as rig:
        call, said = await opened(rig)
        assert (said.resumed, said.next_request) == (False, 1)
        await call.write(numbered(1, submit(1)))
        await call.write(numbered(2, submit(2)))
        number = (await rig.commands(2))[0].session
        rig.emit(*[Claimed(number, 1, tokens) for tokens in (64, 128, 192)])
        assert [(await call.read()).sequence for _ in range(3)] == [1, 2, 3]
        call.cancel()
        rig.emit(Claimed(number, 2, 256))
        call, said = await opened(rig, next_message=3)
        assert (said.resumed, said.next_request) == (True, 3)
        replies = [await call.read() for _ in range(2)]
        assert [(reply.sequence, reply.claimed.num_cached_tokens, reply.ack) for reply in replies] == [(3, 192, 2), (4, 256, 2)]
        await call.write(numbered(3, submit(3), ack=4))
        assert isinstance((await rig.commands(3))[2], Submit)
        (session,) = rig.service._sessions.values()
        assert session.stream.num_unacked == 0
        call.cancel()


async def test_a_second_stream_takes_the_session_over_from_one_that_hangs() -> None:
    async with running(resume_s=LONG_S) as rig:
        old, _ = await opened(rig)
        await old.write(numbered(1, submit(1)))
        (submitted,) = await rig.commands(1)
        new, said = await opened(rig, next_message=1)
        assert (said.resumed, said.next_request) == (True, 2) and rig.service.num_sessions == 1
        assert await old.read() == grpc.aio.EOF
        (session,) = rig.service._sessions.values()
        assert session._expiry is None, "the end of the old stream breaks nothing"
        await rig.service._read(session, session.stream.current - 1, late())  # still under way in the old stream
        assert len(rig.rank.commands) == 1, "the new stream brings it again"
        await new.write(numbered(2, submit(3)))
        assert [command.handle for command in await rig.commands(2)] == [1, 3]  # type: ignore[attr-defined]
        rig.emit(Claimed(submitted.session, 1, 64))
        assert (await new.read()).claimed.handle == 1
        old.cancel()
        new.cancel()


@pytest.mark.parametrize("fields", [{"next_message": 0}, {"next_message": 5}, {"next_message": 2, "router_id": "other"}])
async def test_a_stream_that_resumes_nothing_opens_a_new_session(fields: dict[str, object]) -> None:
    """And ends the one that this router had, but no other router's."""
    async with running(resume_s=LONG_S) as rig:
        call, _ = await opened(rig)
        await call.write(numbered(1, submit(1)))
        (submitted,) = await rig.commands(1)
        rig.emit(Claimed(submitted.session, 1, 64))
        assert (await call.read()).sequence == 1
        other, said = await opened(rig, **fields)
        assert (said.resumed, said.next_request) == (False, 1)
        if "router_id" in fields:
            assert rig.service.num_sessions == 2 and len(rig.rank.commands) == 1
        else:
            assert (await rig.commands(2))[1] == SessionLost(submitted.session) and rig.service.num_sessions == 1
            assert await call.read() == grpc.aio.EOF
        call.cancel()
        other.cancel()


async def test_what_was_acknowledged_cannot_be_asked_for_again() -> None:
    async with running(resume_s=LONG_S) as rig:
        call, _ = await opened(rig)
        await call.write(numbered(1, submit(1)))
        (submitted,) = await rig.commands(1)
        rig.emit(Claimed(submitted.session, 1, 64), Claimed(submitted.session, 1, 64))
        assert [(await call.read()).sequence for _ in range(2)] == [1, 2]
        await call.write(numbered(2, submit(2), ack=2))
        await rig.commands(2)
        _, said = await opened(rig, next_message=2)
        assert not said.resumed
        assert (await rig.commands(3))[2] == SessionLost(submitted.session)


async def test_the_engine_hears_of_a_session_that_was_not_resumed_in_time() -> None:
    async with running(resume_s=0.01) as rig:
        call, _ = await opened(rig)
        await call.write(numbered(1, submit(1)))
        (submitted,) = await rig.commands(1)
        assert rig.service.num_active() == 1
        call.cancel()
        assert (await rig.commands(2))[1] == SessionLost(submitted.session)
        assert rig.service.num_active() == rig.service.num_sessions == 0
        _, said = await opened(rig, next_message=1)
        assert not said.resumed


async def test_a_resumed_session_does_not_expire() -> None:
    """The timer of the first break must not end the stream that came after it."""
    async with running(resume_s=LONG_S) as rig:
        call, _ = await opened(rig)
        (session,) = rig.service._sessions.values()
        call.cancel()
        await until(lambda: session._expiry is not None, "the front has noticed")
        expiry = session._expiry
        call, said = await opened(rig, next_message=1)
        assert said.resumed and expiry.cancelled() and session._expiry is None
        call.cancel()


async def test_a_message_that_comes_twice_is_counted_and_ignored() -> None:
    async with running() as rig:
        counter = INCIDENTS.labels("session message came twice", "")
        before = counter._value.get()
        call, _ = await opened(rig)
        await call.write(numbered(1, submit(1)))
        await call.write(numbered(1, submit(1)))
        await call.write(numbered(2, decode_pb2.SessionRequest(cancel=decode_pb2.Cancel(handle=1, reason=common_pb2.CANCELLED))))
        submitted, cancelled = await rig.commands(2)
        assert isinstance(submitted, Submit) and isinstance(cancelled, Cancel) and counter._value.get() == before + 1
        call.cancel()


@pytest.mark.parametrize(("request_", "words"), [
    (numbered(2, submit(1)), "message 1 is missing"),
    (numbered(0, submit(1)), "numbered from 1"),
    (numbered(1, submit(1), ack=7), "only 0 messages"),
])
async def test_numbers_that_cannot_be_end_the_session(request_: decode_pb2.SessionRequest, words: str) -> None:
    async with running() as rig:
        call, _ = await opened(rig)
        await call.write(request_)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and words in str(caught.value.details())
        assert not any(isinstance(command, Submit) for command in rig.rank.commands)


async def test_an_engine_that_dies_takes_broken_sessions_with_it() -> None:
    async with running(resume_s=LONG_S) as rig:
        call, _ = await opened(rig)
        await call.write(numbered(1, submit(1)))
        await rig.commands(1)
        call.cancel()
        (session,) = rig.service._sessions.values()
        await until(lambda: session._expiry is not None, "the front has noticed")
        rig.rank.is_down = True
        rig.service.on_down(rig.rank, "d1")  # type: ignore[arg-type]
        assert session.number not in rig.service._sessions and rig.service.num_active() == 0


async def test_an_end_that_comes_while_the_stream_is_broken_is_told_by_the_next_one() -> None:
    async with running(resume_s=LONG_S) as rig:
        call, _ = await opened(rig)
        await call.write(numbered(1, submit(1)))
        (submitted,) = await rig.commands(1)
        call.cancel()
        rig.service.drain()
        rig.emit(Claimed(submitted.session, 1, 64))
        rig.service._end_drain()
        call, said = await opened(rig, next_message=1)
        assert said.resumed and (await call.read()).draining.seconds_left == 7
        assert (await call.read()).claimed.handle == 1 and (await call.read()).failed.reason == common_pb2.DRAINING
        call.cancel()
