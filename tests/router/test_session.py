"""Sessions outlive their streams (DESIGN.md section 3): a broken connection loses and doubles nothing for 3 s; nothing waits longer."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from proto.baton.v1 import common_pb2, decode_pb2
from services.decode.messages import Cancel, CaughtUp, Failed, Finished, Granted, MovePause, MoveStart, Paused, Resumed, SessionLost, Submit
from services.decode.server import DecodeService
from services.router.mailbox import Draining, RankFailed, StepSlice
from services.router.session import Session
from services.runtime import resume
from services.runtime.ipc import Up
from services.runtime.serve import Server
from services.runtime.telemetry import INCIDENTS
from tests.clear import CLEAR
from tests.decode.front_rig import UP, FakeRank
from tests.router.session_rig import Inbox, SessionRig, running_session
from tests.runtime.waiting import until

SEED = 20
PATIENCE_S = 20.0  # an upper bound for what must not hang


async def broken_and_resumed(rig: SessionRig) -> None:
    """The connection breaks now; both sides are past it."""
    number = rig.session.num_resumed
    rig.proxy.cut()
    await until(lambda: rig.session.num_resumed > number and rig.session.is_open, "the session is resumed")


async def in_flight(rig: SessionRig, side: Any, say: Callable[[], object], is_delivered: bool) -> None:
    """`say()` makes one message from `side`, and the connection breaks before it arrives, or before its acknowledgement does."""
    if is_delivered:
        other_way = rig.proxy.swallow("server" if side == "client" else "client")
        say()
        await until(lambda: arrived(rig), "the message is there")
        assert not other_way.is_set()
    else:
        swallowed = rig.proxy.swallow(side)
        say()
        async with asyncio.timeout(PATIENCE_S):
            await swallowed.wait()
        assert not arrived(rig)
    await broken_and_resumed(rig)


def arrived(rig: SessionRig) -> bool:
    """Whether more has arrived than what every test of this kind begins with: one request, and its first token."""
    events = [event for entry in rig.session._requests.values() for event in entry.mailbox.events]  # type: ignore[attr-defined]
    return len(rig.commands) > 1 or any(isinstance(event, StepSlice | decode_pb2.Ready | Draining) for event in events)


@pytest.mark.parametrize("is_delivered", [False, True], ids=["lost", "unacknowledged"])
@pytest.mark.parametrize("kind", ["submit", "cancel", "move"])
async def test_a_break_while_a_request_is_in_flight(kind: str, is_delivered: bool) -> None:
    async with running_session() as rig:
        command, _ = await rig.submitted()
        say = {
            "submit": rig.submit,
            "cancel": lambda: rig.session.cancel(command.handle, common_pb2.SLOW_CLIENT),
            "move": lambda: rig.session.move(command.handle, decode_pb2.Move.PAUSE, 2),
        }[kind]
        await in_flight(rig, "client", say, is_delivered)
        marker, inbox = await rig.submitted()  # sessions are in order: what was to arrive is there before it
        between = rig.commands[1:-1]
        number = command.session
        if kind == "submit":
            assert [type(item) for item in between] == [Submit] and between[0].spec.key.request_id == "request-2"
        elif kind == "cancel":
            assert between == [Cancel(number, command.handle, common_pb2.SLOW_CLIENT)]
        else:
            assert between == [MovePause(number, command.handle, 2)]
        assert marker.session == number and not inbox.events, "the same session goes on"


@pytest.mark.parametrize("is_delivered", [False, True], ids=["lost", "unacknowledged"])
@pytest.mark.parametrize("kind", ["ready", "step"])
async def test_a_break_while_a_reply_is_in_flight(kind: str, is_delivered: bool) -> None:
    async with running_session() as rig:
        command, inbox = await rig.submitted()
        event = rig.ready(command) if kind == "ready" else rig.step(command, 1)
        await in_flight(rig, "server", lambda: rig.front.emit(event), is_delivered)
        rig.front.emit(rig.step(command, 2), Finished(command.session, command.handle, common_pb2.LENGTH, 3, 0, 1))
        await until(lambda: rig.session.num_requests == 0, "the request is finished")
        first, step, finished = inbox.events
        assert isinstance(first, decode_pb2.Ready) if kind == "ready" else first.token_ids == [1]
        assert (step.first_index, step.token_ids) == (2, [2]) and finished.num_output_tokens == 3
        assert [type(item) for item in rig.commands] == [Submit], "the engine has noticed nothing"


async def test_a_stream_takes_over_from_one_whose_break_the_front_has_not_noticed() -> None:
    async with running_session() as rig:
        command, inbox = await rig.submitted()
        rig.proxy.swallow("server")
        rig.front.emit(rig.step(command, 1))  # into the stream that is dead
        rig.proxy.cut_half()
        await until(lambda: rig.session.num_resumed == 1, "the session is resumed")
        rig.front.emit(rig.step(command, 2))
        await until(lambda: len(inbox.events) == 2, "both tokens are here")
        assert [event.token_ids for event in inbox.events] == [[1], [2]] and rig.service.num_sessions == 1
        rig.proxy.cut_other_half()  # now it notices: that must not touch the session's present stream
        rig.front.emit(rig.step(command, 3))
        await until(lambda: len(inbox.events) == 3, "the third token is here")
        await rig.submitted()
        assert rig.session.num_resumed == 1 and not any(isinstance(item, SessionLost) for item in rig.commands)


async def test_a_broken_session_takes_nothing_new_and_keeps_what_waits() -> None:
    async with running_session() as rig:
        command, inbox = await rig.submitted()
        rig.proxy.is_refusing = True
        rig.proxy.cut()
        await until(lambda: not rig.session.is_open, "the router has noticed")
        _, refused = rig.submit()
        assert [event.reason for event in refused.events] == [common_pb2.SESSION_LOST], "nothing is submitted to a broken session"
        rig.front.emit(rig.step(command, 1))
        rig.session.move(command.handle, decode_pb2.Move.RESUME, 2)
        assert rig.session.num_requests == 1 and not inbox.events
        rig.proxy.is_refusing = False
        await until(lambda: len(inbox.events) == 1 and len(rig.commands) == 2, "both directions have caught up")


async def test_a_session_not_resumed_in_time_is_lost_on_both_sides() -> None:
    async with running_session(resume_s=0.05, front_resume_s=0.05) as rig:
        command, inbox = await rig.submitted()
        rig.proxy.is_refusing = True
        rig.proxy.cut()
        await until(lambda: bool(inbox.events) and len(rig.commands) == 2, "both sides have given up")
        (lost,) = inbox.events
        assert isinstance(lost, RankFailed) and (lost.attempt, lost.role, lost.reason) == (1, "decode", common_pb2.SESSION_LOST)
        assert "not resumed within 0.05 s" in lost.message
        assert rig.commands[1] == SessionLost(command.session) and rig.service.num_active() == 0
        rig.proxy.is_refusing = False
        await rig.opened()
        again, _ = await rig.submitted()
        assert again.session != command.session and rig.session.num_resumed == 0


async def test_the_front_gives_up_first_and_the_router_hears_it() -> None:
    async with running_session(front_resume_s=0.01) as rig:
        _, inbox = await rig.submitted()
        rig.proxy.is_refusing = True
        rig.proxy.cut()
        await until(lambda: rig.service.num_sessions == 0, "the front has given up")
        rig.proxy.is_refusing = False
        await until(lambda: rig.session.is_open, "a new session is open")
        assert [event.reason for event in inbox.events] == [common_pb2.SESSION_LOST] and rig.session.num_resumed == 0


@pytest.mark.parametrize("resume_s", [0.0, 0.01], ids=["while it dials", "between dials"])
async def test_a_router_that_begins_anew_loses_what_it_had(resume_s: float) -> None:
    """Its own clock said 3 s first: the front's old session must not live on beside the new one."""
    async with running_session(resume_s) as rig:
        command, inbox = await rig.submitted()
        rig.proxy.is_refusing = True
        rig.proxy.cut()
        await until(lambda: bool(inbox.events), "the router has given up")
        rig.proxy.is_refusing = False
        await rig.opened()
        assert rig.commands[1] == SessionLost(command.session) and rig.service.num_sessions == 1


