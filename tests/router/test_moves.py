"""A decode rank drains: what runs there goes on elsewhere, every token once and in order, whatever fails on the way."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from proto.baton.v1 import common_pb2, decode_pb2, generation_pb2, registry_pb2
from tests.router.byte_model import BOS, ids_of
from tests.router.fakes import DecodeSession, FakeDecode, Hook, ScriptEnds, until
from tests.router.rig import Answer, World, running

TEXT = "abcdefghijklmnopqrstuvwxyz" * 4
LENGTH = 50  # tokens of a request: prompt and output fit max_model_len
STEP_S = 0.004
MOVE, REPLAY = generation_pb2.Recovery.MOVE, generation_pb2.Recovery.REPLAY


def slow_down(world: World) -> None:
    for decode in world.decodes:
        decode.step_s = STEP_S


def source_of(world: World) -> FakeDecode:
    """Where the first attempt runs."""
    return next(decode for decode in world.decodes if decode.submits and decode.submits[0].key.attempt == 0)


def targets_of(world: World) -> list[FakeDecode]:
    source = source_of(world)
    return [decode for decode in world.decodes if decode is not source]


async def drained(
    world: World, prepare: Callable[[FakeDecode, list[FakeDecode]], None] | None = None, after: int = 5, **fields: object
) -> Answer:
    """A request whose decode rank drains after `after` tokens; `prepare(source, targets)` just before."""
    slow_down(world)
    answer, is_draining = Answer(), False
    async with contextlib.aclosing(world.stream(**{"max_tokens": LENGTH, **fields})) as replies:
        async for reply in replies:
            answer.take(reply)
            if len(answer.token_ids) >= after and not is_draining:
                is_draining = True
                if prepare is not None:
                    prepare(source_of(world), targets_of(world))
                source_of(world).drain()
    return answer


def check(answer: Answer, length: int = LENGTH) -> None:
    assert answer.text == TEXT[:length] and answer.token_ids == ids_of(TEXT[:length])
    assert answer.finished is not None and answer.finished.reason == common_pb2.LENGTH
    usage = answer.finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (6, length)


def once(hook: Hook) -> Hook:
    """`hook` the first time only."""
    calls: list[int] = []

    async def called(session: DecodeSession, submit: decode_pb2.Submit) -> None:
        calls.append(submit.handle)
        if len(calls) == 1:
            await hook(session, submit)

    return called


def failing_with(reason: common_pb2.Reason | None) -> Hook:
    """The request fails with `reason`; None: the session breaks."""
    async def fail(session: DecodeSession, submit: decode_pb2.Submit) -> None:
        if reason is None:
            session.end()
        else:
            session.failed(submit, reason)
        raise ScriptEnds

    return fail


async def never(session: DecodeSession, submit: decode_pb2.Submit) -> None:
    await asyncio.Event().wait()


async def test_move_changes_nothing_for_the_client(tmp_path: Path) -> None:
    async with running(tmp_path, decodes=2) as world:
        answer = await drained(world, logprobs=0, seed=5, frequency_penalty=0.5)
        check(answer)
        assert [token.logprob for token in answer.tokens] == [-0.25 * (i + 1) for i in range(LENGTH)]
        assert answer.finished is not None
        timeline = answer.finished.timeline
        (move,) = timeline.recoveries
        assert (move.path, move.reason, move.role, move.is_free) == (MOVE, common_pb2.DRAINING, "decode", True)
        assert 0 < move.us < 10_000_000 and 5 <= move.num_tokens < LENGTH and timeline.num_retries == 0
        source, (target,) = source_of(world), targets_of(world)
        (submit,) = target.submits
        assert submit.is_move and submit.key.attempt == 1 and submit.holder == source.rank and submit.fingerprint == "fp"
        assert submit.sampling == source.submits[0].sampling and submit.prompt.num_output_tokens == move.num_tokens
        assert list(submit.prompt.token_ids) == [BOS, *ids_of("hello"), *ids_of(TEXT[: move.num_tokens])]
        start, pause = source.moves
        assert (start.step, start.new_attempt, start.reader, start.fingerprint) == (decode_pb2.Move.START, 1, target.rank, "fp")
        assert (pause.step, pause.new_attempt) == (decode_pb2.Move.PAUSE, 1)
        assert source.cancels == target.cancels == [] and len(world.prefills[0].runs) == 1
        assert timeline.decode_rank.startswith(target.server.address)


async def test_stop_string_is_held_back_across_a_move(tmp_path: Path) -> None:
    async with running(tmp_path, decodes=2) as world:
        world.script = ids_of("abcDEFGhij" * 9)
        gate = asyncio.Event()

        def prepare(source: FakeDecode, targets: list[FakeDecode]) -> None:
            world.script = ids_of("abcDE" + "DE" * 10 + "FGhij" * 9)
            targets[0].hooks["moved"] = lambda session, submit: asyncio.sleep(0, gate.set())

        answer = await drained(world, prepare, after=4, stop=["DEFG"])
        assert gate.is_set(), "the move was over before the stop string"
        assert answer.text == "abcDE" + "DE" * 9 and answer.finished is not None and answer.finished.stop_string == "DEFG"
        await until(lambda: len(targets_of(world)[0].cancels) == 1, "the target is cancelled, and only it")


@pytest.mark.parametrize("how", ["failed", "session"])
@pytest.mark.parametrize("phase", ["claimed", "granted", "caught_up", "pulled"])
async def test_target_fails_and_another_try_succeeds(tmp_path: Path, phase: str, how: str) -> None:
    async with running(tmp_path, decodes=3) as world:
        failed: list[FakeDecode] = []

        def prepare(source: FakeDecode, targets: list[FakeDecode]) -> None:
            fails = failing_with(common_pb2.READ_FAILED if how == "failed" else None)

            async def fail(session: DecodeSession, submit: decode_pb2.Submit, decode: FakeDecode) -> None:
                if not failed:
                    failed.append(decode)
                    await fails(session, submit)

            for target in targets:
                target.hooks[phase] = lambda session, submit, target=target: fail(session, submit, target)  # type: ignore[misc]

        answer = await drained(world, prepare)
        check(answer)
        first, second = answer.recoveries
        reason = common_pb2.READ_FAILED if how == "failed" else common_pb2.SESSION_LOST
        assert (first.path, first.us) == (MOVE, 0) and (second.path, second.reason) == (MOVE, reason) and second.us > 0
        assert first.is_free and second.is_free and answer.finished is not None and answer.finished.timeline.num_retries == 0
        steps = [(move.step, move.new_attempt) for move in source_of(world).moves]
        expected = {"claimed": [], "granted": [(1, 1), (3, 1)], "caught_up": [(1, 1), (2, 1), (3, 1)], "pulled": [(1, 1), (2, 1), (3, 1)]}
        assert steps == [*expected[phase], (1, 2), (2, 2)]
        assert len(world.prefills[0].runs) == 1, "nothing is computed again"


@pytest.mark.parametrize("reason", [common_pb2.DEADLINE, common_pb2.LEASE_EXPIRED])
async def test_source_that_resumes_by_itself_is_moved_later(tmp_path: Path, reason: common_pb2.Reason) -> None:
    """2 s in the pause, or a lease that nobody renewed."""
    async with running(tmp_path, decodes=2) as world:
        def prepare(source: FakeDecode, targets: list[FakeDecode]) -> None:
            targets[0].hooks["pulled"] = once(never)

            async def resume(session: DecodeSession, submit: decode_pb2.Submit) -> None:
                source.sources[submit.handle].resume(reason)

            source.hooks["paused"] = once(resume)

        answer = await drained(world, prepare)
        check(answer)
        first, second = answer.recoveries
        assert (first.us, second.path, second.reason) == (0, MOVE, reason) and second.us
        assert [cancel.handle for cancel in targets_of(world)[0].cancels] == [targets_of(world)[0].submits[0].handle]


@pytest.mark.parametrize("how", ["failed", "session"])
@pytest.mark.parametrize("phase", ["claimed", "granted", "caught_up"])
async def test_source_lost_before_the_pause_is_replayed(tmp_path: Path, phase: str, how: str) -> None:
    async with running(tmp_path, decodes=2) as world:
        def prepare(source: FakeDecode, targets: list[FakeDecode]) -> None:
            async def lose(session: DecodeSession, submit: decode_pb2.Submit) -> None:
                if how == "session":
                    source.sessions[-1].end()
                else:
                    source.sessions[-1].failed(source.submits[0], common_pb2.ENGINE_DIED)
                    source.sources[source.submits[0].handle].abort()
                    source.step_s = 1000.0
                await never(session, submit)

            targets[0].hooks[phase] = once(lose)

        answer = await drained(world, prepare)
        check(answer)
        move, replay = answer.recoveries
        assert (move.path, move.us) == (MOVE, 0) and replay.path == REPLAY and replay.us and replay.is_free
        assert replay.reason == (common_pb2.SESSION_LOST if how == "session" else common_pb2.ENGINE_DIED)
        assert len(targets_of(world)[0].cancels) == 1 and len(world.prefills[0].runs) == 2


@pytest.mark.parametrize("is_target_ready", [True, False])
async def test_source_lost_in_the_pause(tmp_path: Path, is_target_ready: bool) -> None:
    """The target decides; one that is not ready soon is given up."""
    async with running(tmp_path, decodes=2) as world:
        source_is_gone = asyncio.Event()

        def prepare(source: FakeDecode, targets: list[FakeDecode]) -> None:
            async def lose(session: DecodeSession, submit: decode_pb2.Submit) -> None:
                session.failed(submit, common_pb2.ENGINE_DIED)
                source_is_gone.set()
                raise ScriptEnds

            async def wait(session: DecodeSession, submit: decode_pb2.Submit) -> None:
                await (source_is_gone if is_target_ready else asyncio.Event()).wait()

            source.hooks["paused"], targets[0].hooks["pulled"] = once(lose), once(wait)

        answer = await drained(world, prepare)
        check(answer)
        if is_target_ready:
            (move,) = answer.recoveries
            assert move.path == MOVE and move.us
        else:
            move, replay = answer.recoveries
            assert (move.us, replay.path, replay.reason, replay.is_free) == (0, REPLAY, common_pb2.ENGINE_DIED, True)
            assert replay.us < 5_000_000


async def test_ready_waits_for_the_sources_rest(tmp_path: Path) -> None:
    """The target's session is ahead of the source's: its tokens are held until none is missing."""
    async with running(tmp_path, decodes=2) as world:
        slow_down(world)

        def prepare(source: FakeDecode, targets: list[FakeDecode]) -> None:
            session = source.sessions[-1]
            late: list[dict[str, object]] = []
            send = session.send
            order: list[str] = []

            def hold(**message: object) -> None:
                late.append(message)

            async def granted(_: DecodeSession, submit: decode_pb2.Submit) -> None:
                session.send = hold  # type: ignore[method-assign]
                await asyncio.sleep(5 * STEP_S)  # the source runs on: several of its tokens are late

            async def moved(_: DecodeSession, submit: decode_pb2.Submit) -> None:
                async def flush() -> None:
                    await asyncio.sleep(20 * STEP_S)  # the target runs meanwhile
                    order.append("flush")
                    session.send = send  # type: ignore[method-assign]
                    assert sum("step" in message for message in late) >= 2 and any("paused" in message for message in late)
                    for message in late:
                        send(**message)

                world.late = asyncio.ensure_future(flush())  # type: ignore[attr-defined]

            targets[0].hooks["granted"], targets[0].hooks["moved"] = granted, moved

        answer = await drained(world, prepare)
        check(answer)
        (move,) = answer.recoveries
        assert move.path == MOVE and move.us


async def test_source_that_did_not_hear_of_the_end_is_cancelled(tmp_path: Path) -> None:
    """Done was lost: it resumes; its tokens are those of an old attempt."""
    async with running(tmp_path, decodes=2) as world:
        def prepare(source: FakeDecode, targets: list[FakeDecode]) -> None:
            async def moved(session: DecodeSession, submit: decode_pb2.Submit) -> None:
                move = world.moving(submit.key, submit.key.attempt)
                move.is_done = False  # before the source looks
                source.sources[source.submits[0].handle].resume(common_pb2.DEADLINE)

            targets[0].hooks["moved"] = moved

        answer = await drained(world, prepare)
        check(answer)
        assert [move.path for move in answer.recoveries] == [MOVE] and answer.recoveries[0].us
        await until(lambda: [cancel.reason for cancel in source_of(world).cancels] == [common_pb2.REPLACED], "the source is cancelled")


async def test_request_that_ends_while_it_moves(tmp_path: Path) -> None:
    async with running(tmp_path, decodes=2) as world:
        def prepare(source: FakeDecode, targets: list[FakeDecode]) -> None:
            targets[0].hooks["granted"] = never

        answer = await drained(world, prepare)
        check(answer)
        assert [(move.path, move.us) for move in answer.recoveries] == [(MOVE, 0)]
        await until(lambda: len(targets_of(world)[0].cancels) == 1, "the target is told")
        assert source_of(world).cancels == []


async def test_no_other_rank_until_one_joins(tmp_path: Path) -> None:
    async with running(tmp_path, decodes=1) as world:
        joining: list[asyncio.Task[object]] = []

        def prepare(source: FakeDecode, targets: list[FakeDecode]) -> None:
            source.step_s = 0.02
            joining.append(asyncio.create_task(world.add("decode", step_s=STEP_S)))

        answer = await drained(world, prepare)
        check(answer)
        assert [move.path for move in answer.recoveries] == [MOVE] and answer.recoveries[0].us


async def test_drain_that_ends_before_the_move_is_a_free_replay(tmp_path: Path) -> None:
    async with running(tmp_path, decodes=1, retries=0) as world:
        leaving: list[asyncio.Task[object]] = []

        def prepare(source: FakeDecode, targets: list[FakeDecode]) -> None:
            async def leave() -> None:
                await source.leave()
                await world.add("decode")

            source.step_s = 1000.0
            leaving.append(asyncio.create_task(leave()))

        answer = await drained(world, prepare)
        check(answer)
        assert [(recovery.path, recovery.is_free) for recovery in answer.recoveries] == [(REPLAY, True)]


async def test_both_ranks_drain_in_turn(tmp_path: Path) -> None:
    """A target that is told to leave while it takes over moves on at once."""
    async with running(tmp_path, decodes=3) as world:
        def prepare(source: FakeDecode, targets: list[FakeDecode]) -> None:
            async def drain(session: DecodeSession, submit: decode_pb2.Submit) -> None:
                if submit.key.attempt == 1:
                    session.send(draining=decode_pb2.Draining(seconds_left=60))

            for target in targets:
                target.hooks["pulled"] = drain

        answer = await drained(world, prepare)
        check(answer)
        assert [move.path for move in answer.recoveries] == [MOVE, MOVE] and all(move.us for move in answer.recoveries)


async def test_draining_while_the_pages_are_still_fetched_moves_once_ready(tmp_path: Path) -> None:
    async with running(tmp_path, decodes=2) as world:
        slow_down(world)

        async def drain(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            if submit.key.attempt == 0:
                session.send(draining=decode_pb2.Draining(seconds_left=60))

        for decode in world.decodes:
            decode.hooks["claimed"] = drain
        answer = await world.generate(max_tokens=LENGTH)
        check(answer)
        assert [move.path for move in answer.recoveries] == [MOVE] and answer.recoveries[0].us


@pytest.mark.parametrize("phase", ["claimed", "granted", "caught_up", "pulled", "moved"])
async def test_client_leaves_while_it_moves(tmp_path: Path, phase: str) -> None:
    async with running(tmp_path, decodes=2) as world:
        reached = asyncio.Event()

        def prepare(source: FakeDecode, targets: list[FakeDecode]) -> None:
            async def stay(session: DecodeSession, submit: decode_pb2.Submit) -> None:
                reached.set()
                await never(session, submit)

            targets[0].hooks[phase] = stay

        task = asyncio.create_task(drained(world, prepare, max_tokens=58))
        waiter: Awaitable[object] = asyncio.wait_for(reached.wait(), 10)
        await waiter
        task.cancel()
        await asyncio.wait([task])
        await world.settle()
        await until(lambda: len(targets_of(world)[0].cancels) == 1, "the target is cancelled")
        source = source_of(world)
        if phase != "moved":
            await until(lambda: [cancel.handle for cancel in source.cancels] == [source.submits[0].handle], "and the source")


async def test_source_renewed_before_the_drain_is_named_by_its_new_id(tmp_path: Path) -> None:
    """What runs there outlived the agent: the target has to pull from the agent of now."""
    async with running(tmp_path, decodes=2) as world:
        slow_down(world)
        answer, steps = Answer(), 0
        async with contextlib.aclosing(world.stream(max_tokens=LENGTH)) as replies:
            async for reply in replies:
                answer.take(reply)
                steps += 1
                if steps != 5:
                    continue
                source = source_of(world)
                former, source.instance_id = source.instance_id, "decode-renewed"
                rank = source.rank
                rank.former_instance_id = former
                source.updates.put_nowait(registry_pb2.MemberUpdate(member=source.member(rank)))
                await until(lambda: "decode-renewed" in world.usable("decode"), "the rank goes on under its new id")
                source.drain()
        check(answer)
        (submit,) = targets_of(world)[0].submits
        assert submit.is_move and submit.holder.instance_id == "decode-renewed" and submit.holder.peer == b"decode-renewed"


async def test_an_earlier_targets_done_ends_the_present_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source too busy to say `resumed` in time had heard of the former target's end: nobody announces to the present one."""
    monkeypatch.setattr("services.router.move._RESUMED_S", 0.02)
    async with running(tmp_path, decodes=3) as world:
        def prepare(source: FakeDecode, targets: list[FakeDecode]) -> None:
            source.step_s = 1000.0

            async def granted(session: DecodeSession, submit: decode_pb2.Submit) -> None:
                source.sources[source.submits[0].handle].on = lambda move: None  # type: ignore[method-assign]
                if submit.key.attempt == 1:
                    await until(lambda: len(source.moves) == 1, "the move is started")
                    session.failed(submit, common_pb2.READ_FAILED)
                    raise ScriptEnds
                source.sessions[-1].failed(source.submits[0], common_pb2.REPLACED)
                await never(session, submit)

            for target in targets:
                target.hooks["granted"] = granted

        answer = await asyncio.wait_for(drained(world, prepare), 10.0)
        check(answer)
        assert [recovery.path for recovery in answer.recoveries] == [MOVE, MOVE, REPLAY] and answer.recoveries[-1].is_free


async def test_two_moves_leave_no_silent_source_behind(tmp_path: Path) -> None:
    """The first source never says its end; by the second move at the latest nobody counts there any more."""
    async with running(tmp_path, decodes=3) as world:
        def prepare(source: FakeDecode, targets: list[FakeDecode]) -> None:
            async def silent() -> bool:
                return False

            source.sources[source.submits[0].handle].go_on = silent  # type: ignore[method-assign]

            async def drain(session: DecodeSession, submit: decode_pb2.Submit) -> None:
                if submit.key.attempt == 1:
                    session.send(draining=decode_pb2.Draining(seconds_left=60))

            for target in targets:
                target.hooks["moved"] = drain

        answer = await drained(world, prepare)
        check(answer)
        assert [move.path for move in answer.recoveries] == [MOVE, MOVE]
        states = [world.router.pool._ranks[decode.instance_id] for decode in world.decodes]
        await until(lambda: [state.num_own_requests for state in states] == [0, 0, 0], "nobody counts anywhere")
        assert [cancel.reason for cancel in source_of(world).cancels] == [common_pb2.REPLACED]
