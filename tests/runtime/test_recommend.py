"""`recommend` against processes and a Prometheus server that answer over HTTP with a simulated overload."""

import argparse
import asyncio
import contextlib
import json
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from services.runtime import recommend
from services.runtime.errors import BatonError, ConfigError, Interrupted, SetupError
from services.runtime.scrape import read_targets
from services.runtime.window import Snapshot
from tests.runtime.pool_simulation import decode_run, prefill_run


@contextlib.contextmanager
def answering(answer: Callable[[str], str]) -> Iterator[str]:
    """host:port of an HTTP server that gives `answer(path)`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answer(self.path).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def overload() -> list[Snapshot]:
    """One rank each of what busies three prefill and two decode ranks; 6 readings of 60 s."""
    prefill = prefill_run(1, requests_per_s=12.0, tokens=500.0, seconds=60.0, seed=3).snapshots[:6]
    decode = decode_run(1, requests_per_s=10.0, tokens=100.0, seconds=60.0, seed=3).snapshots[:6]
    return [Snapshot(one.at_s, {**one.processes, **other.processes}) for one, other in zip(prefill, decode, strict=True)]


def exposition(series: dict[str, float]) -> str:
    """Prometheus's text form."""
    quoted = {re.sub("=([^}]*)", r'="\1"', name): value for name, value in series.items()}
    return "".join(f"{name} {value}\n" for name, value in quoted.items())


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    recommend.add_arguments(parser)
    return parser.parse_args(words)


def test_processes_asked_by_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    """Each tells the next reading each time it is asked. The window is far shorter than the simulated one, and so all rates higher."""
    shots = overload()
    with contextlib.ExitStack() as stack:
        addresses: list[str] = []
        for name in shots[0].processes:
            texts = iter([exposition(dict(shot.processes[name])) for shot in shots])
            addresses.append(stack.enter_context(answering(lambda path, texts=texts: next(texts) if path == "/metrics" else "")))
        asyncio.run(recommend.main(arguments("--metrics", ",".join(addresses), "--window", "0.3", "--max-ranks", "9")))
    text = capsys.readouterr().out
    assert re.search(r"prefill +1 +9 +(TTFT|compute) +TTFT p90 ", text), text
    assert re.search(r"decode +1 +9 +ITL +ITL mean +- ", text), text
    assert max(map(len, text.splitlines())) <= 80 or "scale" in max(text.splitlines(), key=len)
    assert "python -m services.runtime.cluster scale prefill=9 decode=9" in text and "the ceiling of 9 is too low" in text


def test_a_prometheus_server_asked(capsys: pytest.CaptureFixture[str]) -> None:
    shots, asked = overload(), list[dict[str, list[str]]]()

    def answer(path: str) -> str:
        url = urllib.parse.urlsplit(path)
        assert url.path == "/api/v1/query_range"
        asked.append(urllib.parse.parse_qs(url.query))
        rows: dict[tuple[str, str], list[tuple[float, str]]] = {}
        for shot in shots:
            for process, series in shot.processes.items():
                for name, value in series.items():
                    rows.setdefault((process, name), []).append((shot.at_s, str(value)))
        wanted, result = re.compile(asked[-1]["query"][0].partition('=~"')[2].removesuffix('"}')), list[dict[str, Any]]()
        for (process, name), values in rows.items():
            name, _, label = name.rstrip("}").partition("{")
            assert wanted.fullmatch(name), f"{name} would not be found"
            labels = dict([label.split("=")]) if label else {}
            result.append({"metric": {"__name__": name, "instance": process, "job": "baton", **labels}, "values": values})
        return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}})

    with answering(answer) as address:
        asyncio.run(recommend.main(arguments("--prometheus", f"http://{address}", "--window", "30", "--json")))
    assert float(asked[0]["end"][0]) - float(asked[0]["start"][0]) == pytest.approx(30) and float(asked[0]["step"][0]) == pytest.approx(1)
    said = json.loads(capsys.readouterr().out)
    prefill, decode = said["pools"]["prefill"], said["pools"]["decode"]
    assert (prefill["ranks"], prefill["wanted"]) == (1, 6) and (decode["ranks"], decode["wanted"]) == (1, 2), said
    assert said["command"] == "python -m services.runtime.cluster scale prefill=6 decode=2"
    assert said["targets"]["ttft_s"] == 0.5 and prefill["predicted_s"] < 0.5 and decode["predicted_s"] < 0.05
    assert said["measured"]["decode"]["line"]["request_s"] == pytest.approx(0.001)


