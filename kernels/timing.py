"""GPU times: one CUDA graph over several input sets, replayed; medians.

A graph leaves out the host, and input sets that together exceed the L2 cache several times leave out what the previous
call left there: the cold, back-to-back time that a kernel has inside a layer.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

L2_BYTES = 60 << 20  # H200
_MAX_SETS = 128

Call = Callable[[], object]


def num_sets(bytes_per_set: int) -> int:
    """How many input sets of this size make every one of them cold: at least 3, four times L2 in all, at most 128."""
    return max(3, min(_MAX_SETS, -(-4 * L2_BYTES // max(1, bytes_per_set))))


def cold_us(calls: Sequence[Call], *, replays: int = 50) -> float:
    """Median microseconds of one call; `calls` are the same op on different input sets (see `num_sets`)."""
    return compare_us({"": calls}, replays=replays)[""]


def compare_us(variants: Mapping[str, Sequence[Call]], *, replays: int = 50) -> dict[str, float]:
    """Like `cold_us` for several variants in one run: their replays alternate, so that clocks and neighbours hit all alike."""
    graphs = {name: _capture(calls) for name, calls in variants.items()}
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(replays):
        for name, (graph, _) in graphs.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            samples[name].append(start.elapsed_time(stop) * 1e3 / len(variants[name]))
    return {name: statistics.median(times) for name, times in samples.items()}


def _capture(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, list[object]]:
    """A graph of all calls, and their results: kept, so that no two calls write to the same memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, creates handles and plans outside of the capture
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        results.extend(call() for call in calls)
    graph.replay()
    torch.cuda.synchronize()
    return graph, results
