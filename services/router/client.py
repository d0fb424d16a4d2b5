"""`python -m services.router.client "text" [...]`: streams an answer to the terminal; text comes from stdin when none is given.

For programs: `async for reply in stream(address, request)`.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from proto.baton.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from services.runtime.errors import SetupError
from services.runtime.serve import open_channel

ADDRESS_FILE = Path(".run/router")  # of the cluster that `make up` runs
_NUMBERS: dict[str, type] = {
    "max_tokens": int, "min_tokens": int, "temperature": float, "top_k": int, "top_p": float, "min_p": float, "frequency_penalty": float,
    "presence_penalty": float, "repetition_penalty": float, "seed": int, "logprobs": int,
}


async def stream(
    address: str, request: generation_pb2.GenerateRequest, timeout_s: float | None = None
) -> AsyncIterator[generation_pb2.GenerateReply]:
    """Every message of one request. Raises grpc.aio.AioRpcError; closing the iterator early cancels the request."""
    async with open_channel(address) as channel:
        call: Any = generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=timeout_s)
        try:
            async for reply in call:
                yield reply
        finally:
            call.cancel()


def find_router(given: str | None) -> str:
    """Address of the router: as given, else BATON_ROUTER, else that of the cluster that runs here. Raises SetupError."""
    address = given or os.environ.get("BATON_ROUTER", "")
    if not address and ADDRESS_FILE.is_file():
        address = ADDRESS_FILE.read_text().strip()
    if not address:
        raise SetupError(f"no router is known ({ADDRESS_FILE} does not exist); start one with `make up` or name it with --router host:port")
    return address


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Stream text from a Baton router.")
    parser.add_argument("text", nargs="?", help="the prompt; from stdin when left out")
    parser.add_argument("--chat", action="store_true", help="the text is a user's message, for the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message before it; needs --chat")
    parser.add_argument("--thinking", action=argparse.BooleanOptionalAction, help="the template's switch of that name; needs --chat")
    parser.add_argument("--router", metavar="HOST:PORT", help="default: BATON_ROUTER, else the cluster of `make up`")
    for name, kind in _NUMBERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=None)
    parser.add_argument("--stop", action="append", default=[], help="a stop string; may be repeated")
    parser.add_argument("--stop-token-ids", type=int, nargs="+", default=[])
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--timeout", type=float, default=None, metavar="SECONDS")
    parser.add_argument("--timeline", action="store_true", help="print where the time went, to stderr")
    return parser


def request_of(arguments: argparse.Namespace, text: str) -> generation_pb2.GenerateRequest:
    """The request that the command line means; what was not given stays unset. Raises SetupError for a number that does not fit."""
    request = generation_pb2.GenerateRequest(stop=arguments.stop)
    if arguments.chat:
        _add_chat(request.chat, arguments, text)
    elif arguments.system is not None or arguments.thinking is not None:
        raise SetupError("--system and --thinking are parts of a chat; give --chat too")
    else:
        request.text = text
    for name in _NUMBERS:
        value = getattr(arguments, name)
        if value is not None:
            try:
                setattr(request, name, value)
            except ValueError:
                raise SetupError(f"--{name.replace('_', '-')} {value} is out of range") from None
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


async def _print_answer(arguments: argparse.Namespace) -> None:
    text = arguments.text if arguments.text is not None else sys.stdin.read()
    request = request_of(arguments, text)
    async for reply in stream(find_router(arguments.router), request, arguments.timeout):
        if reply.HasField("delta"):
            print(reply.delta.text, end="", flush=True)
            for token in reply.delta.tokens:
                best = ", ".join(f"{i} {p:.4f}" for i, p in zip(token.top_logprobs.token_ids, token.top_logprobs.logprobs, strict=True))
                print(f"[{token.id} {token.logprob:.4f}{'; best ' + best if best else ''}]", file=sys.stderr)
        elif reply.HasField("finished"):
            print()
            if arguments.timeline:
                print(describe(reply.finished), file=sys.stderr)


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
    ))


def main() -> None:
    """Exit code 0 = finished, 1 = error (one sentence on stderr), 130 = Ctrl-C."""
    arguments = _parser().parse_args()
    try:
        asyncio.run(_print_answer(arguments))
    except SetupError as error:
        sys.exit(f"error: {error}")
    except grpc.aio.AioRpcError as error:
        code: grpc.StatusCode = error.code()
        sys.exit(f"error: {code.name}: {error.details()}")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has enough
        sys.stdout = None
        sys.exit(1)


if __name__ == "__main__":
    main()
