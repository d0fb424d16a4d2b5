"""`faults.md` is whole and true: every public fault stands there once, and every test that it names exists."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = (TESTS / "faults.md").read_text()
NUMBERS = (
    1, 2, 3, 5, 6, 7, 9, 10, 11, 12, 13, 14, 16, 17, 21, 22, 23, 24, 25, 26, 27, 28, 29, 32, 33, 34, 36, 37, 40, 43, 44, 45, 46, 49, 51, 53,
    54, 55, 56, 58, 59, 60, 62, 63, 65, 66,
)
IDS = [f"B{number:02}" for number in NUMBERS]


def test_every_fault_stands_in_the_table_once() -> None:
    rows = re.findall(r"^\| (B\d+) \| .+ \| (.+) \|$", TABLE, re.MULTILINE)
    assert [fault for fault, _ in rows] == IDS and len(IDS) == 46
    unshown = [fault for fault, shown in rows if "::" not in shown and "waits for" not in shown]
    assert not unshown, f"neither a test nor what it waits for: {unshown}"


def test_every_test_of_the_table_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", TABLE)
    assert len(named) > 80
    tests: dict[str, set[str]] = {}
    for file, _ in named:
        if file not in tests:
            tree = ast.parse((TESTS / file).read_text()) if (TESTS / file).exists() else ast.Module([], [])
            tests[file] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    missing = [f"{file}::{name}" for file, name in named if name not in tests[file]]
    assert not missing, missing
