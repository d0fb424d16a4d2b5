"""Signals: the first drains, a second one ends at once with everything that was started; nobody outlives whoever started it."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.runtime.errors import SetupError
from services.runtime.process import write_whole
from tests.runtime.waiting import until

ROOT = Path(__file__).parents[2]


def start(kind: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.fake_process", kind], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # not every container's init reaps
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def parent() -> Iterator["subprocess.Popen[str]"]:
    process = start("child")
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_second_signal_ends_everything_at_once(parent: "subprocess.Popen[str]", number: signal.Signals) -> None:
    child = psutil.Process(int(line_of(parent)))
    parent.send_signal(number)
    assert line_of(parent) == "stopping"

    def ends() -> bool:
        parent.send_signal(signal.SIGINT)  # again and again: one that comes right after the first counts as the first
        return parent.poll() is not None

    await until(ends, "it ends")
    _, err = parent.communicate()
    assert parent.returncode == 130 and err == "ended at once; nothing is left running\n"
    assert has_ended(child)


async def test_a_cluster_that_is_killed_takes_its_processes_along() -> None:
    parent = start("cluster")
    router = psutil.Process(int(line_of(parent)))
    assert router.is_running()
    parent.kill()
    parent.wait()
    await until(lambda: has_ended(router), "the router ends")
    parent.communicate()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SetupError, match=r"file/router cannot be written"):
        write_whole(tmp_path / "file" / "router", "x")
