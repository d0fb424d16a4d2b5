"""What ends by itself is started again, later each time; `.run/metrics.json` names those that live."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.runtime.keeper import Keeper
from services.runtime.local_cluster import Cluster
from services.runtime.run_folder import RunFolder
from tests.clear import CLEAR
from tests.runtime.waiting import until


class FakeCluster:
    def __init__(self, run_folder: RunFolder | None = None) -> None:
        self.processes: dict[str, Any] = {"decode": SimpleNamespace(returncode=None)}
        self.run_folder = run_folder
        self.reports: list[str] = []
        self.restarts: list[str] = []
        self.targets: dict[str, tuple[str, str]] = {}

    def ended(self) -> list[str]:
        return [name for name, process in self.processes.items() if process.returncode is not None]

    def report(self, line: str) -> None:
        self.reports.append(line)

    def restart(self, name: str) -> None:
        self.restarts.append(name)
        self.processes[name].returncode = None

    def metrics_targets(self) -> dict[str, tuple[str, str]]:
        return self.targets


def waits_of(cluster: FakeCluster, keeper: Keeper, now: float, times: int, lives_s: float) -> list[float]:
    """How long each of `times` ends in a row is waited for, the process living `lives_s` between them."""
    waits: list[float] = []
    for _ in range(times):
        cluster.processes["decode"].returncode = -9
        keeper.look(now)
        began, restarts = now, len(cluster.restarts)
        while len(cluster.restarts) == restarts:
            now += 0.5
            keeper.look(now)
        waits.append(now - began)
        now += lives_s
    return waits


@pytest.mark.parametrize(("lives_s", "waits"), [(5.0, [1, 2, 4, 8, 16, 30, 30]), (60.0, [1, 1, 1, 1, 1, 1, 1])])
def test_restarts_back_off_unless_it_ran_well(lives_s: float, waits: list[float]) -> None:
    cluster = FakeCluster()
    assert waits_of(cluster, Keeper(cluster), 1000.0, 7, lives_s) == waits  # pyright: ignore[reportArgumentType]
    assert "the decode process ended by itself (killed by SIGKILL); the others go on, it is started again in 1 s" in cluster.reports


def test_metrics_file_follows_those_that_live(tmp_path: Path) -> None:
    cluster = FakeCluster(RunFolder(tmp_path, CLEAR))
    keeper = Keeper(cluster)  # pyright: ignore[reportArgumentType]
    cluster.targets = {"router": ("router", "127.0.0.1:1"), "decode-2/0": ("decode", "127.0.0.1:2")}
    keeper.look(0.0)
    assert json.loads((tmp_path / "metrics.json").read_text()) == [
        {"targets": ["127.0.0.1:1"], "labels": {"role": "router", "process": "router"}},
        {"targets": ["127.0.0.1:2"], "labels": {"role": "decode", "process": "decode-2/0"}},
    ]
    del cluster.targets["decode-2/0"]
    keeper.look(1.0)
    assert len(json.loads((tmp_path / "metrics.json").read_text())) == 1


async def test_a_router_that_is_killed_comes_back_where_it_was(tmp_path: Path) -> None:
    cluster = Cluster(None, prefill=0, decode=0, settings=["router.address=127.0.0.1:0"], run_dir=tmp_path)
    try:
        await cluster.start()
        keeper, address, killed = Keeper(cluster), cluster.router_address, cluster.processes["router"]
        killed.kill()
        killed.wait()
        keeper.look(0.0)
        assert cluster.processes["router"] is killed
        keeper.look(2.0)
        assert cluster.processes["router"] is not killed
        await until(lambda: cluster.listens("router") == address, "it listens again")
    finally:
        await cluster.stop()
