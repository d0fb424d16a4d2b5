"""Several choices of one request: one prefill, then each on its own. Choice c of a scripted request has the script from its token c on."""

import asyncio
from pathlib import Path

import grpc
import pytest

from proto.baton.v1 import common_pb2, decode_pb2, generation_pb2, prefill_pb2
from services.router.validate import MAX_CHOICES
from tests.router.byte_model import ids_of
from tests.router.fakes import DecodeSession, ScriptEnds, refusal, until
from tests.router.rig import Answer, failing, running

TEXT = "abcdefghijklmnopqrstuvwxyz" * 4
Recovery = generation_pb2.Recovery


def check(answer: Answer, n: int, length: int) -> None:
    assert len(answer.choices) == n
    for number, choice in enumerate(answer.choices):
        expected = TEXT[number : number + length]
        assert choice.text == expected and choice.token_ids == ids_of(expected), number
        assert choice.finished is not None and choice.finished.choice == number and choice.finished.reason == common_pb2.LENGTH
        usage = choice.finished.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (6, length)


@pytest.mark.parametrize("n", [1, 3, MAX_CHOICES])
async def test_one_prefill_and_n_decodes(tmp_path: Path, n: int) -> None:
    async with running(tmp_path, decodes=3) as world:
        world.prefills[0].serve = lambda request: world.prefills[0].reply(request, cached=4)
        answer = await world.generate(max_tokens=12, n=n, logprobs=0, seed=9)
        check(answer, n, 12)
        for choice in answer.choices:
            assert choice.finished is not None and choice.finished.usage.cached_tokens == 4 and choice.recoveries == []
            assert [token.logprob for token in choice.tokens] == [-0.25 * (i + 1) for i in range(12)]
        (run,) = world.prefills[0].runs
        assert (run.n, run.first_choice, len(run.readers)) == (n, 0, n)
        submits = {submit.key.choice: (decode, submit) for decode in world.decodes for submit in decode.submits}
        assert set(submits) == set(range(n))
        for number, (decode, submit) in submits.items():
            assert submit.key.attempt == 0 and submit.prompt == run.prompt and submit.sampling == run.sampling
            assert run.readers[number] == decode.rank and submit.holder == world.prefills[0].rank
        counts = sorted(len(decode.submits) for decode in world.decodes)
        assert counts[-1] - counts[0] <= 1, "choices spread over the ranks"


