"""A TCP proxy for gRPC connections that a test breaks at a chosen message: it knows HTTP/2's frames, so that pings do not count."""

import asyncio
import contextlib
from typing import Literal

Side = Literal["client", "server"]  # where bytes come from
_Pair = tuple[asyncio.StreamWriter, asyncio.StreamWriter]  # to the client, to the server
_PREFACE = 24  # bytes that a client says before its first frame
_HEADER = 9
_DATA = 0


class _Frames:
    """Counts frames that carry messages in one direction of one connection."""

    def __init__(self, skip: int) -> None:
        self._skip, self._header = skip, b""

    def num_data(self, chunk: bytes) -> int:
        """Frames of messages that begin in `chunk`."""
        number = 0
        while chunk:
            skipped, chunk = chunk[: self._skip], chunk[self._skip :]
            self._skip -= len(skipped)
            if self._skip or not chunk:
                return number
            taken, chunk = chunk[: _HEADER - len(self._header)], chunk[_HEADER - len(self._header) :]
            self._header += taken
            if len(self._header) == _HEADER:
                self._skip = int.from_bytes(self._header[:3], "big")
                number += self._header[3] == _DATA and self._skip > 0
                self._header = b""
        return number


class TcpProxy:
    """Listens at `address` and passes bytes to `port` on this machine, until told otherwise."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.address = ""
        self.is_refusing = False  # connections are accepted and ended at once
        self.num_connections = 0
        self._server: asyncio.Server | None = None
        self._writers: list[_Pair] = []  # of connections that are whole
        self._halves: list[_Pair] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._swallowing: set[Side] = set()
        self._swallowed: dict[Side, asyncio.Event] = {"client": asyncio.Event(), "server": asyncio.Event()}

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def swallow(self, side: Side) -> asyncio.Event:
        """What comes from `side` goes no further from now on, until a cut. The event is set when a message was swallowed."""
        self._swallowing.add(side)
        self._swallowed[side].clear()
        return self._swallowed[side]

    def cut(self) -> None:
        """End all connections on both sides; bytes under way are lost."""
        self.cut_half()
        self.cut_other_half()

    def cut_half(self) -> None:
        """The clients' ends of all connections break; the server hears nothing of it."""
        self._swallowing.clear()
        self._halves += self._abort(self._writers, 0)

    def cut_other_half(self) -> None:
        """The server hears of every half cut."""
        self._abort(self._halves, 1)

    def _abort(self, pairs: list[_Pair], end: int) -> list[_Pair]:
        taken = list(pairs)
        pairs.clear()
        for pair in taken:
            pair[end].transport.abort()
        return taken

    async def stop(self) -> None:
        """Nobody listens here any more."""
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._pass_on(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        if self.is_refusing:
            to_client.transport.abort()
            return
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            to_client.transport.abort()
            return
        self._writers.append((to_client, to_server))
        await asyncio.gather(self._pump("client", from_client, to_server), self._pump("server", from_server, to_client))

    async def _pump(self, side: Side, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = _Frames(_PREFACE if side == "client" else 0)
        with contextlib.suppress(OSError):
            while chunk := await reader.read(65536):
                num_data = frames.num_data(chunk)
                if side not in self._swallowing:
                    writer.write(chunk)
                elif num_data:
                    self._swallowed[side].set()
