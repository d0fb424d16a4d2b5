"""The router's gRPC server: Generation for clients, Registry for fronts."""

import asyncio
import contextlib
import logging
import math
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import grpc.aio

from proto.baton.v1 import generation_pb2, generation_pb2_grpc, registry_pb2_grpc
from services.model.config import load_config as load_model_config
from services.router.chat import ChatTemplate
from services.router.dispatch import Dispatcher
from services.router.metrics import PREFIX_PAGES, RANKS, counted
from services.router.pool import ROLES, Pool
from services.router.prefix_index import SOURCES
from services.router.registry import RegistryServicer
from services.router.tokenizer import Tokenizer, load_template, load_tokenizer
from services.router.validate import Limits, Request, validate
from services.runtime.config import Config
from services.runtime.errors import BatonError, CheckpointError, NoMember
from services.runtime.metrics import loop_metrics
from services.runtime.process import say, write_whole
from services.runtime.security import Security
from services.runtime.serve import Server, abort, cancel

logger = logging.getLogger(__name__)

_SERVICES = ("baton.v1.Generation", "baton.v1.Registry")
_DRAIN_S = 30.0  # running requests get this long after SIGTERM
_NUM_TOKENIZER_THREADS = 2
_NO_PAIR = "no prefill rank and decode rank that could be paired are known"
# What a request may weigh beside its prompt: roles, stop strings. A front's ranks with their NIXL metadata come in by this port too.
_REQUEST_BYTES = 2**20
_TOKEN_BYTES = 16  # of UTF-8, more than three times what a token of text has on average; as an id a token takes 5 at most


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """Validates off the event loop, then hands over to dispatch."""

    def __init__(
        self, pool: Pool, dispatcher: Dispatcher, tokenizer: Tokenizer, template: ChatTemplate | None, model_limits: Limits,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        """`model_limits`: of the model folder; asked while no pair has said what it takes. Without `template` chats are refused."""
        self._pool = pool
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._template = template
        self._model_limits = model_limits
        self._eos_token_ids = eos_token_ids
        self._executor = ThreadPoolExecutor(_NUM_TOKENIZER_THREADS, "tokenizer")
        self.is_stopping = False
        self.num_open = 0  # calls that have not got their last word

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        deadline_s = _deadline_s(context)
        self.num_open += 1
        try:
            with counted(deadline_s):
                if self.is_stopping:
                    raise NoMember("this router is stopping; ask another replica")
                checked = await self.check(request)
                await self._dispatcher.run(checked, context.write, deadline_s)
        except BatonError as error:
            await abort(context, error)
        finally:
            self.num_open -= 1

    async def check(self, message: generation_pb2.GenerateRequest) -> Request:
        """Validate and tokenise. Raises InvalidRequest."""
        limits = self._pool.limits(self._model_limits)
        arguments = (message, self._tokenizer, limits, self._eos_token_ids, time.monotonic(), self._template)
        return await asyncio.get_running_loop().run_in_executor(self._executor, validate, *arguments)

    def close(self) -> None:
        """Give the tokenizer threads back."""
        self._executor.shutdown(wait=False)

    async def GetInfo(
        self, request: generation_pb2.GetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> generation_pb2.GetInfoReply:
        limits = self._pool.limits(self._model_limits)
        reply = generation_pb2.GetInfoReply(model=self._pool.model, max_model_len=limits.max_model_len, vocab_size=limits.vocab_size)
        for role in ROLES:
            fingerprints = [state.fingerprint for state in self._pool.usable(role)]
            for fingerprint in dict.fromkeys(fingerprints):
                reply.pools.add(role=role, num_ranks=fingerprints.count(fingerprint), fingerprint=fingerprint)
        return reply


class Router:
    """Everything that one router process holds."""

    def __init__(self, config: Config) -> None:
        """Reads the model folder's config, tokenizer and chat template. Raises SetupError."""
        folder = Path(config.model.path)
        model = load_model_config(folder)
        tokenizer = load_tokenizer(folder, model.bos_token_id)
        if tokenizer.vocab_size > model.vocab_size:
            sizes = f"the tokenizer has {tokenizer.vocab_size} ids but the model's vocab_size is {model.vocab_size}"
            raise CheckpointError(f"{folder}: {sizes}; take both from one checkpoint")
        template = load_template(folder, tokenizer, model.bos_token_id, model.eos_token_ids)
        limits = Limits(config.model.max_model_len or model.max_position_embeddings, model.vocab_size)
        security = Security.of(config.security)
        self.pool = Pool(uuid.uuid4().hex, security, config.router.prefix_wait_s)
        self.dispatcher = Dispatcher(self.pool, config.router, tokenizer.token_bytes)
        self.servicer = GenerationServicer(self.pool, self.dispatcher, tokenizer, template, limits, model.eos_token_ids)
        self._metrics_address = config.router.metrics
        self._why_not_ready = _NO_PAIR
        self._server = Server(
            config.router.address, _SERVICES, security, max_request_bytes=_REQUEST_BYTES + _TOKEN_BYTES * limits.max_model_len
        )
        self._server.add(generation_pb2_grpc.add_GenerationServicer_to_server, self.servicer)
        self._server.add(registry_pb2_grpc.add_RegistryServicer_to_server, RegistryServicer(self.pool))

    @property
    def address(self) -> str:
        """host:port that is really bound, after start()."""
        return self._server.address

    async def start(self) -> None:
        """Listen. Raises SetupError when the port is taken."""
        await self._server.start()
        logger.info("router %s listens on %s", self.pool.router_id, self.address)

    async def run(self, stopping: asyncio.Event, address_file: Path | None = None, metrics_file: Path | None = None) -> None:
        """Start, tell the files where gRPC and metrics are, serve until `stopping`, finish what runs, leave. Raises SetupError."""
        async with loop_metrics(self._metrics_address, metrics_file, self.why_not_ready):
            await self._run(stopping, address_file)

    async def _run(self, stopping: asyncio.Event, address_file: Path | None) -> None:
        await self.start()
        if address_file is not None:
            write_whole(address_file, self.address)
        say(f"router listens on {self.address}")
        health = asyncio.create_task(self.watch_health())
        try:
            await stopping.wait()
        finally:
            await cancel(health)
            await self.stop(_DRAIN_S)

    async def watch_health(self) -> None:
        """SERVING exactly while some prefill rank and some decode rank can be paired."""
        while True:
            await self._set_ready("" if self.pool.pairable() else _NO_PAIR)
            for role in ROLES:
                RANKS.labels(role).set(len(self.pool.usable(role)))
            for source in SOURCES:
                PREFIX_PAGES.labels(source).set(self.pool.index.count_pages(source, time.monotonic()))
            with contextlib.suppress(TimeoutError):
                await self.pool.wait_changed(1.0)

    def why_not_ready(self) -> str:
        """Readiness, as gRPC health has it: "" while some pair of ranks can be made; any thread may ask."""
        return self._why_not_ready

    async def _set_ready(self, why_not: str) -> None:
        """gRPC health and /readyz say the same."""
        self._why_not_ready = why_not
        await self._server.set_serving(not why_not)

    async def stop(self, drain_s: float) -> None:
        """No new requests, and none that wait; those that run get `drain_s`."""
        self.servicer.is_stopping = True
        self.dispatcher.stop()
        await self._set_ready("the router drains")
        if self.servicer.num_open and drain_s:
            say(f"draining: what runs gets {drain_s:g} s at most; a second Ctrl-C ends it at once")
        give_up_at = time.monotonic() + drain_s
        while self.servicer.num_open and time.monotonic() < give_up_at:
            await asyncio.sleep(0.05)
        await self._server.stop(0.0)
        await self.pool.close()
        self.servicer.close()


def _deadline_s(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Seconds left of the client's deadline, None = it set none (gRPC then names a time years away)."""
    left = cast("float | None", context.time_remaining())  # the stubs forget None
    return None if left is None or not math.isfinite(left) or left > 1e8 else left
