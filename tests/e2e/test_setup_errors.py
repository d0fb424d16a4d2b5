"""A user's mistake at start-up: one sentence, non-zero exit, no traceback."""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.rig import DEMO_CONFIG, ROOT, wait_until

MODEL = ROOT / "deploy" / "demo_model"


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


def assert_one_sentence(done: subprocess.CompletedProcess[str], *words: str) -> None:
    output = done.stderr.strip()
    assert done.returncode != 0, f"exit code 0; {output}"
    assert "Traceback" not in output, output
    assert len(output.splitlines()) == 1, output
    for word in words:
        assert word in output, f"{word!r} is not in {output!r}"


@pytest.mark.parametrize("module", ["services.router", "services.prefill", "services.decode"])
def test_wrong_toml_key_is_named(module: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text("[prefill]\nnum_pagse = 3\n")
    assert_one_sentence(run(module, "--config", str(file)), str(file), "num_pagse", "num_pages")


@pytest.mark.parametrize("module", ["services.router", "services.prefill", "services.decode"])
def test_missing_config_file_is_named(module: str) -> None:
    assert_one_sentence(run(module, "--config", "/nowhere/at/all.toml"), "/nowhere/at/all.toml")


@pytest.mark.parametrize("module", ["services.prefill", "services.decode"])
def test_longer_than_the_model_allows_names_both_lengths(module: str) -> None:
    assert_one_sentence(run(module, "--set", "model.max_model_len=99999"), "model.max_model_len", "99999", "4096")


def test_wrong_value_names_key_and_limit() -> None:
    assert_one_sentence(run("services.decode", "--set", "decode.num_pages=0"), "num_pages", ">= 1")


@pytest.mark.parametrize("module", ["services.router", "services.prefill", "services.decode"])
def test_busy_port_is_named(module: str) -> None:
    role = module.rpartition(".")[2]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert_one_sentence(run(module, "--config", str(DEMO_CONFIG), "--set", f"{role}.address={address}"), address)


@pytest.mark.parametrize("module", ["services.router", "services.prefill", "services.decode"])
def test_missing_model_folder_is_named(module: str) -> None:
    assert_one_sentence(run(module, "--set", "model.path=/nowhere/model"), "/nowhere/model")


def test_truncated_checkpoint_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(MODEL, broken)
    shard = max(broken.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-1000])
    assert_one_sentence(run("services.prefill", "--set", f"model.path={broken}"), shard.name)


def test_unsupported_architecture_is_named(tmp_path: Path) -> None:
    other = tmp_path / "model"
    shutil.copytree(MODEL, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    assert_one_sentence(run("services.decode", "--set", f"model.path={other}"), "model_type", "llama", "deepseek_v3")


COMMANDS = [("services.router.demo",), ("services.runtime.cluster", "up")]


@pytest.mark.parametrize("command", COMMANDS, ids=["demo", "up"])
def test_broken_checkpoint_ends_a_whole_cluster_without_a_traceback(command: tuple[str, ...], tmp_path: Path) -> None:
    """Every process says its sentence at most; none trips over the others' end."""
    broken = tmp_path / "model"
    shutil.copytree(MODEL, broken)
    shard = max(broken.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    shard.unlink()
    done = run(command[0], *command[1:], "--config", str(DEMO_CONFIG), "--set", f"model.path={broken}")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert all(line.startswith("error: ") for line in done.stderr.splitlines()), done.stderr
    assert shard.name in done.stderr


@pytest.mark.parametrize(("command", "line"), [
    (COMMANDS[0], "starting the router"), (COMMANDS[0], "starting decode"), (COMMANDS[0], "[1]"), (COMMANDS[1], "starting decode"),
])
def test_ctrl_c_is_one_sentence_and_leaves_no_process(command: tuple[str, ...], line: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", *command, "--config", str(DEMO_CONFIG), "--prefill", "1", "--decode", "1"], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert any(said.startswith(line) for said in process.stdout), f"it never said {line!r}"
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in err and len(err.splitlines()) == 1, err
    wait_until(lambda: not any(alive(member) for member in family), 10.0, lambda: f"left: {[m for m in family if alive(m)]}")


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("module", ["services.router.demo", "services.runtime.cluster"])
def test_number_of_ranks_names_the_variable_of_make(module: str) -> None:
    words = ["up"] if module.endswith("cluster") else []
    assert_one_sentence(run(module, *words, "--config", str(DEMO_CONFIG), "--prefill", "abc"), "PREFILL", "'abc'", "at least 1")
