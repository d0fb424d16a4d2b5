"""/metrics, /livez and /readyz of a process over HTTP, by threads of their own: a scrape needs no turn of the event loop.

    server = serve_metrics("127.0.0.1:0", is_live, is_ready)      probes: "" = yes, else one line that says why not
    server.address; server.close()

/metrics is prometheus_client's own WSGI app: text, or OpenMetrics and gzip where the client accepts them. GET and HEAD, no body, one
request a connection. A connection has bounded time and size and there are at most _MAX_CONNECTIONS: clients who stall hold little, briefly.
"""

import asyncio
import contextlib
import io
import socket
import socketserver
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import disable_created_metrics, make_wsgi_app

from services.runtime.errors import SetupError
from services.runtime.process import write_whole

Probe = Callable[[], str]
_MAX_CONNECTIONS = 16
_MAX_HEAD_BYTES = 8192
_HEAD_S = 5.0  # for all of a request's head
_WRITE_S = 5.0  # for each of the few writes of an answer
_PULSE_S = 0.5
_STALLED_S = 5.0


class LoopPulse:
    """Whether an event loop turns: `run` in the loop, `why_not` from any thread."""

    def __init__(self) -> None:
        self._beat_at = time.monotonic()

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            self._beat_at = time.monotonic()
            await asyncio.sleep(_PULSE_S)

    def why_not(self) -> str:
        """A Probe."""
        late_s = time.monotonic() - self._beat_at
        return f"the event loop has not turned for {late_s:.1f} s" if late_s > _STALLED_S else ""


class _Handler(WSGIRequestHandler):
    server_version, sys_version = "baton", ""

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client is gone, or took too long: its own loss
            head = self._read_head()
            self.connection.settimeout(_WRITE_S)  # sendall() counts it for a whole write
            if len(head) > _MAX_HEAD_BYTES:
                self.requestline = self.request_version = self.command = ""
                self.send_error(431)
            elif head:
                self.rfile = io.BytesIO(head)
                super().handle()

    def _read_head(self) -> bytes:
        """Up to the empty line; more than _MAX_HEAD_BYTES when it has none, b"" when the client leaves. Raises OSError when it is slow."""
        until, head = time.monotonic() + _HEAD_S, b""
        while b"\r\n\r\n" not in head and b"\n\n" not in head and len(head) <= _MAX_HEAD_BYTES:
            self.connection.settimeout(max(until - time.monotonic(), 0.001))
            more = self.connection.recv(4096)
            if not more:
                return b""
            head += more
        return head

    def address_string(self) -> str:
        return self.client_address[0]

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds: no line for any."""


class _HttpServer(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 32

    def __init__(self, host: str, port: int, app: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)
        self.set_app(app)

    def server_bind(self) -> None:
        """Without HTTPServer's look-up of the host's full name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # pyright: ignore[reportAttributeAccessIssue]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client's connection is no event of ours."""


class MetricsServer:
    """Serves until closed. `address`: host:port really bound, "" when nothing is served."""

    def __init__(self, server: _HttpServer | None, host: str) -> None:
        self._server = server
        self._is_closed = False
        self.address = "" if server is None else f"{host}:{server.server_port}"
        if server is not None:
            threading.Thread(target=self._accept, args=(server,), daemon=True, name="metrics").start()

    def _accept(self, server: _HttpServer) -> None:
        while not self._is_closed:
            try:
                server.process_request(*server.get_request())
            except (OSError, RuntimeError):  # closed; or no file or thread is to be had, which may pass
                time.sleep(0.0 if self._is_closed else 0.1)

    def close(self) -> None:
        """Accept nothing more. May be called again."""
        self._is_closed = True
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._server.socket.close()


def serve_metrics(address: str, is_live: Probe, is_ready: Probe) -> MetricsServer:
    """Serve at `address` (host:port; port 0 = any free one; "" = nowhere), probes asked by another thread. Raises SetupError: port taken.

    Plain HTTP without a password: it may listen beyond loopback, where Prometheus and probes are, for it tells numbers and takes no order.
    """
    host, _, port = address.rpartition(":")
    disable_created_metrics()  # a second series for every counter, which nothing here reads
    if not address:
        return MetricsServer(None, "")
    try:
        return MetricsServer(_HttpServer(host.strip("[]"), int(port), _routes(is_live, is_ready)), host)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        advice = "choose another address (port 0 = any free one) or \"\" for none"
        raise SetupError(f"cannot serve metrics on {address} ({reason}); {advice}") from None


@contextlib.asynccontextmanager
async def loop_metrics(address: str, file: Path | None, is_ready: Probe) -> AsyncGenerator[MetricsServer]:
    """Metrics of this event loop's process while the block runs: it is live while the loop turns. `file` is told host:port.

    Raises SetupError.
    """
    pulse = LoopPulse()
    server = serve_metrics(address, pulse.why_not, is_ready)
    beating = asyncio.create_task(pulse.run())
    try:
        if file is not None and server.address:
            write_whole(file, server.address)
        yield server
    finally:
        beating.cancel()
        server.close()


def _routes(is_live: Probe, is_ready: Probe) -> Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]:
    metrics: Any = make_wsgi_app()
    probes = {"/livez": is_live, "/readyz": is_ready}

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if method not in ("GET", "HEAD"):
            status, text = "405 Method Not Allowed", f"{path} takes GET and HEAD"
        elif path == "/metrics":
            body = metrics(environ | {"REQUEST_METHOD": "GET"}, start_response)
            return body if method == "GET" else []
        elif path in probes:
            reason = probes[path]()
            status, text = ("503 Service Unavailable", reason) if reason else ("200 OK", "ok")
        else:
            status, text = "404 Not Found", "here are /metrics, /livez and /readyz"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), *([("Allow", "GET, HEAD")] if status[0:3] == "405" else [])])
        return [f"{text}\n".encode()] if method != "HEAD" else []

    return app