async def test_max_tokens_1_needs_no_decode(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        check(await world.generate(max_tokens=1, n=3), 3, 1)
        assert world.decodes[0].submits == [] and list(world.prefills[0].runs[0].readers) == []


async def test_a_stop_ends_one_choice_alone(tmp_path: Path) -> None:
    async with running(tmp_path, decodes=2) as world:
        answer = await world.generate(max_tokens=20, n=3, stop=["ab"])
        first, *others = answer.choices
        assert first.text == "" and first.token_ids == ids_of("ab") and first.finished is not None
        assert first.finished.stop_string == "ab" and first.finished.usage.completion_tokens == 2
        for number, choice in enumerate(others, start=1):
            assert choice.text == TEXT[number : number + 20] and choice.finished is not None and choice.finished.stop_string == ""


async def test_a_stop_in_the_first_token_leaves_the_shared_call_alone(tmp_path: Path) -> None:
    """Choice 1 ends with its first token, heard from decode, before Run has answered."""
    async with running(tmp_path) as world:
        shown = asyncio.Event()

        async def late(request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillReply:
            world.announce(request)
            await shown.wait()
            return await world.prefills[0].reply(request, cached=1)

        world.prefills[0].serve = late
        world.decodes[0].hooks["ready"] = lambda session, submit: asyncio.sleep(0, shown.set() if submit.key.choice == 1 else None)
        answer = await world.generate(max_tokens=8, n=3, stop_token_ids=ids_of("b"), ignore_eos=True)
        assert [choice.token_ids for choice in answer.choices] == [ids_of("ab"), ids_of("b"), ids_of("cdefghij")]
        assert world.prefills[0].num_cancelled == 0 and len(world.prefills[0].runs) == 1


async def test_one_choice_is_replayed_alone(tmp_path: Path) -> None:
    async with running(tmp_path, decodes=2) as world:
        for decode in world.decodes:
            async def serve(session: DecodeSession, submit: decode_pb2.Submit, decode: object = decode) -> None:
                if submit.key.choice == 1 and submit.key.attempt == 0:
                    await decode.decode(session, submit, stop_after=4)  # type: ignore[attr-defined]
                    session.failed(submit, common_pb2.ENGINE_DIED)
                else:
                    await decode.decode(session, submit)  # type: ignore[attr-defined]

            decode.serve = serve
        answer = await world.generate(max_tokens=10, n=3)
        check(answer, 3, 10)
        assert [[recovery.path for recovery in choice.recoveries] for choice in answer.choices] == [[], [Recovery.REPLAY], []]
        first, second = world.prefills[0].runs
        assert (second.n, second.first_choice, second.attempt, len(second.readers)) == (1, 1, 1, 1)
        assert list(second.prompt.token_ids[-4:]) == ids_of("bcde") and second.prompt.num_output_tokens == 4
        assert first.sampling == second.sampling and first.request_id == second.request_id


async def test_a_choice_that_begins_anew_leaves_the_shared_call_to_the_others(tmp_path: Path) -> None:
    """Choice 1 is replayed while Run has not answered yet: the other choices still have their first tokens of it."""
    async with running(tmp_path, decodes=2) as world:
        prefill = world.prefills[0]

        async def late(request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillReply:
            if request.attempt == 0:
                world.announce(request)
                await until(lambda: len(prefill.runs) == 2, "the replay's Run")
            return await prefill.reply(request)

        async def fail(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            if submit.key.choice != 1 and submit.key.attempt == 0:
                await until(lambda: len(prefill.runs) == 2, "the replay's Run")
            elif submit.key.attempt == 0:
                session.failed(submit, common_pb2.ENGINE_DIED)
                raise ScriptEnds

        prefill.serve = late
        for decode in world.decodes:
            decode.hooks["ready"] = fail
        answer = await world.generate(max_tokens=10, n=3)
        check(answer, 3, 10)
        assert prefill.num_cancelled == 0 and [choice.recoveries != [] for choice in answer.choices] == [False, True, False]


async def test_one_choice_is_redirected_alone(tmp_path: Path) -> None:
    async with running(tmp_path, decodes=2) as world:
        async def lose(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            if submit.key.choice == 2 and submit.key.attempt == 0:
                await until(lambda: bool(world.prefills[0].runs), "prefill is called")
                session.failed(submit, common_pb2.OVERLOADED)
                raise ScriptEnds

        for decode in world.decodes:
            decode.hooks["claimed"] = lose
        answer = await world.generate(max_tokens=10, n=3)
        check(answer, 3, 10)
        assert [[recovery.path for recovery in choice.recoveries] for choice in answer.choices] == [[], [], [Recovery.REDIRECT]]
        (redirect,) = world.prefills[0].redirects
        assert (redirect.key.choice, redirect.key.attempt) == (2, 1) and len(world.prefills[0].runs) == 1


async def test_all_are_retried_when_the_shared_prefill_fails(tmp_path: Path) -> None:
    async with running(tmp_path, prefills=2, decodes=2) as world:
        for prefill in world.prefills:
            async def serve(request: prefill_pb2.PrefillRequest, prefill: object = prefill) -> prefill_pb2.PrefillReply:
                return await prefill.reply(request) if request.attempt else refusal(common_pb2.INTERNAL)  # type: ignore[attr-defined]

            prefill.serve = serve
        answer = await world.generate(max_tokens=10, n=3)
        check(answer, 3, 10)
        runs = [run for prefill in world.prefills for run in prefill.runs if run.attempt]
        assert sorted((run.first_choice, run.n) for run in runs) == [(0, 1), (1, 1), (2, 1)]


async def test_all_move_when_their_rank_drains(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        world.decodes[0].step_s = 0.005
        answer = Answer()
        async for reply in world.stream(max_tokens=40, n=3):
            answer.take(reply)
            if len(world.decodes) == 1 and len(answer.choices) == 3 and all(len(choice.token_ids) > 3 for choice in answer.choices):
                await world.add("decode", step_s=0.005)
                world.decodes[0].drain()
        check(answer, 3, 40)
        assert [[recovery.path for recovery in choice.recoveries] for choice in answer.choices] == [[Recovery.MOVE]] * 3
        assert len(world.prefills[0].runs) == 1


async def test_a_choice_that_fails_for_good_ends_all(tmp_path: Path) -> None:
    """The stream ends with the error at once; everything else is cancelled."""
    async with running(tmp_path, retries=0) as world:
        async def fail(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            if submit.key.choice == 1:
                session.failed(submit, common_pb2.INTERNAL)
                raise ScriptEnds
            await asyncio.Event().wait()

        world.decodes[0].hooks["ready"] = fail
        with failing(grpc.StatusCode.INTERNAL) as details:
            await world.generate(max_tokens=10, n=3)
        assert "scripted" in details[0]
        await until(lambda: len(world.decodes[0].cancels) == 2, "the others are cancelled")


@pytest.mark.parametrize("phase", ["prefill", "claimed", "ready"])
async def test_client_that_leaves_cancels_all(tmp_path: Path, phase: str) -> None:
    async with running(tmp_path, decodes=2) as world:
        reached: list[int] = []

        async def stay(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            reached.append(submit.key.choice)
            await asyncio.Event().wait()

        async def compute(request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillReply:
            return await asyncio.Event().wait()  # type: ignore[return-value]

        if phase == "prefill":
            world.prefills[0].serve = compute
        for decode in world.decodes:
            decode.hooks["claimed" if phase == "prefill" else phase] = stay
        task = asyncio.create_task(world.generate(max_tokens=10, n=3))
        await until(lambda: len(reached) == 3 and bool(world.prefills[0].runs), "all choices are there")
        task.cancel()
        await asyncio.wait([task])
        await world.settle()
        await until(lambda: sum(len(decode.cancels) for decode in world.decodes) == 3, "each is cancelled")
        if phase == "prefill":
            await until(lambda: world.prefills[0].num_cancelled == 1, "and prefill")


async def test_choices_count_as_requests_in_flight(tmp_path: Path) -> None:
    async with running(tmp_path, max_requests=3) as world:
        with failing(grpc.StatusCode.RESOURCE_EXHAUSTED) as details:
            await world.generate(max_tokens=3, n=4)
        assert "max_requests 3" in details[0]
        check(await world.generate(max_tokens=3, n=3), 3, 3)
