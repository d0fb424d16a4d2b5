"""The report prints whatever is broken, and op x backend is what the ops would really choose."""

import pytest
import torch

from kernels.backend import BackendError, select
from services.doctor import backends, environment
from services.doctor.__main__ import main


def test_every_op_has_a_choice_with_its_reason() -> None:
    tables = backends.ops()
    assert {"rms_norm", "rms_norm, add quant", "mla_decode", "topk_gate", "linear"} <= set(tables)
    for choice in backends.choices("cpu", torch.float32):
        table = tables[choice.op]
        assert select(table, "auto", "cpu", torch.float32) is table[choice.backend]
        assert [*choice.passed_over, choice.backend, *choice.others] == list(table)
        assert all(choice.passed_over.values()), choice


def test_a_backend_passed_over_is_refused_by_name() -> None:
    """The reason shown is the one that a caller gets; the interpreter is the exception: by name it runs."""
    for choice in backends.choices("cpu", torch.float64):
        for name, reason in choice.passed_over.items():
            if "only when asked for by name" not in reason:
                with pytest.raises(BackendError) as refused:
                    select(backends.ops()[choice.op], name, "cpu", torch.float64)
                assert reason in str(refused.value)


def test_a_broken_part_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> str:
        raise OSError("libcuda.so: cannot open shared object file")

    monkeypatch.setattr(environment, "origin", broken)
    found = dict(environment.environment())
    assert found["package kernels"] == "broken: OSError: libcuda.so: cannot open shared object file"
    assert found["torch"].startswith("2.") and found["GPUs"]


def test_origin_names_a_stranger_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_TREE", environment.Path("/elsewhere"))
    assert "NOT this tree (/elsewhere/kernels)" in environment.origin("kernels")


def test_prints_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "Op x backend" in out and "rms_norm" in out and "linear" in out and "fp8_gemm and mla_decode choose" in out
