"""A real cluster for tests: its own event loop in a thread, and a second "router" that only listens to what ranks report."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from proto.baton.v1 import common_pb2, generation_pb2, generation_pb2_grpc, registry_pb2_grpc
from services.doctor.watcher import Watcher
from services.runtime.local_cluster import Cluster
from services.runtime.serve import Server
from tests.clear import CLEAR

ROOT = Path(__file__).parents[2]
DEMO_CONFIG = ROOT / "deploy" / "dev.toml"


class Rig:
    """Cluster and watcher, run from synchronous tests."""

    def __init__(self, prefill: int, decode: int, settings: Sequence[str], run_dir: Path, routers: int = 1) -> None:
        self.watcher = Watcher()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._layout = (prefill, decode, routers, tuple(settings), run_dir)
        self.cluster: Cluster = self.call(self._start())
        self.address = self.cluster.router_address

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run `work` in the rig's loop and return what it returns."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> Cluster:
        self._server = Server("127.0.0.1:0", ["baton.v1.Registry"], CLEAR)
        self._server.add(registry_pb2_grpc.add_RegistryServicer_to_server, self.watcher)
        await self._server.start()
        prefill, decode, routers, settings, run_dir = self._layout
        cluster = Cluster(
            DEMO_CONFIG, prefill=prefill, decode=decode, routers=routers, settings=settings, run_dir=run_dir,
            more_routers=[self._server.address],
        )
        await cluster.start()
        return cluster

    def engine_pid(self, role: str, rank: int) -> int:
        return self.cluster.engine_pids(role)[rank]

    def settle(self, patience_s: float = 20.0) -> None:
        """Conservation: every rank's pages come back, nothing is queued, claimed, leased or running."""
        wait_until(lambda: not self.watcher.untidy(), patience_s, lambda: f"not conserved: {self.watcher.untidy()}")

    def wait_for_ranks(self, role: str, number: int, patience_s: float = 60.0) -> None:
        async def count() -> int:
            async with CLEAR.open_channel(self.address) as channel:
                info = await generation_pb2_grpc.GenerationStub(channel).GetInfo(generation_pb2.GetInfoRequest())
            return sum(pool.num_ranks for pool in info.pools if pool.role == role)

        wait_until(lambda: self.call(count()) == number, patience_s, lambda: f"{role} has not {number} ranks")

    def close(self) -> None:
        async def end() -> None:
            await self.cluster.stop()
            await self._server.stop(0)

        self.call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def wait_until(condition: Callable[[], bool], patience_s: float, complaint: Callable[[], str]) -> None:
    """Poll `condition`; fail with `complaint` when it does not come true."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, complaint()
        time.sleep(0.02)


@dataclass
class Answer:
    """Everything that a stream said."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[common_pb2.Token] = field(default_factory=list)
    started: generation_pb2.Started | None = None
    finished: generation_pb2.Finished | None = None

    @property
    def end(self) -> generation_pb2.Finished:
        assert self.finished is not None, "the stream had no end"
        return self.finished


async def generate(stub: generation_pb2_grpc.GenerationStub, on_delta: Callable[[Answer], None] | None = None, **fields: Any) -> Answer:
    """One request to its end. `prompt` = list of ids, or text."""
    prompt = fields.pop("prompt")
    source = {"text": prompt} if isinstance(prompt, str) else {"token_ids": generation_pb2.TokenIds(ids=prompt)}
    answer = Answer()
    async for reply in stub.Generate(generation_pb2.GenerateRequest(**source, **fields)):
        if reply.HasField("started"):
            answer.started = reply.started
        elif reply.HasField("delta"):
            answer.text += reply.delta.text
            answer.token_ids += reply.delta.token_ids
            answer.tokens += reply.delta.tokens
            if on_delta is not None:
                on_delta(answer)
        else:
            answer.finished = reply.finished
    return answer


def generate_all(address: str, requests: Sequence[dict[str, Any]], *, at_once: int) -> list[Answer]:
    """All `requests`, at most `at_once` in flight, answers in order."""

    async def run() -> list[Answer]:
        gate = asyncio.Semaphore(at_once)
        async with CLEAR.open_channel(address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)

            async def one(fields: dict[str, Any]) -> Answer:
                async with gate:
                    return await generate(stub, **fields)

            return list(await asyncio.gather(*(one(fields) for fields in requests)))

    return asyncio.run(run())


@contextlib.contextmanager
def failing(code: grpc.StatusCode) -> Iterator[list[str]]:
    """Expects the block to end in a gRPC error of `code`; its details are appended to the list."""
    details: list[str] = []
    try:
        yield details
    except grpc.aio.AioRpcError as error:
        assert error.code() == code, f"{error.code()}: {error.details()}"
        details.append(error.details() or "")
    else:
        raise AssertionError(f"no error, but {code} was expected")