async def test_requests_are_lost_at_once_when_nobody_listens_any_more() -> None:
    async with running_session() as rig:
        _, inbox = await rig.submitted()
        await rig.proxy.stop()
        await until(lambda: bool(inbox.events), "the request is lost")
        assert inbox.events[0].reason == common_pb2.SESSION_LOST and not rig.session.is_open


async def test_requests_are_lost_at_once_when_the_rank_leaves_the_pool() -> None:
    async with running_session() as rig:
        _, inbox = await rig.submitted()
        rig.proxy.is_refusing = True
        rig.proxy.cut()
        await until(lambda: not rig.session.is_open, "the router has noticed")
        assert not inbox.events
        await rig.session.close()
        assert [event.reason for event in inbox.events] == [common_pb2.SESSION_LOST] and rig.session.num_requests == 0


@pytest.mark.parametrize("is_same", [True, False], ids=["same instance", "another instance"])
async def test_a_front_that_restarted_resumes_nothing(is_same: bool) -> None:
    async with running_session() as rig:
        _, inbox = await rig.submitted()
        service, rank, server = DecodeService(7.0, 60.0), FakeRank(), Server("127.0.0.1:0", [], CLEAR)
        if not is_same:
            rank.up = Up(**{name: getattr(UP, name) for name in UP.__struct_fields__} | {"instance_id": "d9"})
        service.register(server)
        service.attach([rank])  # type: ignore[list-item]
        await server.start()
        rig.proxy.port = int(server.address.rpartition(":")[2])
        rig.proxy.cut()
        await until(lambda: bool(inbox.events), "the request is lost")
        assert inbox.events[0].reason == common_pb2.SESSION_LOST and rig.session.num_resumed == 0
        assert rig.session.is_open == is_same, "another incarnation is not this rank"
        assert not rank.commands
        await rig.session.close()
        await server.stop(0)


