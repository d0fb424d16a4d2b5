"""Hand-over of a 5,000-token prompt of DeepSeek-V3 (351 MB, 79 pages) between two processes: C7, C8, and their share of memcpy.

All of a real hand-over but the wait for announcements is in the time: page reads, epoch words, comparison. Each transport runs in a
process of its own, since UCX reads its environment once.
"""

import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np

from services.kv.layout import KvLayout
from services.kv.messages import RequestKey
from services.kv.pages import Holder, HolderKind
from services.kv.pull import PullState
from services.kv.puller import PullEnded
from services.kv.rank_kv import RankKv, open_rank_kv
from tests.bench.report import Row, report
from tests.kv.nixl_holder import compatible, expected_byte

V3 = KvLayout(num_layers=61, kv_lora_rank=512, rope_dim=64, dtype="bfloat16")
NUM_PAGES = 79  # 5,000 tokens
ROUNDS = 7


class OtherProcess:
    """The other process."""

    def __init__(self) -> None:
        shape = json.dumps([V3.num_layers, V3.kv_lora_rank, V3.rope_dim, V3.dtype])
        command = [sys.executable, "-m", "tests.kv.nixl_holder", shape, str(NUM_PAGES)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, order: dict | None = None) -> dict:
        assert self.process.stdin and self.process.stdout
        if order:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def quit(self) -> None:
        assert self.process.stdin
        self.process.stdin.write('{"quit": true}\n')
        self.process.stdin.close()
        self.process.wait(30)


def pull(kv: RankKv, holder: OtherProcess, peer: str, number: int) -> float:
    """Seconds from destinations named (everything announced already) to verified."""
    key = RequestKey(f"r{number}", 0, 0)
    mine = Holder(HolderKind.REQUEST, key)
    with kv.lock:
        kv.pulls.claim(key, peer)
        pages = kv.pool.take(NUM_PAGES, mine)
    holder.ask({"announce": NUM_PAGES, "request": key.request_id})
    settle = time.perf_counter() + 0.05
    while time.perf_counter() < settle:
        kv.exchange.tick()
        time.sleep(0.001)
    began = time.perf_counter()
    with kv.lock:
        kv.pulls.begin(key, dict(enumerate(pages)))
    ended = kv.exchange.tick()
    while not ended:
        time.sleep(kv.exchange.pause_s)
        ended = kv.exchange.tick()
    seconds = time.perf_counter() - began
    assert isinstance(ended[0], PullEnded) and ended[0].state is PullState.READY, ended
    view = kv.memory.page_bytes_view()
    assert all((view[page] == expected_byte(index)).all() for index, page in enumerate(pages)), "pages arrived wrong"
    with kv.lock:
        kv.pool.release(mine)
    holder.ask()  # ended
    return seconds


def memcpy_seconds() -> float:
    """Median seconds of one thread's copy of the same bytes, memory already touched."""
    source = np.ones(NUM_PAGES * V3.page_bytes, dtype=np.uint8)
    target = np.zeros_like(source)
    times: list[float] = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure() -> dict[str, float | str]:
    """One transport, as UCX_TLS says."""
    kv = open_rank_kv(layout=V3, num_pages=NUM_PAGES, transport="nixl", compatibility=compatible(V3))
    holder = OtherProcess()
    peer = kv.transport.add_peer(bytes.fromhex(holder.ask()["metadata"]))
    holder.ask({"peer": kv.transport.metadata().hex()})
    times = [pull(kv, holder, peer, number) for number in range(ROUNDS + 2)][2:]  # the first ones touch memory and connect
    found = {"seconds": statistics.median(times), "best": min(times), "memcpy": memcpy_seconds(), "ucx": kv.transport.stats.ucx}
    assert kv.transport.stats.num_bytes == (ROUNDS + 2) * NUM_PAGES * (V3.page_bytes + 8)
    holder.quit()
    kv.close()
    return found


def run_child(ucx_tls: str | None) -> dict[str, float | str]:
    env = {name: value for name, value in os.environ.items() if name != "UCX_TLS"} | ({"UCX_TLS": ucx_tls} if ucx_tls else {})
    command = [sys.executable, "-m", "tests.bench.bench_handover", "measure"]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    gigabytes = NUM_PAGES * V3.page_bytes / 1e9
    rows: list[Row] = []
    for row_id, tls, base, aim in (("C7", None, 5.4, 9.5), ("C8", "tcp", 1.7, 2.4)):
        found = run_child(tls)
        seconds, copy = float(found["seconds"]), float(found["memcpy"])
        how = (f"{gigabytes * 1e3:.0f} MB as {NUM_PAGES} pages, all announced, verified; two processes, UCX transport {found['ucx']}"
               f"{' (UCX_TLS=tcp)' if tls else ''}; median of {ROUNDS}, best {gigabytes / float(found['best']):.2f} GB/s")
        rows.append(Row(row_id, gigabytes / seconds, "GB/s", "higher", base, aim, how))
        rows.append(Row(f"{row_id}-memcpy", copy / seconds, "x memcpy", "higher", None, None,
                        f"share of one thread's copy of the same bytes in the same run, {gigabytes / copy:.2f} GB/s"))
    report("handover", rows)


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        print(json.dumps(measure()))
    else:
        main()
