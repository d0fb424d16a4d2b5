"""The socket through which a running cluster takes commands: `.run/control.sock`, its owner's alone.

One connection a command, lines of JSON: a Request, then as many Replies with `say` as there is to tell, then one with `error`, "" when all
went well. Who hangs up before that ends nothing.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from services.runtime.errors import SetupError
from services.runtime.serve import cancel

Command = Callable[[Sequence[str], Callable[[str], None]], Awaitable[None]]  # arguments, tell; raises SetupError

FILE = "control.sock"
_REQUEST_S = 5.0  # a command is one short line


class Request(msgspec.Struct):
    """What is to be done."""

    command: str
    arguments: list[str]


class Reply(msgspec.Struct, omit_defaults=True):
    """A line of progress, or how it ended."""

    say: str = ""
    error: str | None = None


@contextlib.asynccontextmanager
async def serving(folder: Path, commands: Mapping[str, Command]) -> AsyncGenerator[None]:
    """Take `commands` while the block runs; what is under way at its end is cancelled. Raises SetupError when there can be no socket."""
    path, tasks = folder / FILE, set["asyncio.Task[Any]"]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            _send(writer, Reply(error=await _run(commands, reader, lambda text: _send(writer, Reply(say=text)))))
            with contextlib.suppress(OSError):
                await writer.drain()
        finally:
            writer.close()
            tasks.discard(task)

    listener = _bind(path)
    own = path.stat().st_ino
    server = await asyncio.start_unix_server(serve, sock=listener)
    try:
        yield
    finally:
        server.close()
        await cancel(*tasks)
        with contextlib.suppress(OSError):
            if path.stat().st_ino == own:
                path.unlink()


def _bind(path: Path) -> socket.socket:
    """Only this user may connect, from the first moment. One cluster a folder: what is there is of one that was killed."""
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise SetupError(f"{path} cannot be made ({error.strerror or error}); make its folder writable, or its path shorter") from None
    finally:
        os.umask(mask)
    return listener


async def _run(commands: Mapping[str, Command], reader: asyncio.StreamReader, tell: Callable[[str], None]) -> str:
    """Do what is asked; returns what went wrong, "" = nothing."""
    try:
        async with asyncio.timeout(_REQUEST_S):
            request = msgspec.json.decode(await reader.readline(), type=Request)
    except (TimeoutError, ValueError):
        return "no command came; one is a line of JSON with `command` and `arguments`"
    command = commands.get(request.command)
    if command is None:
        return f"there is no command {request.command!r}; known are {', '.join(commands)}"
    try:
        await command(request.arguments, tell)
    except SetupError as error:
        return str(error)
    return ""


def _send(writer: asyncio.StreamWriter, message: Request | Reply) -> None:
    if not writer.is_closing():
        writer.write(msgspec.json.encode(message) + b"\n")


async def ask(folder: Path, command: str, arguments: Sequence[str], tell: Callable[[str], None]) -> None:
    """Have the cluster of `folder` do a command, and `tell` of its progress; returns when it is done. Raises SetupError."""
    path = folder / FILE
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
    except OSError as error:
        raise SetupError(f"no cluster runs here ({path}: {os.strerror(error.errno or 0)}); start one with `make up`") from None
    try:
        _send(writer, Request(command, list(arguments)))
        while line := await reader.readline():
            reply = msgspec.json.decode(line, type=Reply)
            if reply.error:
                raise SetupError(reply.error)
            if reply.error is not None:
                return
            tell(reply.say)
    except OSError as error:
        raise SetupError(f"the cluster went away before it was done ({error.strerror or error})") from None
    finally:
        writer.close()
    raise SetupError("the cluster went away before it was done; what it said is above")