@pytest.mark.parametrize("knows", [False, True], ids=["old id", "new id"])
async def test_a_session_lives_on_when_its_rank_renews_its_agent(knows: bool) -> None:
    async with running_session() as rig:
        command, inbox = await rig.submitted()
        rig.front.rank.up = Up(**{name: getattr(UP, name) for name in UP.__struct_fields__} | {"instance_id": "d2"})
        rig.service.on_renewed(rig.front.rank, "d1")  # type: ignore[arg-type]
        if knows:
            rig.session.renew(common_pb2.Rank(instance_id="d2", role="decode", pool_address=rig.proxy.address))
        await broken_and_resumed(rig)
        rig.front.emit(rig.step(command, 1))
        await until(lambda: len(inbox.events) == 1, "the token is here")
        _, other = await rig.submitted()
        rig.service.on_down(rig.front.rank, "d2")  # type: ignore[arg-type]
        await until(lambda: bool(other.events), "the engine's end is told")
        assert other.events[0].reason == common_pb2.ENGINE_DIED, "it is known by the new id"


async def test_hand_offs_under_an_old_instance_id_are_void() -> None:
    async with running_session() as rig:
        held, void = await rig.submitted(holder=common_pb2.Rank(instance_id="p1", role="prefill"))
        ready, runs = await rig.submitted(holder=common_pb2.Rank(instance_id="p1", role="prefill"))
        _, other = await rig.submitted(holder=common_pb2.Rank(instance_id="p2", role="prefill"))
        rig.front.emit(rig.ready(ready))
        await until(lambda: len(runs.events) == 1, "it runs")
        rig.session.fence("p1")
        assert [(event.role, event.reason) for event in void.events] == [("prefill", common_pb2.FENCED)]
        assert len(runs.events) == 1 and not other.events
        rig.session.renew(common_pb2.Rank(instance_id="d2", role="decode", pool_address=rig.proxy.address))
        rig.session.fence("d1")
        assert [(event.role, event.reason) for event in other.events] == [("decode", common_pb2.FENCED)]
        assert len(runs.events) == 1 and len(void.events) == 1, "told once; what runs stays"
        rig.session.cancel(held.handle, common_pb2.FENCED)
        await until(lambda: Cancel(held.session, held.handle, common_pb2.FENCED) in rig.commands, "the engine hears of it")


async def test_every_request_hears_of_a_drain_once_and_new_sessions_at_once() -> None:
    async with running_session() as rig:
        requests = [await rig.submitted() for _ in range(2)]
        rig.service.drain()
        await until(lambda: rig.session.is_draining, "the drain is told")
        await broken_and_resumed(rig)
        for _, inbox in requests:
            assert inbox.events == [Draining(1)]
        assert rig.session.is_open and not rig.session.is_usable
        async with CLEAR.open_channel(rig.proxy.address) as channel:
            late = Session(channel, "router-2", rig.session._rank, lambda: None)
            await until(lambda: late.is_draining, "the late one hears of it")
            await late.close()


