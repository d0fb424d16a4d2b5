"""A decode front without engines: DecodeService over real gRPC, its rank replaced by a list of commands."""
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from proto.baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from services.decode.server import SERVICE, DecodeService
from services.runtime.errors import EngineError
from services.runtime.ipc import Up
from services.runtime.serve import WIRE_VERSION, Server
from tests.clear import CLEAR

UP = Up(instance_id="d1", peer=b"", fingerprint="f", max_model_len=100, vocab_size=260, page_size=64, num_pages=8, max_running=4)


class FakeRank:
    """What the service uses of a RankProcess."""

    def __init__(self, up: Up = UP) -> None:
        self.rank, self.up = 0, up
        self.commands: list[object] = []
        self.is_down = False

    def send(self, command: object) -> None:
        if self.is_down:
            raise EngineError("rank 0 is down")
        self.commands.append(command)


class Stream:
    """A session's first stream, whose messages number themselves."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self.call = call
        self.read, self.cancel, self.done_writing = call.read, call.cancel, call.done_writing
        self._sequence = 0

    async def write(self, request: decode_pb2.SessionRequest) -> None:
        self._sequence += 1
        numbered = decode_pb2.SessionRequest(sequence=self._sequence)
        numbered.MergeFrom(request)
        await self.call.write(numbered)


class Rig:
    def __init__(self, service: DecodeService, rank: FakeRank, server: Server, stub: decode_pb2_grpc.DecodeStub) -> None:
        self.service, self.rank, self.server, self.stub = service, rank, server, stub

    async def open(self, **fields: object) -> grpc.aio.StreamStreamCall:
        call = self.stub.Session()
        opening = {"router_id": "r", "instance_id": "d1", "wire_version": WIRE_VERSION} | fields
        await call.write(decode_pb2.SessionRequest(open=decode_pb2.SessionOpen(**opening)))
        return call

    async def opened(self, router_id: str = "r") -> Stream:
        call = await self.open(router_id=router_id)
        reply = await call.read()
        assert (reply.sequence, reply.opened.resumed, reply.opened.wire_version) == (0, False, WIRE_VERSION)
        return Stream(call)

    async def commands(self, number: int) -> list:
        async with asyncio.timeout(5):
            while len(self.rank.commands) < number:
                await asyncio.sleep(0.001)
        assert len(self.rank.commands) == number
        return self.rank.commands

    def emit(self, *events: object) -> None:
        for event in events:
            self.service.on_event(self.rank, event)  # type: ignore[arg-type]


@asynccontextmanager
async def running(drain_s: float = 7.0, resume_s: float = 0.02) -> AsyncIterator[Rig]:
    """A front whose broken sessions are over after `resume_s`."""
    service, rank, server = DecodeService(drain_s, resume_s), FakeRank(), Server("127.0.0.1:0", [SERVICE], CLEAR)
    service.register(server)
    service.attach([rank])  # type: ignore[list-item]
    await server.start()
    try:
        async with CLEAR.open_channel(server.address) as channel:
            yield Rig(service, rank, server, decode_pb2_grpc.DecodeStub(channel))
    finally:
        await server.stop(0)
        for session in list(service._sessions.values()):
            session.end(None)  # nobody can resume it any more; one that still has a stream stays
    async with asyncio.timeout(5):
        while service.num_sessions:
            await asyncio.sleep(0.001)
    assert service.num_active() == 0


def sampling(**fields: object) -> common_pb2.Sampling:
    return common_pb2.Sampling(**({"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 9, "logprobs": -1} | fields))


def submit(handle: int = 1, **fields: object) -> decode_pb2.SessionRequest:
    filled = {
        "key": common_pb2.RequestKey(request_id="q", choice=0, attempt=3), "handle": handle, "fingerprint": "f", "deadline_us": 2_500_000,
        "prompt": common_pb2.Prompt(token_ids=[5, 6, 7], num_output_tokens=1, salt=b"s"), "num_preemptions": 2,
        "sampling": common_pb2.Sampling(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, frequency_penalty=0.25, presence_penalty=0.5,
                                        repetition_penalty=1.5, min_tokens=1, max_tokens=9, stop_token_ids=[4, 8], ignore_eos=True,
                                        seed=2**64 - 1, logprobs=2),
        "holder": common_pb2.Rank(instance_id="p1", role="prefill", pool_address="h:1", rank=4, peer=b"blob"),
    }
    return decode_pb2.SessionRequest(submit=decode_pb2.Submit(**(filled | fields)))
