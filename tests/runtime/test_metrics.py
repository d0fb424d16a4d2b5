"""/metrics, /livez and /readyz over HTTP: what is served, what is refused, and clients that stall or talk nonsense."""

import asyncio
import contextlib
import gzip
import http.client
import socket
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest, openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from services import VERSION
from services.runtime import engine as engine_module
from services.runtime import metrics, supervisor
from services.runtime.config import Config, DecodeSection
from services.runtime.engine import StepClock, rank_address
from services.runtime.errors import SetupError
from services.runtime.histogram import BatchHistogram
from services.runtime.metrics import LoopPulse, MetricsServer, loop_metrics, serve_metrics
from tests.runtime.waiting import until

State = dict[str, str]


@pytest.fixture
def state() -> State:
    return {"live": "", "ready": ""}


@pytest.fixture
def server(state: State) -> Iterator[MetricsServer]:
    server = serve_metrics("127.0.0.1:0", lambda: state["live"], lambda: state["ready"])
    yield server
    server.close()


def ask(server: MetricsServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str, bytes]:
    """Status, content type, body."""
    connection = http.client.HTTPConnection(server.address, timeout=20)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read()


def talk(server: MetricsServer, said: bytes) -> bytes:
    """All that is answered to these bytes, b"" when the connection is closed without a word."""
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(said)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while more := client.recv(4096):
                answer += more
    return answer


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.005)


def num_free(server: MetricsServer) -> int:
    inner: Any = server._server  # pyright: ignore[reportPrivateUsage]
    return inner._free._value


