"""The router process: it drains, and its mistakes at start are one sentence."""

import asyncio
from pathlib import Path

import grpc
import pytest

from services.router.server import Router
from services.runtime.config import parse_config
from services.runtime.errors import CheckpointError
from tests.router.byte_model import model_folder
from tests.router.fakes import until
from tests.router.rig import Answer, failing, running


async def test_stopping_finishes_what_runs_and_takes_nothing_new(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        decode, go_on = world.decodes[0], asyncio.Event()

        async def held(session, submit) -> None:
            await go_on.wait()
            await decode.decode(session, submit)

        decode.serve = held
        answer = Answer()
        task = asyncio.create_task(world.generate(answer, max_tokens=8))
        await until(lambda: len(answer.token_ids) == 1, "the first token is out")
        stop = asyncio.create_task(world.router.stop(20.0))
        await until(lambda: world.router.servicer.is_stopping, "the router is stopping")
        with failing(grpc.StatusCode.UNAVAILABLE) as details:
            await world.generate(max_tokens=2)
        assert "stopping" in details[0]
        go_on.set()
        assert (await task).text == "abcdefgh"
        await stop


async def test_address_file_names_the_port_that_is_bound(tmp_path: Path) -> None:
    config = parse_config({"model": {"path": str(model_folder(tmp_path))}, "router": {"address": "127.0.0.1:0"}}, "test")
    router, stopping, file = Router(config), asyncio.Event(), tmp_path / "address"
    task = asyncio.create_task(router.run(stopping, file))
    await until(file.exists, "the file is written")
    assert file.read_text() == router.address and not router.address.endswith(":0")
    stopping.set()
    await task


def test_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"vocab_size": 258', '"vocab_size": 257'))
    with pytest.raises(CheckpointError, match=r"258.*257"):
        Router(parse_config({"model": {"path": str(folder)}}, "test"))
