"""The cluster of deploy/compose.yaml: DC-UP, from `docker compose up` to the first token, the image built; what a build takes and weighs.

A token is asked for over and over from the moment that Compose is started, through the published port, as an impatient client would.
"""

import asyncio
import os
import statistics
import sys
import threading
import time

import grpc.aio

from proto.baton.v1 import generation_pb2, generation_pb2_grpc
from tests.bench.report import Row, report
from tests.clear import CLEAR
from tests.deploy.compose_rig import ROOT, ComposeCluster, NoEngine, run

RUNS = 5
_PAUSE_S = 0.05
_PATIENCE_S = 120.0


async def first_token(address: str) -> None:
    """Returns once one has come."""
    request = generation_pb2.GenerateRequest(text="Once upon a time", max_tokens=2, temperature=0.0)
    give_up_at = time.monotonic() + _PATIENCE_S
    while time.monotonic() < give_up_at:
        async with CLEAR.open_channel(address) as channel:
            try:
                async for reply in generation_pb2_grpc.GenerationStub(channel).Generate(request):
                    if reply.HasField("delta") and reply.delta.token_ids:
                        return
            except grpc.aio.AioRpcError:
                await asyncio.sleep(_PAUSE_S)
    raise AssertionError(f"no token within {_PATIENCE_S:g} s")


def time_up(cluster: ComposeCluster) -> tuple[float, float]:
    """Seconds from the command until it returned, and until the first token; containers, networks and keys are made anew."""
    cluster.down()
    began, took = time.perf_counter(), list[float]()

    def up() -> None:
        cluster.up()
        took.append(time.perf_counter() - began)

    thread = threading.Thread(target=up)
    thread.start()
    asyncio.run(first_token(cluster.address))
    seconds = time.perf_counter() - began
    thread.join()
    return took[0], seconds


def time_build(cluster: ComposeCluster, *arguments: str) -> float:
    began = time.perf_counter()
    cluster.compose("build", *arguments, "router")
    return time.perf_counter() - began


def time_rebuild(cluster: ComposeCluster) -> float:
    """After a change of one source file."""
    probe = ROOT / "services" / "bench_compose_probe.py"
    probe.write_text(f"CHANGED_AT = {time.time()}\n")
    try:
        return time_build(cluster)
    finally:
        probe.unlink()


def image_bytes(name: str) -> int:
    return int(run("docker", "image", "inspect", "--format", "{{.Size}}", name))


def main() -> None:
    try:
        cluster = ComposeCluster(f"batonbench{os.getpid()}")
    except NoEngine as reason:
        sys.exit(f"error: no container can run here: {reason}")
    scratch_s = time_build(cluster, "--no-cache")
    rebuild_s = time_rebuild(cluster)
    cluster.compose("build")
    base = cluster.variables.get("BASE_IMAGE", "python:3.11-slim")
    try:
        runs = [time_up(cluster) for _ in range(RUNS)]
    finally:
        cluster.down()
    total, ours = image_bytes("baton:test"), image_bytes("baton:test") - image_bytes(base)
    compose = cluster.compose("version", "--short").strip()
    seconds, returned_s = sorted(second for _, second in runs), statistics.median(took for took, _ in runs)
    report("compose", [
        Row("DC-UP", statistics.median(seconds), "s", "lower", 60.0, 20.0,
            f"`up -d` to first token through the published port, Compose {compose}, image built, networks and keys made anew; median of "
            f"{RUNS} ({seconds[0]:.1f} to {seconds[-1]:.1f}); Compose itself returned after {returned_s:.1f} s"),
        Row("DC-BUILD", scratch_s, "s", "lower", None, None, f"image from scratch, packages over the network; base {base}, which is there"),
        Row("DC-BUILD-SOURCE", rebuild_s, "s", "lower", None, None, "image after a change of one source file"),
        Row("DC-IMAGE", ours / 1e6, "MB", "lower", None, None, f"image without its base; {total / 1e6:.0f} MB with it; CPU build of torch"),
    ])


if __name__ == "__main__":
    main()