def test_text_and_openmetrics_parse(server: MetricsServer) -> None:
    status, kind, body = ask(server, "/metrics")
    families = {family.name for family in text_string_to_metric_families(body.decode())}
    assert status == 200 and kind.startswith("text/plain") and {"baton_incidents", "process_cpu_seconds"} <= families
    assert b"_created" not in body, "a second series for every counter"
    status, kind, body = ask(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    families = {family.name for family in openmetrics_parser.text_string_to_metric_families(body.decode())}
    assert status == 200 and kind.startswith("application/openmetrics-text") and "baton_incidents" in families
    assert b"baton_incidents" in gzip.decompress(ask(server, "/metrics", **{"Accept-Encoding": "gzip"})[2])


def test_probes_tell_why_not(server: MetricsServer, state: State) -> None:
    assert ask(server, "/livez")[::2] == (200, b"ok\n") and ask(server, "/readyz")[::2] == (200, b"ok\n")
    state["ready"] = "the front drains"
    assert ask(server, "/readyz")[::2] == (503, b"the front drains\n") and ask(server, "/livez")[0] == 200
    state["live"] = "the event loop has not turned for 9.0 s"
    assert ask(server, "/livez")[0] == 503


@pytest.mark.parametrize(("method", "path", "status", "has_body"), [
    ("HEAD", "/metrics", 200, False), ("HEAD", "/readyz", 200, False), ("POST", "/metrics", 405, True), ("DELETE", "/livez", 405, True),
    ("GET", "/", 404, True), ("GET", "/metrics/../etc/passwd", 404, True), ("OPTIONS", "/metrics", 405, True),
])
def test_only_get_and_head_of_three_paths(server: MetricsServer, method: str, path: str, status: int, has_body: bool) -> None:
    found = ask(server, path, method)
    assert found[0] == status and bool(found[2]) == has_body


@pytest.mark.parametrize("said", [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"\x00" * 100 + b"\r\n\r\n", b"GET\r\n\r\n", b"GET /metrics SPDY/9\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\n", b"\r\n\r\n",
])
def test_nonsense_is_answered_and_harms_nobody(server: MetricsServer, said: bytes) -> None:
    assert not talk(server, said).startswith(b"HTTP/1.0 200")
    assert ask(server, "/readyz")[0] == 200
    wait_until(lambda: num_free(server) == 16, "no connection is left")


def test_an_endless_head_is_refused(server: MetricsServer) -> None:
    assert talk(server, b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (metrics._MAX_HEAD_BYTES - 20)).startswith(b"HTTP/1.0 431")
    assert ask(server, "/readyz")[0] == 200


def test_clients_that_stall_are_dropped(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slowloris: a byte now and then keeps no connection, and as many as are allowed keep others out only while they last."""
    monkeypatch.setattr(metrics, "_HEAD_S", 0.5)
    host, port = server.address.split(":")
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection((host, int(port)), timeout=20)) for _ in range(16)]
        wait_until(lambda: num_free(server) == 0, "every place is taken")
        assert talk(server, b"GET /readyz HTTP/1.1\r\n\r\n") == b"", "beyond the bound a connection is closed"
        with contextlib.suppress(OSError):  # the others send nothing at all
            while True:
                slow[0].sendall(b"G")
                time.sleep(0.02)
        wait_until(lambda: num_free(server) == 16, "all were dropped")
        assert [client.recv(10) for client in slow[1:]] == [b""] * 15
    assert ask(server, "/readyz")[0] == 200


def test_a_client_that_does_not_read_is_dropped(server: MetricsServer, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_WRITE_S", 0.2)
    state["ready"] = "x" * 2**25  # more than the kernel takes for us
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(b"GET /readyz HTTP/1.1\r\n\r\n")
        wait_until(lambda: num_free(server) == 15, "it is being answered")
        wait_until(lambda: num_free(server) == 16, "it was given up")


def test_a_taken_port_is_one_sentence(server: MetricsServer) -> None:
    with pytest.raises(SetupError, match=rf"^cannot serve metrics on {server.address} \(Address already in use\); choose") as caught:
        serve_metrics(server.address, str, str)
    assert "\n" not in str(caught.value)
    with pytest.raises(SetupError, match=r"cannot serve metrics on no\.such\.host\.invalid:1"):
        serve_metrics("no.such.host.invalid:1", str, str)


def test_nothing_is_served_at_no_address() -> None:
    nowhere = serve_metrics("", str, str)
    assert nowhere.address == ""
    nowhere.close()


def test_a_closed_server_gives_its_port_back(server: MetricsServer) -> None:
    ask(server, "/livez")
    server.close()
    again = serve_metrics(server.address, str, str)
    assert ask(again, "/livez")[0] == 200
    again.close()


async def test_the_file_names_the_address_while_work_runs(tmp_path: Path) -> None:
    file = tmp_path / "metrics"
    async with loop_metrics("127.0.0.1:0", file, str) as server:
        assert file.read_text() == server.address
        assert (await asyncio.to_thread(ask, server, "/livez"))[0] == 200
    with pytest.raises(ConnectionRefusedError):
        await asyncio.to_thread(ask, server, "/livez")


async def test_a_loop_that_stands_still_is_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_STALLED_S", 0.2)
    monkeypatch.setattr(metrics, "_PULSE_S", 0.01)
    pulse, seen = LoopPulse(), threading.Event()
    beating = asyncio.create_task(pulse.run())

    def watch() -> None:
        wait_until(lambda: "has not turned for" in pulse.why_not(), "the probe notices")
        seen.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    await asyncio.sleep(0)
    assert seen.wait(20), "while this loop stands still"
    await until(lambda: pulse.why_not() == "", "it turns again")
    beating.cancel()
    watcher.join()


def test_an_engine_is_ready_once_it_is_up_and_while_its_step_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    channel: Any = type("Channel", (), {"is_up": False})()
    clock = StepClock()
    server = engine_module._serve_metrics("127.0.0.1:0", channel, clock)  # pyright: ignore[reportPrivateUsage]
    assert ask(server, "/livez")[0] == 200 and ask(server, "/readyz")[::2] == (503, b"the rank loads\n")
    channel.is_up = True
    assert ask(server, "/readyz")[0] == 200
    clock.begin(0.0)
    assert ask(server, "/readyz")[0] == 200, "a step that runs is no stuck one"
    monkeypatch.setattr(supervisor, "STEP_S", 0.0)
    assert ask(server, "/livez")[0] == 503 and b"a forward runs for" in ask(server, "/readyz")[2]
    server.close()


def test_ranks_listen_behind_their_front() -> None:
    config = Config(decode=DecodeSection(metrics="0.0.0.0:9100"))
    assert [rank_address(config, "decode", rank) for rank in (0, 3)] == ["0.0.0.0:9101", "0.0.0.0:9104"]
    assert rank_address(config, "prefill", 3) == "127.0.0.1:0", "any free one"
    assert rank_address(Config(decode=DecodeSection(metrics="")), "decode", 0) == "", "none"


def test_a_batch_histogram_says_what_the_librarys_own_says() -> None:
    bounds = (0.001, 0.01, 0.5, 3.0)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    batch, single = BatchHistogram("h_seconds", "x", bounds, ours), Histogram("h_seconds", "x", buckets=bounds, registry=theirs)
    for value, number in ((0.0, 2), (0.001, 1), (0.00100001, 3), (0.25, 100), (3.0, 1), (1e9, 4)):
        batch.observe(value, number)
        for _ in range(number):
            single.observe(value)
    assert batch.count == 111
    for write in (generate_latest, openmetrics.exposition.generate_latest):
        def lines(registry: CollectorRegistry, write: Callable[[CollectorRegistry], bytes] = write) -> list[bytes]:
            return [line for line in write(registry).splitlines() if b"_created" not in line]

        assert lines(ours) == lines(theirs)


def test_the_release_is_pyprojects() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
