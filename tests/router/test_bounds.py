"""What a client may send weighs what its prompt can: more is refused before anybody reads it."""

import contextlib
from pathlib import Path

import grpc
import grpc.aio
import pytest

from proto.baton.v1 import generation_pb2, generation_pb2_grpc
from tests.clear import CLEAR
from tests.router.byte_model import BOS, ids_of
from tests.router.rig import request_of, running

LENGTH = 4096
BOUND = 2**20 + 16 * LENGTH  # as services/router/server.py makes it of the model's longest sequence


def chat(size: int) -> generation_pb2.Chat:
    half = "x" * (size // 2)
    return generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role=role, content=half) for role in ("user", "assistant")])


@pytest.mark.parametrize("kind", ["text", "chat", "token_ids"])
async def test_a_request_beyond_the_bound_is_refused_and_others_go_on(kind: str, tmp_path: Path) -> None:
    too_large = {
        "text": lambda: request_of(text="x" * BOUND),
        "chat": lambda: request_of(chat=chat(BOUND)),
        "token_ids": lambda: request_of([300] * (BOUND // 2)),  # two bytes each
    }[kind]()
    assert too_large.ByteSize() > BOUND
    async with running(tmp_path, max_model_len=LENGTH) as world, CLEAR.open_channel(world.router.address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        async with contextlib.aclosing(world.stream(max_tokens=40)) as replies:
            assert (await anext(replies)).HasField("started")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Generate(too_large):
                    pass
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert [reply async for reply in replies][-1].HasField("finished")
        assert (await stub.GetInfo(generation_pb2.GetInfoRequest())).max_model_len == LENGTH, "the connection stands"
        assert not [run for run in world.prefills[0].runs if len(run.prompt.token_ids) > 64], "no pool has seen it"


async def test_whatever_fits_the_model_fits_a_message(tmp_path: Path) -> None:
    """And what is refused for its length alone is still told so by name, up to the bound."""
    async with running(tmp_path, max_model_len=LENGTH) as world:
        longest = [BOS, *ids_of("x" * (LENGTH - 2))]
        assert (await world.generate(prompt=longest, max_tokens=1)).text
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.generate(text="x" * (BOUND - 1000))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
