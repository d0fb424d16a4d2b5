"""The whole cluster on this machine: C9-1, C9-16 (against transformers), S16 (does it batch), V4 (TTFT added), ROUTER-CPU.

Every ratio is taken within this one run. The cluster is up while none of its peers runs, and the other way round.
"""

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

from services.decode.forward import DecodeBatch, DecodeForward
from services.kv.layout import PAGE_SIZE
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


class OneProcess:
    """V4's peer: one process that serves the same requests in turn, forwards and argmax, without any RPC or hand-off."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        config = load_config(MODEL)
        weights = load_weights(MODEL, config)
        self._prefill, self._decode = PrefillForward(config, weights), DecodeForward(config, weights)
        self._pages = torch.zeros(256, config.num_hidden_layers, PAGE_SIZE, config.latent_width)
        self._num_served = 0

    def ttft(self, fields: dict[str, Any]) -> float:
        """Serve one request; seconds from its ids to its first token."""
        prompt, first = fields["prompt"], 3 * self._num_served % 255  # as with a prefix cache, every prompt meets pages of its own
        table, self._num_served = [first, first + 1, first + 2], self._num_served + 1
        began = time.perf_counter()
        token = int(self._prefill.run(self._pages, [PrefillChunk(prompt, 0, table, want_logits=True)])[0].argmax())
        seconds = time.perf_counter() - began
        for position in range(len(prompt), len(prompt) + fields["max_tokens"] - 1):
            token = int(self._decode.run(self._pages, DecodeBatch([token], [position], [table]))[0].argmax())
        return seconds


def measure_ttft(rig: Rig, salt: int = 40) -> tuple[float, float]:
    """Median seconds to the first token: the cluster's by its router's clock, and one process's; in turn, so that noise is shared."""
    peer, ours, theirs = OneProcess(), [], []
    for fields in requests(44, salt, num_output=8):
        _, (answer,) = timed(rig, [fields], 1)
        ours.append(answer.end.timeline.ttft_us / 1e6)
        theirs.append(peer.ttft(fields))
    return statistics.median(ours[4:]), statistics.median(theirs[4:])


def _cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def measure_cluster(rig: Rig) -> dict[str, float]:
    timed(rig, requests(STREAMS, 1), STREAMS)  # warm
    router = psutil.Process(rig.cluster.processes["router"].pid)
    found: dict[str, list[float]] = {"one": [], "together": [], "ratio": [], "router_us": []}
    for index in range(ROUNDS):
        alone, _ = timed(rig, requests(STREAMS, 10 + index), 1)
        found["one"].append(STREAMS * NUM_OUTPUT / alone)
        before = _cpu_of(router)
        together, _ = timed(rig, requests(STREAMS, 20 + index), STREAMS)
        found["router_us"].append((_cpu_of(router) - before) / (STREAMS * NUM_OUTPUT) * 1e6)
        found["together"].append(STREAMS * NUM_OUTPUT / together)
        found["ratio"].append(together / alone)
        print(f"  round {index}: {found['one'][-1]:.0f} tokens/s alone, {found['together'][-1]:.0f} together", flush=True)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    print("transformers ...", flush=True)
    peers = {batch: peer_rate(batch) for batch in (1, STREAMS)}
    print(f"  {peers}", flush=True)
    print("cluster of two prefill and two decode ranks ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(2, 2, [], Path(folder))
        try:
            ours = measure_cluster(rig)
            disaggregated, single = measure_ttft(rig)
        finally:
            rig.close()
    report("cluster", rows(ours, {batch: peer["best"] for batch, peer in peers.items()}, disaggregated, single))


def rows(ours: dict[str, float], peers: dict[int, float], disaggregated: float, single: float) -> list[Row]:
    """The results by the issue's ids. `peers` in tokens/s by batch; seconds to the first token of the cluster and of one process."""
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
        Row("V4", (disaggregated - single) * 1e3, "ms", "lower", 5.0, 2.0,
            f"median TTFT of 40 prompts of {NUM_PROMPT} tokens, one at a time: {disaggregated * 1e3:.1f} ms by the router's clock, "
            f"less {single * 1e3:.1f} ms in one process that serves them in turn with the cluster, without any RPC; one thread each"),
        Row("ROUTER-CPU", ours["router_us"], "us/token", "lower", None, None,
            f"router's CPU time a streamed token, 16 streams, one message a token to each client; {shape}"),
    ]


if __name__ == "__main__":
    main()