async def test_a_drain_waits_for_moves_and_fails_what_is_left() -> None:
    async with running_session(drain_s=0.3) as rig:
        (moved, first), (stays, second) = await rig.submitted(), await rig.submitted()
        rig.service.drain()
        reader = common_pb2.Rank(instance_id="d2", role="decode", pool_address="h:2", rank=1)
        rig.session.move(moved.handle, decode_pb2.Move.START, 2, reader=reader, fingerprint="f")
        await until(lambda: any(isinstance(item, MoveStart) for item in rig.commands), "the engine hears of the move")
        assert rig.service.num_active() == 2
        number = moved.session
        handle = moved.handle
        rig.front.emit(Granted(number, handle), CaughtUp(number, handle), Paused(number, handle, 3),
                       Resumed(number, handle, common_pb2.READ_FAILED, "again"), Failed(number, handle, common_pb2.REPLACED, ""))
        assert rig.service.num_active() == 1
        await until(lambda: len(first.events) == 6, "the move is told")
        _, granted, caught_up, paused, resumed, failed = first.events
        assert granted.handle == caught_up.handle == moved.handle and paused.num_output_tokens == 3
        assert resumed.reason == common_pb2.READ_FAILED and failed.reason == common_pb2.REPLACED
        await until(lambda: rig.service.num_active() == 0, "the drain is over")
        await until(lambda: len(second.events) == 2, "what is left hears of it")
        assert second.events[1].reason == common_pb2.DRAINING
        assert rig.commands[-1] == Cancel(number, stays.handle, common_pb2.DRAINING)


async def test_a_front_that_takes_nothing_loses_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "MAX_UNACKED", 5)
    async with running_session() as rig:
        command, inbox = await rig.submitted()
        rig.proxy.is_refusing = True
        rig.proxy.cut()
        await until(lambda: not rig.session.is_open, "the router has noticed")
        for _ in range(6):
            rig.session.move(command.handle, decode_pb2.Move.RESUME, 2)
        assert [event.reason for event in inbox.events] == [common_pb2.SESSION_LOST] and "5 messages" in inbox.events[0].message


async def test_messages_are_acknowledged_and_forgotten() -> None:
    """Neither side keeps more than it must, whatever the balance of directions."""
    async with running_session() as rig:
        command, inbox = await rig.submitted()
        for index in range(1000):
            rig.front.emit(rig.step(command, index))
        await until(lambda: len(inbox.events) == 1000, "all are here")
        (session,) = rig.service._sessions.values()
        await until(lambda: session.stream.num_unacked < resume.ACK_EVERY, "the front has forgotten them")
        assert rig.session._stream.num_unacked == 0


async def test_replies_to_requests_that_are_over_are_counted() -> None:
    async with running_session() as rig:
        command, _ = await rig.submitted()
        counter = INCIDENTS.labels("step of a request that is over", "")
        before = counter._value.get()
        rig.proxy.swallow("client")
        rig.session.cancel(command.handle, common_pb2.CANCELLED)
        rig.front.emit(rig.step(command, 1))
        await until(lambda: rig.session.num_ignored == 1, "it has crossed the cancel")
        assert counter._value.get() == before + 1


@pytest.mark.parametrize("seed", range(SEED, SEED + 6))
async def test_random_breaks_lose_nothing_and_double_nothing(seed: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    async with running_session() as rig:
        inboxes: dict[str, Inbox] = {}
        told: dict[str, list[int]] = {}
        cancelled: dict[int, str] = {}
        for _ in range(120):
            draw = rng.random()
            if draw < 0.25:
                if rig.session.is_open:
                    handle, inbox = rig.submit()
                    inboxes[name := f"request-{rig._num_submits}"] = inbox
                    if rng.random() < 0.2:
                        rig.session.cancel(handle, common_pb2.CANCELLED)
                        cancelled[handle] = name
            elif draw < 0.75:
                for command in list(rig.commands):
                    if isinstance(command, Submit) and rng.random() < 0.5:
                        indexes = told.setdefault(command.spec.key.request_id, [])
                        rig.front.emit(rig.step(command, len(indexes)))
                        indexes.append(len(indexes))
            elif draw < 0.85:
                if rng.random() < 0.5:
                    rig.proxy.swallow(rng.choice(("client", "server")))
                else:
                    rng.choice((rig.proxy.cut, rig.proxy.cut_half))()
            else:
                await asyncio.sleep(rng.choice((0, 0.001, 0.01)))
        await broken_and_resumed(rig)
        await rig.submitted()
        submits = [command.spec.key.request_id for command in rig.commands if isinstance(command, Submit)]
        assert submits == [*inboxes, f"request-{rig._num_submits}"], "every submit reached the engine once, in order"
        cancels = [command.handle for command in rig.commands if isinstance(command, Cancel)]
        assert cancels == list(cancelled), "and so did every cancel"
        await until(lambda: all(len(inboxes[name].events) == len(told.get(name, [])) for name in inboxes if name not in cancelled.values()),
                    "every token is here")
        for name, inbox in inboxes.items():
            if name not in cancelled.values():
                assert [event.token_ids[0] for event in inbox.events] == told.get(name, [])
        assert not any(isinstance(command, SessionLost) for command in rig.commands)
