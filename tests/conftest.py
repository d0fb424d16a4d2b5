"""For all tests: the hour after which CI starts no further slow test."""

import os
import time

import pytest

import services  # noqa: F401  before grpc and torch: it sets what these read once

_CI_BUDGET_S = 3600
_left_out = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_left_out] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave slow tests out once CI has run for an hour (`.ci/run` says when it started)."""
    started = os.environ.get("BATON_CI_STARTED")
    if started and item.get_closest_marker("slow") and time.time() - float(started) > _CI_BUDGET_S:
        item.config.stash[_left_out].append(item.nodeid)
        pytest.skip("CI has run for an hour: no further slow test is started")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name in config.stash[_left_out]:
        terminalreporter.write_line(f"left out for lack of time: {name}")
