"""Logs: JSON lines, and request ids in lines about requests."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SERVICES = Path(__file__).parents[2] / "services"
LEVELS = {"debug", "info", "warning", "error", "exception", "log"}


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(SERVICES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS
            if is_method and ast.unparse(node.func.value) in ("logger", "_log"):
                yield f"{path.relative_to(SERVICES)}:{node.lineno}", node


def is_about_a_request(call: ast.Call) -> bool:
    """Whether it shows a request's key or id."""
    names = {node.attr for argument in call.args for node in ast.walk(argument) if isinstance(node, ast.Attribute)}
    names |= {node.id for argument in call.args for node in ast.walk(argument) if isinstance(node, ast.Name)}
    return bool(names & {"key", "request_id", "ticket"})


def test_lines_about_a_request_have_its_id_as_a_field() -> None:
    calls = dict(log_calls())
    about = {where: call for where, call in calls.items() if is_about_a_request(call)}
    assert len(calls) > 30 and len(about) >= 5, "the test looks for log calls in the wrong way"
    missing = [where for where, call in about.items()
               if not any(word.arg == "extra" and "request_id" in ast.unparse(word.value) for word in call.keywords)]
    assert not missing, f"no request_id in the fields of {missing}"


def test_a_line_is_one_json_object() -> None:
    script = """
import logging
from services.runtime.telemetry import setup_logging
setup_logging("decode/1", "warning")
logging.getLogger("a").info("too low")
logging.getLogger("a").warning("%s of\\nlines", "two", extra={"request_id": "r1"})
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("a").exception("failed")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=SERVICES.parent)
    first, second = [json.loads(line) for line in done.stderr.splitlines()]
    assert (first["level"], first["process"], first["message"], first["request_id"]) == ("warning", "decode/1", "two of\nlines", "r1")
    assert second["level"] == "error" and "ZeroDivisionError" in second["exception"]
