"""Three minutes of it, as `make chaos` runs them: every promise holds, each kind of fault and each way of recovery was seen."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from services.doctor.chaos.report import Report

ROOT = Path(__file__).parents[2]
SEED = 11


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_minutes_of_faults_break_nothing(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "services.doctor.chaos", "--seed", str(SEED), "--minutes", "3", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert file.exists(), done.stdout + done.stderr
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    assert not report.breaches and done.returncode == 0, done.stdout
    assert report.tokens["compared"] > 10_000, done.stdout
