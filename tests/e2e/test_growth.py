"""Nothing grows over 2,000 short requests: memory, page holders, per-request maps, file descriptors."""

import random

import psutil
import pytest

from tests.e2e.rig import Rig, generate_all

_MEGABYTE = 2**20


def processes(rig: Rig) -> dict[str, psutil.Process]:
    found = {name: psutil.Process(process.pid) for name, process in rig.cluster.processes.items()}
    for role in ("prefill", "decode"):
        found |= {f"{role}/{rank}": psutil.Process(rig.engine_pid(role, rank)) for rank in (0, 1)}
    return found


def short_requests(number: int, seed: int) -> list[dict[str, object]]:
    draw = random.Random(seed)
    return [
        {"prompt": [0, *(draw.randrange(3, 4000) for _ in range(draw.randrange(1, 12)))], "max_tokens": draw.randrange(1, 5), "seed": index}
        for index in range(number)
    ]


@pytest.mark.slow
def test_nothing_grows_over_2000_requests(rig: Rig) -> None:
    generate_all(rig.address, short_requests(300, 1), at_once=16)  # caches, allocators and thread pools reach their size
    rig.settle()
    before = {name: (process.memory_info().rss, process.num_fds(), process.num_threads()) for name, process in processes(rig).items()}
    answers = generate_all(rig.address, short_requests(2000, 2), at_once=16)
    assert len(answers) == 2000
    assert all(answer.finished for answer in answers)
    rig.settle()
    for name, process in processes(rig).items():
        rss, descriptors, threads = before[name]
        assert process.memory_info().rss - rss < 24 * _MEGABYTE, f"{name}: {rss} -> {process.memory_info().rss} bytes"
        assert process.num_fds() <= descriptors + 4, f"{name}: {descriptors} -> {process.num_fds()} file descriptors"
        assert process.num_threads() <= threads + 4, f"{name}: {threads} -> {process.num_threads()} threads"
