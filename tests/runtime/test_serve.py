"""Statuses of errors, and a server's port."""

import socket

import grpc
import pytest

from services.runtime import errors
from services.runtime.serve import Server, status_of
from tests.clear import CLEAR

STATUS = [
    (errors.InvalidRequest("n", 2, "only 1"), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.Overloaded("full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.NoMember("none"), grpc.StatusCode.UNAVAILABLE),
    (errors.HandoffError(1, "lost"), grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineExceeded("late"), grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.EngineError("broken"), grpc.StatusCode.INTERNAL),
    (errors.ConfigError("wrong"), grpc.StatusCode.FAILED_PRECONDITION),
    (errors.CheckpointError("short"), grpc.StatusCode.FAILED_PRECONDITION),
    (errors.BatonError("other"), grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("error", "status"), STATUS, ids=lambda value: type(value).__name__)
def test_every_error_has_a_status(error: errors.BatonError, status: grpc.StatusCode) -> None:
    assert status_of(error) == status


def test_an_amount_makes_a_natural_sentence() -> None:
    error = errors.InvalidRequest("text", errors.Amount(6001, "tokens"), "at most 4096 fit")
    assert str(error) == "text has 6001 tokens but at most 4096 fit"


async def test_busy_port_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(errors.SetupError, match=rf"cannot listen on {address} \(Address already in use"):
            await Server(address, [], CLEAR).start()


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:99999"])
async def test_address_that_is_none_is_one_sentence(address: str) -> None:
    with pytest.raises((errors.SetupError,), match="cannot listen on"):
        await Server(address, [], CLEAR).start()


async def test_port_zero_becomes_a_real_one() -> None:
    server = Server("127.0.0.1:0", [], CLEAR)
    await server.start()
    host, _, port = server.address.partition(":")
    assert host == "127.0.0.1" and int(port) > 0
    with socket.create_connection((host, int(port)), timeout=5):
        pass
    await server.stop(0)
