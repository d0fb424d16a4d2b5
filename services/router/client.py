"""`python -m services.router.client "text" [...]`: streams an answer to the terminal; text comes from stdin when none is given.

For programs: `async for reply in stream(address, request, Security.of(SecuritySection()))`.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from proto.baton.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from services.runtime.config import load_config, program_name
from services.runtime.errors import SetupError
from services.runtime.security import Security
from services.runtime.serve import ERROR_KEY
from services.runtime.telemetry import reason_name

ADDRESS_FILE = Path(".run/router")  # of the cluster that `make up` runs
# Field of the request: its type, and what the router takes (services/router/validate.py); the client's own default of max_tokens is 128,
# while the API's is all that fits.
_NUMBERS: dict[str, tuple[type, str]] = {
    "n": (int, "answers to the one prompt, each printed whole once it ends: from 1 to 16 (default 1, printed as it comes)"),
    "max_tokens": (int, "new tokens at most: from 1 (default 128)"),
    "min_tokens": (int, "new tokens at least: from 0, at most max-tokens (default 0)"),
    "temperature": (float, "0 = greedy, else from 0.001 to 100 (default 1)"),
    "top_k": (int, "choose among the K likeliest: from 1; 0 = off (default 0)"),
    "top_p": (float, "choose among the likeliest with this probability together: above 0, up to 1 (default 1)"),
    "min_p": (float, "leave out what is less likely than this times the likeliest: from 0 to 1 (default 0)"),
    "frequency_penalty": (float, "a count's penalty: from -2 to 2 (default 0)"),
    "presence_penalty": (float, "an occurrence's penalty: from -2 to 2 (default 0)"),
    "repetition_penalty": (float, "divides logits of what was there before: above 0, up to 100 (default 1)"),
    "seed": (int, "same seed, same text: from 0 to 2^64 - 1 (default: drawn by the router)"),
    "logprobs": (int, "print each token's id and log-probability, and those of the K best, to stderr: from 0 to 20 (default: none); "
                      "ids alone, since the client has no tokenizer"),
}
_MAX_TOKENS = 128


async def stream(
    address: str, request: generation_pb2.GenerateRequest, security: Security, timeout_s: float | None = None
) -> AsyncIterator[generation_pb2.GenerateReply]:
    """Every message of one request. Raises grpc.aio.AioRpcError, and ConfigError for an address that `security` must not dial; closing
    the iterator early cancels the request."""
    async with security.open_channel(address) as channel:
        call: Any = generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=timeout_s)
        try:
            async for reply in call:
                yield reply
        finally:
            call.cancel()


def find_router(given: str | None) -> str:
    """Addresses of the router's replicas, comma-separated: as given, else BATON_ROUTER, else those of the cluster that runs here.
    Raises SetupError."""
    address = given or os.environ.get("BATON_ROUTER", "")
    if not address and ADDRESS_FILE.is_file():
        address = ADDRESS_FILE.read_text().strip()
    if not address:
        raise SetupError(
            f"no router is known ({ADDRESS_FILE} does not exist); start a cluster with `make up` and wait until it says that it is up, "
            "or name a router with --router host:port"
        )
    return address


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program_name(), description="Stream text from a Baton router.")
    parser.add_argument("text", nargs="?", help="the prompt; from stdin when left out")
    parser.add_argument("--chat", action="store_true", help="the text is a user's message, for the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message before it; needs --chat")
    parser.add_argument("--thinking", action=argparse.BooleanOptionalAction, help="the template's switch of that name; needs --chat")
    parser.add_argument("--router", metavar="HOST:PORT[,...]", help="the router, or its replicas, asked in this order until one answers; "
                        "default: BATON_ROUTER, else the cluster of `make up`")
    parser.add_argument("--config", type=Path, metavar="FILE",
                        help="TOML file whose [security] says how to reach a router on another machine "
                        "(`python -m services.doctor keys FOLDER` makes one: FOLDER/client.toml)")
    parser.add_argument("--set", action="append", default=[], metavar="security.KEY=VALUE", help="one value of it")
    for name, (kind, meaning) in _NUMBERS.items():
        default = _MAX_TOKENS if name == "max_tokens" else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, metavar="N" if kind is int else "X", help=meaning)
    parser.add_argument("--stop", action="append", default=[], help="a string that ends the text; may be repeated, 16 times at most")
    parser.add_argument("--stop-token-ids", type=int, nargs="+", default=[], metavar="ID", help="token ids that end the text, 64 at most")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's own end")
    parser.add_argument("--timeout", type=float, default=None, metavar="SECONDS", help="give up after this long (default: never)")
    parser.add_argument("--timeline", action="store_true", help="print where the time went, to stderr")
    return parser


def request_of(arguments: argparse.Namespace, text: str) -> generation_pb2.GenerateRequest:
    """The request that the command line means; what was not given stays unset. Raises SetupError for a value that does not fit."""
    given = [("the prompt", text), ("--system", arguments.system or ""), *(("--stop", stop) for stop in arguments.stop)]
    for name, value in given:
        if not _is_unicode(value):
            raise SetupError(f"{name} is not UTF-8; convert it first, e.g. with iconv")
    request = generation_pb2.GenerateRequest(stop=arguments.stop)
    if arguments.chat:
        _add_chat(request.chat, arguments, text)
    elif arguments.system is not None or arguments.thinking is not None:
        raise SetupError("--system and --thinking are parts of a chat; give --chat too")
    else:
        request.text = text
    for name, (_, meaning) in _NUMBERS.items():
        value = getattr(arguments, name)
        if value is not None:
            try:
                setattr(request, name, value)
            except ValueError:
                raise SetupError(f"--{name.replace('_', '-')} {value} is out of range; {meaning}") from None
    try:
        request.stop_token_ids.extend(arguments.stop_token_ids)
    except ValueError:
        raise SetupError(f"--stop-token-ids {arguments.stop_token_ids}: ids are numbers from 0 to 2^32 - 1") from None
    if arguments.ignore_eos:
        request.ignore_eos = True
    return request


def _add_chat(chat: generation_pb2.Chat, arguments: argparse.Namespace, text: str) -> None:
    if arguments.system is not None:
        chat.messages.add(role="system", content=arguments.system)
    chat.messages.add(role="user", content=text)
    if arguments.thinking is not None:
        chat.thinking = arguments.thinking


def _is_unicode(text: str) -> bool:
    """False for an argument whose bytes were no UTF-8: Python keeps them as lone surrogates."""
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in text)


def _read_stdin() -> str:
    content = sys.stdin.buffer.read()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        wrong = f"byte {content[error.start]:#04x} at offset {error.start}"
        raise SetupError(f"the prompt on stdin is not UTF-8 ({wrong}); convert it first, e.g. with iconv") from None


@dataclass
class _Shown:
    """What the user has seen of an answer."""

    num_tokens: int = 0
    seed: int = 0


async def _print_answer(arguments: argparse.Namespace) -> None:
    request = request_of(arguments, arguments.text if arguments.text is not None else _read_stdin())
    security = Security.of(load_config(arguments.config, arguments.set).security)
    deadline = None if arguments.timeout is None else time.monotonic() + arguments.timeout
    addresses = [address for address in find_router(arguments.router).split(",") if address]
    for number, address in enumerate(addresses, start=1):
        shown = _Shown()
        try:
            replies = stream(address, request, security, deadline and deadline - time.monotonic())
            await _print_replies(arguments, replies, request, shown)
            return
        except grpc.aio.AioRpcError as error:
            is_shown = shown.num_tokens > 0
            if is_shown or number == len(addresses) or not (_is_away(error) or error.code() == grpc.StatusCode.UNAVAILABLE):
                why = await security.why_refused(address) if _is_away(error) and not is_shown else ""
                said = _sentence(error, address if is_shown else ", ".join(addresses), shown)
                raise SetupError(f"the router at {address} refuses this connection; {why}" if why else said) from None


def _is_routers(error: grpc.aio.AioRpcError) -> bool:
    """Whether the router itself said so."""
    return any(key == ERROR_KEY for key, _ in error.trailing_metadata() or ())


def _is_away(error: grpc.aio.AioRpcError) -> bool:
    """Whether the connection failed, rather than that the router said so."""
    # a server that stops cancels what runs
    return not _is_routers(error) and error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def _sentence(error: grpc.aio.AioRpcError, address: str, shown: _Shown | None = None) -> str:
    """What went wrong, for the user; a connection that failed is told apart from what the router said. `address`: all that were asked."""
    code: grpc.StatusCode = error.code()
    if _is_away(error) and shown is not None and shown.num_tokens:
        again = f"the same request with --seed {shown.seed} gives the same tokens, from any replica"
        return f"the router at {address} went away after {shown.num_tokens} tokens; {again}"
    if _is_away(error):
        return f"the router at {address} cannot be reached, or went away; start it (`make up`), or name another with --router host:port"
    if code == grpc.StatusCode.DEADLINE_EXCEEDED and not _is_routers(error):
        return f"the router at {address} was not done within --timeout"
    return f"{code.name}: {error.details()}"


async def _print_replies(arguments: argparse.Namespace, replies: AsyncIterator[generation_pb2.GenerateReply],
                         request: generation_pb2.GenerateRequest, shown: _Shown) -> None:
    texts: dict[int, str] = {}  # of several choices, until each ends
    async for reply in replies:
        if reply.HasField("started"):
            shown.seed = reply.started.seed
        elif reply.HasField("delta"):
            shown.num_tokens += len(reply.delta.token_ids)
            if request.n > 1:
                texts[reply.delta.choice] = texts.get(reply.delta.choice, "") + reply.delta.text
            else:
                print(reply.delta.text, end="", flush=True)
            for token in reply.delta.tokens:
                _print_logprobs(token, f"{reply.delta.choice}: " if request.n > 1 else "")
        elif reply.HasField("finished"):
            choice = reply.finished.choice
            print(f"--- choice {choice}\n{texts.pop(choice, '')}" if request.n > 1 else "", flush=True)
            if arguments.timeline:
                print(describe(reply.finished), file=sys.stderr)


def _print_logprobs(token: common_pb2.Token, choice: str) -> None:
    best = ", ".join(f"{i} {p:.4f}" for i, p in zip(token.top_logprobs.token_ids, token.top_logprobs.logprobs, strict=True))
    print(f"[{choice}{token.id} {token.logprob:.4f}{'; best ' + best if best else ''}]", file=sys.stderr)


def describe(finished: generation_pb2.Finished) -> str:
    """Reason, usage and timeline in a few lines."""
    usage, timeline, transfer = finished.usage, finished.timeline, finished.timeline.transfer
    reason = common_pb2.FinishReason.Name(finished.reason).lower()
    return "\n".join((
        f"finished: {reason}; {usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} new",
        f"queue {timeline.queue_us / 1e3:.1f} ms, prefill {timeline.prefill_us / 1e3:.1f} ms on {timeline.prefill_rank}",
        f"transfer {transfer.read_us / 1e3:.1f} ms ({transfer.exposed_us / 1e3:.1f} exposed), {transfer.num_pages} pages,"
        f" {transfer.num_bytes} bytes over {transfer.transport or 'nothing'}",
        f"decode {timeline.decode_us / 1e3:.1f} ms on {timeline.decode_rank or 'no rank'}; TTFT {timeline.ttft_us / 1e3:.1f} ms,"
        f" TPOT {timeline.tpot_us / 1e3:.2f} ms; retries {timeline.num_retries}",
        f"routing: {timeline.routing}",
        *(_describe_recovery(recovery) for recovery in timeline.recoveries),
    ))


def _describe_recovery(recovery: generation_pb2.Recovery) -> str:
    """One attempt after the first."""
    path = generation_pb2.Recovery.Path.Name(recovery.path).lower()
    took = f"{recovery.us / 1e3:.1f} ms without a token" if recovery.us else "it brought no token"
    why = f"{recovery.role} said {reason_name(recovery.reason)}"
    return f"{path} after {recovery.num_tokens} tokens: {why}; {took}{', free' if recovery.is_free else ''}"


def main() -> None:
    """Exit code 0 = finished, 1 = error (one sentence on stderr), 130 = Ctrl-C."""
    arguments = _parser().parse_args()
    try:
        asyncio.run(_print_answer(arguments))
    except SetupError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has enough
        sys.stdout = None
        sys.exit(1)
    except OSError as error:
        sys.stdout = None
        sys.exit(f"error: the answer cannot be written: {error.strerror}")


if __name__ == "__main__":
    main()