def test_targets_of_a_running_cluster_are_read_by_name(tmp_path: Path) -> None:
    file = tmp_path / "metrics.json"
    file.write_text('[{"targets": ["127.0.0.1:9"], "labels": {"role": "prefill", "process": "prefill/0"}}, {"targets": ["127.0.0.1:8"]}]')
    assert read_targets(file) == {"prefill/0": "127.0.0.1:9", "127.0.0.1:8": "127.0.0.1:8"}
    file.write_text('[{"targets": ["a:1", "a:2"], "labels": {"process": "x"}}]')
    assert read_targets(file) == {"a:1": "a:1", "a:2": "a:2"}
    file.write_text('{"targets": 1}')
    with pytest.raises(SetupError, match="is not in Prometheus's file_sd form"):
        read_targets(file)
    with pytest.raises(SetupError, match=r"no cluster of this tree is up: .* is not there; start one with make up"):
        read_targets(tmp_path / "none")


@pytest.mark.parametrize(("words", "error", "sentence"), [
    (["--ttft-ms", "0"], ConfigError, "--ttft-ms is 0 but it must be above 0"),
    (["--window", "nan"], ConfigError, "--window is nan but it must be above 0"),
    (["--headroom", "1"], ConfigError, "--headroom is 1 but it must be between 0 and 0.9"),
    (["--max-ranks", "0"], ConfigError, "--max-ranks is 0 but it must be between 1 and"),
    (["--metrics", "nowhere"], ConfigError, "--metrics has 'nowhere', which is not of the form host:port"),
    (["--metrics", ","], ConfigError, "--metrics names no process"),
    (["--metrics", "127.0.0.1:1"], SetupError, "no process answers with metrics: http://127.0.0.1:1/metrics: .*refused"),
    (["--prometheus", "prometheus:9090"], ConfigError, "it must be a URL such as"),
    (["--prometheus", "http://127.0.0.1:1"], SetupError, "the Prometheus server at http://127.0.0.1:1 does not answer as one"),
])
async def test_mistakes_are_said_in_one_sentence(words: list[str], error: type[BatonError], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        await recommend.main(arguments(*words))


async def test_interruption_and_servers_of_other_things() -> None:
    stopping = asyncio.Event()
    stopping.set()
    with answering(lambda path: "baton_requests_running 1\n") as router, pytest.raises(Interrupted):
        await recommend.main(arguments("--metrics", router), stopping)
    with answering(lambda path: "baton_requests_running 1\n") as router, pytest.raises(SetupError, match="no rank of prefill or decode"):
        await recommend.main(arguments("--metrics", router, "--window", "0.1"))
    with answering(lambda path: "<html>") as page, pytest.raises(SetupError, match="no process answers with metrics"):
        await recommend.main(arguments("--metrics", page, "--window", "0.1"))
    with answering(lambda path: "{}") as page, pytest.raises(SetupError, match="does not answer as one"):
        await recommend.main(arguments("--prometheus", f"http://{page}"))
    empty = '{"status": "success", "data": {"result": []}}'
    with answering(lambda path: empty) as server, pytest.raises(SetupError, match="--window is 10 s but fewer than two readings lie in it"):
        await recommend.main(arguments("--prometheus", f"http://{server}"))
