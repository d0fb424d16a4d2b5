"""The command-line client against scripted ranks."""

import asyncio
import signal
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest

from proto.baton.v1 import common_pb2, decode_pb2
from services.router import client as client_module
from services.router.client import find_router, stream
from services.runtime.errors import SetupError
from services.runtime.serve import ERROR_KEY
from tests.clear import CLEAR
from tests.router.byte_model import BOS, ids_of
from tests.router.fakes import DecodeSession, until
from tests.router.rig import request_of, running

ROOT = Path(__file__).parents[2]


async def run_client(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.router.client", *arguments, cwd=ROOT,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_client_prints_text_and_timeline(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        code, out, err = await run_client("hi", "--router", world.router.address, "--max-tokens", "6", "--temperature", "0", "--timeline",
                                          "--stop", "zz", "--seed", "5", "--top-p", "0.5")
        assert (code, out) == (0, "abcdef\n"), err
        assert "3 prompt tokens (0 cached), 6 new" in err and "TTFT" in err and "routing: prefill" in err
        sampling = world.prefills[0].runs[0].sampling
        assert (sampling.temperature, sampling.seed, sampling.top_p) == (0.0, 5, 0.5)


async def test_client_prints_every_choice_and_what_was_tried_again(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        async def serve(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            is_first = submit.key.choice == 1 and submit.key.attempt == 0
            await world.decodes[0].decode(session, submit, stop_after=2 if is_first else None)
            if is_first:
                session.failed(submit, common_pb2.PREEMPTED)

        world.decodes[0].serve = serve
        code, out, err = await run_client("hi", "--router", world.router.address, "--max-tokens", "4", "--n", "2", "--timeline")
        assert code == 0 and sorted(out.split("--- ")) == ["", "choice 0\nabcd\n", "choice 1\nbcde\n"], err
        assert "replay after 2 tokens: decode said PREEMPTED; " in err and "ms without a token, free" in err
        assert world.prefills[0].runs[0].n == 2


async def test_client_chats(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.role[0] ~ m.content }}{% endfor %}{{ '+' if thinking else '-' }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    async with running(tmp_path) as world:
        code, out, err = await run_client("hi", "--chat", "--system", "S", "--thinking", "--router", world.router.address,
                                          "--max-tokens", "2")
        assert (code, out) == (0, "ab\n"), err
        assert list(world.prefills[0].runs[0].prompt.token_ids) == [BOS, *ids_of("sSuhi+")]


async def test_chat_without_a_template_is_refused_by_name(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        code, _, err = await run_client("hi", "--chat", "--router", world.router.address)
        assert code == 1 and "INVALID_ARGUMENT" in err and "no chat template" in err
        code, _, err = await run_client("hi", "--system", "S", "--router", world.router.address)
        assert code == 1 and "--chat" in err and not world.prefills[0].runs


async def test_client_reads_stdin_and_says_errors_in_one_sentence(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        code, out, err = await run_client("--router", world.router.address, "--max-tokens", "0", stdin="hi")
        assert code == 1 and out == "" and "max_tokens is 0" in err and len(err.strip().splitlines()) == 1
        code, out, err = await run_client("--router", world.router.address, "--max-tokens", "3", stdin="hi")
        assert (code, out) == (0, "abc\n"), err


async def test_ctrl_c_cancels(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        decode = world.decodes[0]
        decode.serve = lambda session, submit: decode.decode(session, submit, stop_after=4)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.router.client", "hi", "--router", world.router.address, cwd=ROOT,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        assert await process.stdout.readexactly(4) == b"abcd"
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
        assert process.returncode == 130 and b"Traceback" not in err, err
        await until(lambda: bool(decode.cancels), "decode is cancelled")


async def test_client_without_a_router() -> None:
    code, out, err = await run_client("hi", "--router", "127.0.0.1:1")
    assert (code, out) == (1, "") and len(err.splitlines()) == 1, err
    assert "the router at 127.0.0.1:1 cannot be reached" in err and "make up" in err


def test_router_is_found_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BATON_ROUTER", raising=False)
    with pytest.raises(SetupError, match="make up"):
        find_router(None)
    (tmp_path / ".run").mkdir()
    (tmp_path / ".run" / "router").write_text("127.0.0.1:1234\n")
    assert find_router(None) == "127.0.0.1:1234"
    monkeypatch.setenv("BATON_ROUTER", "other:1")
    assert find_router(None) == "other:1" and find_router("given:2") == "given:2"


async def test_stream_for_programs(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        text = ""
        async for reply in stream(world.router.address, request_of(max_tokens=4), CLEAR):
            text += reply.delta.text
        assert text == "abcd"


async def test_text_that_is_no_utf8_is_one_sentence() -> None:
    """From stdin, as the prompt and as a stop string."""
    for arguments, stdin in (([], b"caf\xe9"), ([b"caf\xe9"], b""), (["hi", "--stop", b"\xff"], b"")):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.router.client", "--router", "127.0.0.1:1", *arguments, cwd=ROOT,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )
        _, err = await process.communicate(stdin)
        assert process.returncode == 1 and b"not UTF-8" in err and len(err.splitlines()) == 1, err


async def test_empty_pool_is_told_apart_from_a_router_that_is_not_there(tmp_path: Path) -> None:
    async with running(tmp_path, prefills=0, decodes=0) as world:
        code, _, err = await run_client("hi", "--router", world.router.address)
        assert code == 1 and "the prefill and the decode pool has no rank" in err and "cannot be reached" not in err


async def test_help_names_program_and_every_number_with_range_and_default() -> None:
    code, out, _ = await run_client("--help")
    words = " ".join(out.split())
    assert code == 0 and words.startswith("usage: python -m services.router.client")
    for number in client_module._NUMBERS:
        help_of = words.split(f" --{number.replace('_', '-')} ")[-1]
        assert "(default" in help_of.split(" --")[0], number
    code, _, err = await run_client("hi", "--router", "127.0.0.1:1", "--seed", "-1")
    assert code == 1 and "from 0 to 2^64 - 1" in err


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
def test_a_connection_that_fails_is_told_apart_from_what_the_router_says(code: grpc.StatusCode) -> None:
    """A router that dies or stops in mid-answer leaves one of these two."""
    theirs = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "Socket closed")
    assert client_module._sentence(theirs, "h:1").startswith("the router at h:1 cannot be reached, or went away")
    ours = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata((ERROR_KEY, "NoMember")), "no rank")
    assert client_module._sentence(ours, "h:1") == f"{code.name}: no rank"


async def test_client_asks_the_next_replica_while_nothing_was_shown(tmp_path: Path) -> None:
    async with running(tmp_path) as world, running(tmp_path, prefills=0, decodes=0) as empty:
        replicas = f"127.0.0.1:1,{empty.router.address},{world.router.address}"
        code, out, err = await run_client("hi", "--router", replicas, "--max-tokens", "6", "--temperature", "0")
        assert (code, out) == (0, "abcdef\n"), err
        code, out, err = await run_client("hi", "--router", f"127.0.0.1:1,{empty.router.address}", "--max-tokens", "6")
        assert code == 1 and "has no rank" in err, err
    code, _, err = await run_client("hi", "--router", "127.0.0.1:1,127.0.0.1:2")
    assert code == 1 and "the router at 127.0.0.1:1, 127.0.0.1:2 cannot be reached" in err


async def test_client_says_what_happened_once_something_was_shown(tmp_path: Path) -> None:
    async with running(tmp_path) as world, running(tmp_path) as other:
        async def serve(session: DecodeSession, submit: decode_pb2.Submit) -> None:
            await world.decodes[0].decode(session, submit, stop_after=2)

        world.decodes[0].serve = serve
        arguments = ["-m", "services.router.client", "hi", "--router", f"{world.router.address},{other.router.address}", "--seed", "7"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        assert await process.stdout.readexactly(2) == b"ab"
        await world.router.stop(0)
        _, err = await process.communicate()
        assert process.returncode == 1 and "went away after 2 tokens" in err.decode() and "--seed 7" in err.decode(), err
        assert not other.prefills[0].runs
