"""A backend is chosen by name or availability, and nothing that fails is replaced in silence."""

import pytest
import torch

from kernels.backend import BackendError, choose, select, why_unavailable

TABLE = {"onednn": 1, "torch": 2, "reference": 3}


def test_named_backend_is_taken() -> None:
    assert [select(TABLE, name) for name in ("onednn", "torch", "reference")] == [1, 2, 3]


def test_auto_takes_the_first_available() -> None:
    assert select(TABLE, "auto") == 1
    assert select(TABLE, "auto", "cpu", torch.float64) == 2


def test_rejects_a_backend_the_op_does_not_have() -> None:
    with pytest.raises(BackendError, match="is not among this op's: torch, reference"):
        select({"torch": 2, "reference": 3}, "onednn")


def test_rejects_a_named_backend_that_does_not_fit() -> None:
    with pytest.raises(BackendError, match="float64"):
        select(TABLE, "onednn", "cpu", torch.float64)
    assert why_unavailable("onednn", "cuda", torch.float32)
    assert not why_unavailable("torch", "cuda", torch.float64)


def test_rejects_auto_without_any() -> None:
    with pytest.raises(BackendError, match="none of onednn"):
        select({"onednn": 1}, "auto", "cpu", torch.float64)


def test_errors_of_an_implementation_pass_through() -> None:
    def broken() -> None:
        raise RuntimeError("inside the op")

    with pytest.raises(RuntimeError, match="inside the op"):
        select({"torch": broken, "reference": lambda: None}, "auto")()


def test_libraries_and_triton_say_why_not() -> None:
    for name in ("triton", "flashinfer", "deep_gemm"):
        assert why_unavailable(name, "cpu", torch.float32) or name == "triton"
        assert why_unavailable(name, "meta", torch.float32)


def test_the_interpreter_is_never_chosen_by_itself() -> None:
    table = {"triton": 1, "torch": 2}
    assert choose(table, "auto") == "torch"
    if why_unavailable("triton", "cpu", torch.float32):
        pytest.skip(why_unavailable("triton", "cpu", torch.float32))
    assert select(table, "triton") == 1
