"""The whole cluster on this machine: C9-1, C9-16 (against transformers), S16 (does it batch), V4 (TTFT added), ROUTER-CPU.

Every ratio is taken within this one run. The cluster is up while none of its peers runs, and the other way round.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from services.model.config import load_config
from services.model.loader import load_weights
from services.prefill.forward import PrefillChunk, PrefillForward
from tests.bench.report import Row, report
from tests.e2e.rig import Answer, Rig, generate_all

MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
NUM_PROMPT = NUM_OUTPUT = 128
STREAMS = 16
ROUNDS = 3


def requests(number: int, salt: int, num_output: int = NUM_OUTPUT) -> list[dict[str, Any]]:
    """Prompts that share no page with those of another `salt`: prefix caches must not help."""
    draw = torch.Generator().manual_seed(salt)
    return [
        {"prompt": torch.randint(3, 4000, (NUM_PROMPT,), generator=draw).tolist(), "max_tokens": num_output, "temperature": 0.0,
         "ignore_eos": True, "seed": 1}
        for _ in range(number)
    ]


def timed(rig: Rig, work: list[dict[str, Any]], at_once: int) -> tuple[float, list[Answer]]:
    began = time.perf_counter()
    answers = generate_all(rig.address, work, at_once=at_once)
    seconds = time.perf_counter() - began
    assert all(len(answer.token_ids) == fields["max_tokens"] for answer, fields in zip(answers, work, strict=True))
    return seconds, answers


def peer_rate(batch: int) -> dict[str, Any]:
    """Tokens/s of transformers' generate, its fastest experts implementation."""
    done = subprocess.run([sys.executable, "-m", "tests.bench.hf_peer", "--batch", str(batch)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def one_process_ttft(work: list[dict[str, Any]]) -> float:
    """Median seconds from ids to first token in one process: the prefill forward and an argmax, nothing else."""
    torch.set_num_threads(1)
    config = load_config(MODEL)
    forward = PrefillForward(config, load_weights(MODEL, config))
    pages = torch.zeros(16, config.num_hidden_layers, 64, config.latent_width)
    times: list[float] = []
    for fields in work:
        began = time.perf_counter()
        logits = forward.run(pages, [PrefillChunk(token_ids=fields["prompt"], start=0, page_table=[0, 1, 2], want_logits=True)])
        int(logits[0].argmax())
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


async def _cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def measure_cluster(rig: Rig) -> dict[str, float]:
    timed(rig, requests(STREAMS, 1), STREAMS)  # warm
    router = psutil.Process(rig.cluster.processes["router"].pid)
    found: dict[str, list[float]] = {"one": [], "together": [], "ratio": [], "ttft": [], "router_us": []}
    for index in range(ROUNDS):
        alone, answers = timed(rig, requests(STREAMS, 10 + index), 1)
        found["one"].append(STREAMS * NUM_OUTPUT / alone)
        before = asyncio.run(_cpu_of(router))
        together, _ = timed(rig, requests(STREAMS, 20 + index), STREAMS)
        found["router_us"].append((asyncio.run(_cpu_of(router)) - before) / (STREAMS * NUM_OUTPUT) * 1e6)
        found["together"].append(STREAMS * NUM_OUTPUT / together)
        found["ratio"].append(together / alone)
        found["ttft"].append(statistics.median(answer.end.timeline.ttft_us for answer in answers) / 1e6)
        print(f"  round {index}: {found['one'][-1]:.0f} tokens/s alone, {found['together'][-1]:.0f} together", flush=True)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    print("transformers ...", flush=True)
    peers = {batch: peer_rate(batch) for batch in (1, STREAMS)}
    print(f"  {peers}", flush=True)
    single = one_process_ttft(requests(STREAMS, 40))
    print("cluster of two prefill and two decode ranks ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(2, 2, [], Path(folder))
        try:
            ours = measure_cluster(rig)
        finally:
            rig.close()
    report("cluster", rows(ours, {batch: peer["best"] for batch, peer in peers.items()}, single))


def rows(ours: dict[str, float], peers: dict[int, float], single: float) -> list[Row]:
    """The results by the issue's ids. `peers` tokens/s by batch, `single` seconds of one process to the first token."""
    shape = (f"{NUM_PROMPT} in, {NUM_OUTPUT} out, greedy, fp32, demo model, 2 prefill + 2 decode ranks, "
             "all processes and the client on two cores")
    peer = "transformers' generate, 2 threads, its fastest experts implementation: {:.1f} tokens/s"
    one, together = ours["one"], ours["together"]
    return [
        Row("C9-1", one / peers[1], "x", "higher", 2.0, 3.0,
            f"one stream at a time: {one:.1f} tokens/s; {shape}; against {peer.format(peers[1])}"),
        Row("C9-16", together / peers[STREAMS], "x", "higher", 5.0, 8.0,
            f"sixteen streams: {together:.1f} tokens/s; {shape}; against {peer.format(peers[STREAMS])}"),
        Row("S16", ours["ratio"], "share", "lower", 0.35, 0.25, f"time of 16 streams at once over the same 16 in turn; {shape}"),
        Row("V4", (ours["ttft"] - single) * 1e3, "ms", "lower", 5.0, 2.0,
            f"median TTFT by the router's clock, one at a time, {ours['ttft'] * 1e3:.1f} ms, less one process's forward and argmax, "
            f"{single * 1e3:.1f} ms; one thread each; {NUM_PROMPT}-token prompts"),
        Row("ROUTER-CPU", ours["router_us"], "us/token", "lower", 70.0, 35.0,
            f"router's CPU time a streamed token, 16 streams; {shape}"),
    ]


if __name__ == "__main__":
    main()
