"""The control socket: a command, its progress, how it ended; nobody else's, and no nonsense."""

import asyncio
import contextlib
import stat
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from services.runtime.control import FILE, Command, ask, serving
from services.runtime.errors import SetupError
from tests.runtime.waiting import until

Tell = Callable[[str], None]


@contextlib.asynccontextmanager
async def socket_of(folder: Path, run: Command) -> AsyncIterator[Path]:
    async with serving(folder, {"scale": run}):
        yield folder / FILE


async def test_a_command_is_done_and_tells_of_it(tmp_path: Path) -> None:
    async def run(arguments: Sequence[str], tell: Tell) -> None:
        for word in arguments:
            tell(f"{word} is on its way")

    said: list[str] = []
    async with socket_of(tmp_path, run) as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        await ask(tmp_path, "scale", ["prefill=3", "decode=1"], said.append)
    assert said == ["prefill=3 is on its way", "decode=1 is on its way"]
    assert not path.exists()


async def test_errors_come_back_as_their_sentence(tmp_path: Path) -> None:
    async def run(_arguments: Sequence[str], _tell: Tell) -> None:
        raise SetupError("no port is free; free one")

    async with socket_of(tmp_path, run):
        with pytest.raises(SetupError, match="no port is free; free one"):
            await ask(tmp_path, "scale", [], print)
        with pytest.raises(SetupError, match="no command 'sclae'; known are scale"):
            await ask(tmp_path, "sclae", [], print)


async def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"no cluster runs here .*make up"):
        await ask(tmp_path, "scale", [], print)


async def test_bytes_that_are_no_command_end_nothing(tmp_path: Path) -> None:
    async def run(_arguments: Sequence[str], tell: Tell) -> None:
        tell("done")

    said: list[str] = []
    async with socket_of(tmp_path, run) as path:
        for noise in (b"\xff\x00 no json\n", b"[1]\n", b'{"command": 3, "arguments": []}\n', b"x" * 100_000 + b"\n", b""):
            reader, writer = await asyncio.open_unix_connection(str(path))
            writer.write(noise)
            writer.write_eof()
            assert b"no command came" in await reader.read()
            writer.close()
        await ask(tmp_path, "scale", [], said.append)
    assert said == ["done"]


async def test_who_hangs_up_ends_nothing_and_the_end_of_all_ends_what_runs(tmp_path: Path) -> None:
    began, goes_on, ended = asyncio.Event(), asyncio.Event(), list[str]()

    async def run(arguments: Sequence[str], tell: Tell) -> None:
        began.set()
        try:
            await goes_on.wait()
            tell("nobody hears this")
            ended.append("done")
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async with socket_of(tmp_path, run):
        asking = asyncio.ensure_future(ask(tmp_path, "scale", [], print))
        await began.wait()
        asking.cancel()
        await asyncio.wait([asking])
        goes_on.set()
        await until(lambda: ended == ["done"], "the command goes on")
    assert ended == ["done", "cancelled"]


async def test_socket_of_a_killed_cluster_is_replaced_and_that_of_a_newer_one_is_kept(tmp_path: Path) -> None:
    async def run(_arguments: Sequence[str], _tell: Tell) -> None:
        pass

    (tmp_path / FILE).write_text("left over")
    async with socket_of(tmp_path, run):
        await ask(tmp_path, "scale", [], print)
        async with contextlib.AsyncExitStack() as newer:
            await newer.enter_async_context(serving(tmp_path, {"scale": run}))
            kept = newer.pop_all()
    await ask(tmp_path, "scale", [], print)
    await kept.aclose()
    assert not (tmp_path / FILE).exists()
