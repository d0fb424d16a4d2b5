"""A router's Session, a TCP proxy that a test breaks, and a real decode front whose rank is a list of commands."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from proto.baton.v1 import common_pb2
from services.decode.messages import FirstToken, Ready, StepOut, Submit, TransferTimes
from services.decode.server import DecodeService
from services.router.mailbox import Event, Mailbox
from services.router.session import Session
from tests.clear import CLEAR
from tests.decode import front_rig
from tests.runtime.tcp_proxy import TcpProxy
from tests.runtime.waiting import until

LONG_S = 60.0  # longer than any test: what is over sooner was not over by time
_TIMES = TransferTimes(num_pages=1, num_cached_pages=0, num_bytes=8, read_us=1, exposed_us=1, wait_us=1, transport="fake")


class Inbox(Mailbox):
    """A request's mailbox that remembers everything."""

    def __init__(self) -> None:
        super().__init__(10**6)
        self.events: list[Any] = []

    def put(self, event: Event) -> None:
        self.events.append(event)


class SessionRig:
    """Both ends of one session."""

    def __init__(self, front: front_rig.Rig, proxy: TcpProxy, session: Session) -> None:
        self.front, self.proxy, self.session = front, proxy, session
        self._num_submits = 0

    @property
    def service(self) -> DecodeService:
        return self.front.service

    @property
    def commands(self) -> list[Any]:
        return self.front.rank.commands

    async def opened(self) -> None:
        await until(lambda: self.session.is_open, "the session is open")

    def submit(self, **fields: object) -> tuple[int, Inbox]:
        """Its handle, and what it hears."""
        self._num_submits += 1
        key = common_pb2.RequestKey(request_id=f"request-{self._num_submits}", attempt=1)
        inbox = Inbox()
        return self.session.submit(front_rig.submit(key=key, **fields).submit, inbox), inbox

    async def submitted(self, **fields: object) -> tuple[Submit, Inbox]:
        """A request that the rank has."""
        _, inbox = self.submit(**fields)
        name = f"request-{self._num_submits}"

        def found() -> list[Submit]:
            return [command for command in self.commands if isinstance(command, Submit) and command.spec.key.request_id == name]

        await until(lambda: bool(found()), f"the rank has {name}")
        return found()[0], inbox

    def ready(self, command: Submit, position: int = 0) -> Ready:
        return Ready(command.session, command.handle, position, FirstToken(5, None, (), ()), _TIMES)

    def step(self, command: Submit, index: int) -> StepOut:
        return StepOut(session=command.session, handles=[command.handle], first_index=[index], num_tokens=[1], token_ids=[index],
                       logprobs=[], top_ids=[], top_logprobs=[], step_us=1)


@asynccontextmanager
async def running_session(resume_s: float = LONG_S, front_resume_s: float = LONG_S, drain_s: float = 7.0) -> AsyncIterator[SessionRig]:
    """Open when it is yielded."""
    async with front_rig.running(drain_s, front_resume_s) as front:
        proxy = TcpProxy(int(front.server.address.rpartition(":")[2]))
        await proxy.start()
        rank = common_pb2.Rank(instance_id="d1", role="decode", pool_address=proxy.address)
        async with CLEAR.open_channel(proxy.address) as channel:
            session = Session(channel, "router", rank, lambda: None, resume_s)
            rig = SessionRig(front, proxy, session)
            try:
                await rig.opened()
                yield rig
            finally:
                await session.close()
                await proxy.stop()
