"""It is really disaggregated: what NIXL moved, what prefill computed, what survives prefill's death."""

import asyncio
import os
import signal

from proto.baton.v1 import generation_pb2_grpc
from tests.clear import CLEAR
from tests.e2e.rig import Answer, Rig, generate, generate_all

PAGE_BYTES = 64 * 8 * 576 * 4  # tokens, layers, width, fp32
PROMPT_1000 = [0, *((7919 * index) % 4000 + 4 for index in range(999))]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def test_bytes_moved_are_pages_and_words(rig: Rig) -> None:
    requests = [{"prompt": [0, *range(10 + length, 9 + 2 * length)], "max_tokens": 4, **GREEDY} for length in (5, 64, 65, 200)]
    for fields, answer in zip(requests, generate_all(rig.address, requests, at_once=4), strict=True):
        moved = answer.end.timeline.transfer
        assert moved.num_pages + moved.num_cached_pages == (len(fields["prompt"]) + 63) // 64
        assert moved.num_pages >= 1
        assert moved.num_bytes == moved.num_pages * (PAGE_BYTES + 8)
        assert moved.transport


def test_second_identical_prompt_computes_and_moves_only_the_rest(rig: Rig) -> None:
    fields = {"prompt": PROMPT_1000, "max_tokens": 3, **GREEDY}
    first, second = generate_all(rig.address, [fields, fields], at_once=1)
    assert first.end.usage.cached_tokens == 0
    assert second.end.usage.cached_tokens == 960, "prefill must compute 40 tokens only"
    assert second.end.usage.prompt_tokens == 1000
    if second.end.timeline.decode_rank == first.end.timeline.decode_rank:
        assert (second.end.timeline.transfer.num_pages, second.end.timeline.transfer.num_cached_pages) == (1, 15)
    assert first.token_ids == second.token_ids


def test_one_token_needs_no_decode(rig: Rig) -> None:
    (answer,) = generate_all(rig.address, [{"prompt": [0, 9, 8, 7], "max_tokens": 1, **GREEDY}], at_once=1)
    assert len(answer.token_ids) == 1
    assert answer.end.timeline.transfer.num_pages == 0
    assert answer.end.timeline.decode_rank == ""
    assert answer.end.usage.completion_tokens == 1


def test_text_goes_on_after_prefill_is_killed(rig: Rig) -> None:
    """Once pages are handed over, prefill may die: not a token is lost, and nothing is retried."""
    fields = {"prompt": [0, *range(100, 260)], "max_tokens": 200, "seed": 5, **GREEDY}
    (expected,) = generate_all(rig.address, [fields], at_once=1)
    pids = {rank: rig.engine_pid("prefill", rank) for rank in (0, 1)}
    killed: list[int] = []

    def kill_prefill(answer: Answer) -> None:
        if len(answer.token_ids) >= 3 and not killed:  # a third token comes from decode: the hand-off is over
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    async def run() -> Answer:
        async with CLEAR.open_channel(rig.address) as channel:
            return await generate(generation_pb2_grpc.GenerationStub(channel), kill_prefill, **fields)

    answer = asyncio.run(run())
    assert killed, "prefill was never killed"
    assert answer.token_ids == expected.token_ids
    assert answer.end.timeline.num_retries == 0
    rig.wait_for_ranks("prefill", 2)


def test_decode_death_is_replayed(rig: Rig) -> None:
    """Decode dies in mid-stream: another pair goes on, no token twice, none missing."""
    fields = {"prompt": [0, *range(300, 420)], "max_tokens": 120, "seed": 6, **GREEDY}
    (expected,) = generate_all(rig.address, [fields], at_once=1)
    pids = {rank: rig.engine_pid("decode", rank) for rank in (0, 1)}
    killed: list[int] = []

    def kill_decode(answer: Answer) -> None:
        if len(answer.token_ids) >= 10 and not killed:
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    async def run() -> Answer:
        async with CLEAR.open_channel(rig.address) as channel:
            return await generate(generation_pb2_grpc.GenerationStub(channel), kill_decode, **fields)

    answer = asyncio.run(run())
    assert killed, "decode was never killed"
    assert answer.token_ids == expected.token_ids
    assert answer.end.usage.completion_tokens == 120
    assert answer.end.usage.prompt_tokens == 121
    assert answer.end.timeline.num_retries >= 1
    rig.wait_for_ranks("decode", 2)


def test_client_that_leaves_frees_everything(rig: Rig) -> None:
    """Left after a few tokens, and before the first: the fixture asserts that every page comes back."""

    async def leave(after_tokens: int, prompt: list[int]) -> None:
        async with CLEAR.open_channel(rig.address) as channel:
            seen = asyncio.Event()

            def look(answer: Answer) -> None:
                if len(answer.token_ids) >= after_tokens:
                    seen.set()

            stub = generation_pb2_grpc.GenerationStub(channel)
            work = asyncio.ensure_future(generate(stub, look, prompt=prompt, max_tokens=500, **GREEDY))
            if after_tokens:
                await seen.wait()
            else:
                await asyncio.sleep(0)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    for after_tokens in (0, 1, 5):
        asyncio.run(leave(after_tokens, [0, *range(500 + after_tokens, 900 + after_tokens)]))
