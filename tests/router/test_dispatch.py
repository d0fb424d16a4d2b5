"""A request's life against scripted ranks: the way that all goes well."""

import asyncio
from pathlib import Path

import pytest

from proto.baton.v1 import common_pb2, decode_pb2, prefill_pb2
from tests.router.byte_model import BOS, EOS, ids_of
from tests.router.fakes import DecodeSession, until
from tests.router.rig import running


async def test_tokens_text_and_usage(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        answer = await world.generate(max_tokens=10, seed=7)
        assert answer.text == "abcdefghij"
        assert answer.token_ids == ids_of("abcdefghij")
        assert answer.seed == 7
        finished = answer.finished
        assert finished is not None and finished.reason == common_pb2.LENGTH and finished.WhichOneof("matched_stop") is None
        assert (finished.usage.prompt_tokens, finished.usage.completion_tokens, finished.usage.cached_tokens) == (6, 10, 0)
        assert finished.timeline.transfer.transport == "fake" and finished.timeline.ttft_us > 0
        assert "prefill" in finished.timeline.routing and "decode" in finished.timeline.routing
        run, submit = world.prefills[0].runs[0], world.decodes[0].submits[0]
        assert (run.request_id, run.attempt) == (submit.key.request_id, submit.key.attempt) == (answer.request_id, 0)
        assert run.sampling == submit.sampling and run.prompt == submit.prompt  # B37: both legs get the same
        assert submit.holder == world.prefills[0].rank and list(run.readers) == [world.decodes[0].rank]
        assert world.decodes[0].cancels == []


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_first_token_from_whoever_is_first(tmp_path: Path, first: str) -> None:
    async with running(tmp_path) as world:
        prefill, decode = world.prefills[0], world.decodes[0]
        other_may_answer = asyncio.Event()

        async def late_prefill(request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillReply:
            world.announce(request)
            await other_may_answer.wait()
            return await prefill.reply(request, cached=3)

        async def late_decode(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            await other_may_answer.wait()
            await decode.decode(session, submit)

        if first == "prefill":
            decode.serve = late_decode
        else:
            prefill.serve = late_prefill
        ids: list[int] = []
        async for reply in world.stream(max_tokens=5):
            if reply.HasField("delta"):
                ids += reply.delta.token_ids
                if first == "prefill":
                    other_may_answer.set()
                elif len(ids) == 5:
                    other_may_answer.set()  # prefill answers after decode has finished
            elif reply.HasField("finished") and first == "decode":
                assert reply.finished.usage.cached_tokens == 3
        assert ids == ids_of("abcde")


async def test_max_tokens_1_needs_no_decode(tmp_path: Path) -> None:
    """B07."""
    async with running(tmp_path) as world:
        answer = await world.generate(max_tokens=1)
        assert answer.token_ids == ids_of("a") and answer.text == "a"
        assert answer.finished is not None and answer.finished.reason == common_pb2.LENGTH
        assert answer.finished.usage.completion_tokens == 1
        assert world.decodes[0].submits == [] and list(world.prefills[0].runs[0].readers) == []


async def test_max_tokens_1_without_a_decode_pool(tmp_path: Path) -> None:
    async with running(tmp_path, decodes=0) as world:
        assert (await world.generate(max_tokens=1)).token_ids == ids_of("a")


async def test_longest_prompt_gives_one_token(tmp_path: Path) -> None:
    """B07, B25: prompt and output together end at max_model_len."""
    async with running(tmp_path) as world:
        answer = await world.generate(prompt=[BOS] * 63, max_tokens=5)
        assert answer.token_ids == ids_of("a") and answer.finished is not None and answer.finished.reason == common_pb2.LENGTH
        answer = await world.generate(prompt=[BOS] * 60, max_tokens=10)
        assert answer.token_ids == ids_of("abcd") and answer.finished is not None and answer.finished.reason == common_pb2.LENGTH
        answer = await world.generate(prompt=[BOS] * 60)
        assert answer.token_ids == ids_of("abcd")


@pytest.mark.parametrize("kind", ["eos", "stop id"])
async def test_first_token_may_be_the_last(tmp_path: Path, kind: str) -> None:
    async with running(tmp_path) as world:
        world.script = [EOS if kind == "eos" else ids_of("Z")[0]]
        answer = await world.generate(max_tokens=9, stop_token_ids=[] if kind == "eos" else ids_of("Z"))
        assert answer.text == "" and answer.token_ids == world.script
        assert answer.finished is not None and answer.finished.reason == common_pb2.STOP
        assert answer.finished.stop_token_id == world.script[0] and answer.finished.usage.completion_tokens == 1
        await until(lambda: len(world.decodes[0].cancels) + sum(1 for _ in world.decodes[0].submits) >= 1, "decode hears of the end")


async def test_nothing_counts_after_eos_in_a_step(tmp_path: Path) -> None:
    """B32: EOS as the second of four tokens of one step."""
    async with running(tmp_path) as world:
        world.decodes[0].tokens_a_step = 4
        world.script = [*ids_of("ab"), EOS, *ids_of("xyz" * 30)]

        async def greedy(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            await world.announced(submit.key.request_id, 0)
            session.ready(submit, world.token(0))
            session.step(submit, 1, [world.token(i) for i in range(1, 5)])  # a rank that forgets to cut
            session.finished(submit, 3, common_pb2.STOP, EOS)

        world.decodes[0].serve = greedy
        answer = await world.generate(max_tokens=20, logprobs=0)
        assert answer.text == "ab" and answer.token_ids == [*ids_of("ab"), EOS] and len(answer.tokens) == 3
        assert answer.finished is not None and answer.finished.stop_token_id == EOS and answer.finished.usage.completion_tokens == 3


async def test_stop_string_cuts_ids_and_logprobs_with_the_text(tmp_path: Path) -> None:
    """B32: stop "cd" found inside one step of many tokens."""
    async with running(tmp_path) as world:
        world.decodes[0].tokens_a_step = 6
        answer = await world.generate(max_tokens=30, stop=["cd"], logprobs=1)
        assert answer.text == "ab" and answer.token_ids == ids_of("abcd")
        assert [token.logprob for token in answer.tokens] == [-0.25, -0.5, -0.75, -1.0]
        assert list(answer.tokens[3].top_logprobs.token_ids) == ids_of("d")
        assert answer.finished is not None and answer.finished.stop_string == "cd" and answer.finished.usage.completion_tokens == 4
        await until(lambda: len(world.decodes[0].cancels) == 1, "decode is cancelled")


async def test_usage_takes_cached_tokens_from_prefill(tmp_path: Path) -> None:
    """B44: what decode already had is no cache hit of the prompt."""
    async with running(tmp_path) as world:
        prefill = world.prefills[0]
        prefill.serve = lambda request: prefill.reply(request, cached=2)
        answer = await world.generate(max_tokens=5)
        assert answer.finished is not None
        usage = answer.finished.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (6, 5, 2)


async def test_client_ids_are_no_identity(tmp_path: Path) -> None:
    """B43: equal and missing client ids give different requests everywhere."""
    async with running(tmp_path) as world:
        fields = [{"client_request_id": "x"}, {"client_request_id": "x"}, {}, {}]
        answers = await asyncio.gather(*(world.generate(max_tokens=6, **more) for more in fields))
        assert len({answer.request_id for answer in answers}) == 4
        assert all(answer.text == "abcdef" for answer in answers)
        assert {run.request_id for run in world.prefills[0].runs} == {submit.key.request_id for submit in world.decodes[0].submits}
        assert len({submit.handle for submit in world.decodes[0].submits}) == 4


async def test_seed_is_drawn_once_and_told(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        answers = [await world.generate(max_tokens=2) for _ in range(3)]
        assert [run.sampling.seed for run in world.prefills[0].runs] == [answer.seed for answer in answers]
        assert len({answer.seed for answer in answers}) == 3
        assert (await world.generate(max_tokens=2, seed=0)).seed == 0


async def test_text_gets_one_bos_and_many_run_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, prefills=2, decodes=2) as world:
        answers = await asyncio.gather(*(world.generate(text=f"prompt {i}", max_tokens=20) for i in range(40)))
        assert all(answer.text == "abcdefghijklmnopqrst" for answer in answers)
        for run in (*world.prefills[0].runs, *world.prefills[1].runs):
            assert list(run.prompt.token_ids).count(BOS) == 1 and run.prompt.token_ids[0] == BOS
        assert all(len(decode.submits) >= 10 for decode in world.decodes), [len(decode.submits) for decode in world.decodes]
