"""What is wrong with a request is said by the router, with field, value and limit; no pool hears of it."""

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from proto.baton.v1 import generation_pb2, generation_pb2_grpc
from services.runtime.local_cluster import Cluster
from tests.clear import CLEAR
from tests.e2e.rig import DEMO_CONFIG, failing, generate

INVALID = grpc.StatusCode.INVALID_ARGUMENT

BAD: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("empty ids", {"prompt": []}, ("token_ids", "empty")),
    ("too long", {"prompt": [5] * 4096}, ("4096",)),
    ("id outside the vocabulary", {"prompt": [5, 1_000_000]}, ("1000000",)),
    ("max_tokens 0", {"max_tokens": 0}, ("max_tokens", "0")),
    ("max_tokens negative", {"max_tokens": -1}, ("max_tokens", "-1")),
    ("top_p 0", {"top_p": 0.0}, ("top_p", "0")),
    ("top_p 2", {"top_p": 2.0}, ("top_p", "2")),
    ("top_k negative", {"top_k": -5}, ("top_k", "-5")),
    ("temperature NaN", {"temperature": math.nan}, ("temperature", "nan")),
    ("temperature negative", {"temperature": -0.5}, ("temperature", "-0.5")),
    ("penalty infinite", {"frequency_penalty": math.inf}, ("frequency_penalty", "inf")),
    ("min_tokens over max_tokens", {"min_tokens": 9, "max_tokens": 4}, ("min_tokens", "9", "4")),
    ("logprobs 21", {"logprobs": 21}, ("logprobs", "21", "20")),
    ("empty chat", {"chat": generation_pb2.Chat()}, ("chat.messages", "empty")),
    ("unknown role", {"chat": generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="tool")])}, ("role", "tool", "assistant")),
    ("too many choices", {"n": 17}, ("n", "17", "16")),
    ("empty stop string", {"stop": [""]}, ("stop",)),
    ("stop id outside the vocabulary", {"stop_token_ids": [77_777]}, ("stop_token_ids", "77777")),
]


@pytest.fixture(scope="module")
def lonely_router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A router without any pool: what it answers, it answers alone."""
    loop = asyncio.new_event_loop()
    cluster = Cluster(DEMO_CONFIG, prefill=0, decode=0, run_dir=tmp_path_factory.mktemp("run"))
    loop.run_until_complete(cluster.start_router())
    yield cluster.router_address
    loop.run_until_complete(cluster.stop())
    loop.close()


async def ask(address: str, **fields: Any) -> None:
    async with CLEAR.open_channel(address) as channel:
        await generate(generation_pb2_grpc.GenerationStub(channel), **({"prompt": [0, 5, 6]} | fields))


@pytest.mark.parametrize(("fields", "words"), [pytest.param(fields, words, id=name) for name, fields, words in BAD])
def test_bad_input_is_refused_by_the_router(lonely_router: str, fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with failing(INVALID) as details:
        asyncio.run(ask(lonely_router, **fields))
    for word in words:
        assert word in details[0], f"{word!r} is not in {details[0]!r}"


def test_no_pool_member_is_unavailable_at_once(lonely_router: str) -> None:
    with failing(grpc.StatusCode.UNAVAILABLE) as details:
        asyncio.run(ask(lonely_router))
    assert "prefill" in details[0] or "decode" in details[0], details[0]
