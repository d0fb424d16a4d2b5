"""ZMQ over TCP: the cluster's key or nothing, and nothing beyond loopback without it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from services.runtime.errors import ConfigError, SetupError
from services.runtime.ipc import SocketDirectory
from services.runtime.security import MAX_ZMQ_BYTES, Security
from tests.clear import CLEAR, INSECURE
from tests.runtime.keys_rig import Keys

SILENT_MS = 300  # long enough for a handshake here, which takes 2


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    """Its end is a test of its own: a doorkeeper that stayed would keep it waiting for ever."""
    context = zmq.Context()
    context.linger = 0
    yield context
    context.destroy(linger=0)


@pytest.fixture
def other(context: "zmq.Context[Any]") -> Iterator["zmq.Context[Any]"]:
    """Of another process, as far as ZMQ knows."""
    with zmq.Context() as other:
        other.linger = 0  # what a server refuses is never sent
        yield other
        other.destroy(linger=0)


def connected(security: Security, context: "zmq.Context[Any]", port: int) -> "zmq.Socket[Any]":
    socket = context.socket(zmq.PUSH)
    security.connect_zmq(socket, f"tcp://127.0.0.1:{port}")
    return socket


def test_the_clusters_key_gets_in_and_no_other(
    keys: Keys, other_keys: Keys, context: "zmq.Context[Any]", other: "zmq.Context[Any]"
) -> None:
    server = context.socket(zmq.PULL)
    port = keys.inner.bind_zmq(server, "127.0.0.1")
    clear, others = connected(CLEAR, other, port), connected(other_keys.inner, other, port)
    clear.send(b"in the clear")
    others.send(b"another cluster's")
    stranger = other.socket(zmq.PUSH)  # knows whom it talks to, but has a key of its own
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    stranger.curve_serverkey = keys.inner._curve.public  # pyright: ignore
    stranger.connect(f"tcp://127.0.0.1:{port}")
    stranger.send(b"a stranger's")
    assert not server.poll(SILENT_MS), server.recv()
    ours = connected(keys.inner, other, port)
    ours.send(b"ours")
    assert server.poll(5000) and server.recv() == b"ours"
    assert not server.poll(SILENT_MS)


def test_a_stranger_hears_nothing_of_what_is_published(keys: Keys, context: "zmq.Context[Any]", other: "zmq.Context[Any]") -> None:
    publisher = context.socket(zmq.XPUB)
    port = keys.inner.bind_zmq(publisher, "127.0.0.1")
    readers: list[zmq.Socket[Any]] = []
    for security in (CLEAR, keys.inner):
        reader = other.socket(zmq.SUB)
        security.connect_zmq(reader, f"tcp://127.0.0.1:{port}")
        reader.subscribe(b"")
        readers.append(reader)
    assert publisher.poll(5000) and publisher.recv() == b"\x01", "one has subscribed"
    publisher.send(b"pages")
    assert readers[1].poll(5000) and readers[1].recv() == b"pages"
    assert not readers[0].poll(SILENT_MS)


def test_a_client_talks_to_nobody_without_the_clusters_key(keys: Keys, context: "zmq.Context[Any]", other: "zmq.Context[Any]") -> None:
    server = context.socket(zmq.PULL)
    port = CLEAR.bind_zmq(server, "127.0.0.1")
    trusting = connected(keys.inner, other, port)
    trusting.send(b"secret")
    assert not server.poll(SILENT_MS)


@pytest.mark.parametrize("kind", [zmq.Context, zmq.asyncio.Context])
@pytest.mark.parametrize("ending", ["term", "destroy"])
def test_contexts_with_armed_sockets_end(kind: Any, ending: str, keys: Keys) -> None:
    context = kind()
    sockets = [context.socket(zmq.PUB), context.socket(zmq.ROUTER)]
    ports = {keys.inner.bind_zmq(socket, "127.0.0.1") for socket in sockets}
    assert len(ports) == 2
    if ending == "term":
        for socket in sockets:
            socket.close()
        context.term()
    else:
        context.destroy(linger=0)
    assert context.closed


@pytest.mark.parametrize("security", [CLEAR, INSECURE], ids=["clear", "insecure"])
@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "*", "192.0.2.1", "router"])
def test_beyond_loopback_wants_a_key(host: str, security: Security, keys: Keys, context: "zmq.Context[Any]") -> None:
    """`insecure` is about gRPC: with ZMQ there is no other authentication at all."""
    with pytest.raises(ConfigError, match=rf"listen on {re.escape(host)} without CURVE.*give security.curve_key"):
        security.bind_zmq(context.socket(zmq.PUB), host)
    with pytest.raises(ConfigError, match="cannot be dialled without CURVE"):
        security.connect_zmq(context.socket(zmq.SUB), f"tcp://{host}:5000")


def test_with_a_key_every_address_will_do(keys: Keys, context: "zmq.Context[Any]") -> None:
    assert keys.inner.bind_zmq(context.socket(zmq.PUB), "0.0.0.0") > 0
    assert keys.inner.bind_zmq(context.socket(zmq.PUB), "[::1]") > 0


def test_a_port_that_is_taken_is_one_sentence(context: "zmq.Context[Any]") -> None:
    taken = context.socket(zmq.PUB)
    port = CLEAR.bind_zmq(taken, "127.0.0.1")
    with pytest.raises(SetupError, match=f"cannot listen on 127.0.0.1:{port}"):
        CLEAR.bind_zmq(context.socket(zmq.PUB), "127.0.0.1", port)


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/x", "127.0.0.1:1", "tcp://", "tcp://127.0.0.1:port", "inproc://x"])
def test_what_is_no_tcp_endpoint_is_refused(endpoint: str, context: "zmq.Context[Any]") -> None:
    with pytest.raises(ConfigError, match=r"must be tcp|not of the form tcp"):
        CLEAR.connect_zmq(context.socket(zmq.SUB), endpoint)


def test_messages_are_bounded_and_a_tighter_bound_stays(context: "zmq.Context[Any]", other: "zmq.Context[Any]") -> None:
    server, tight = context.socket(zmq.PULL), context.socket(zmq.PULL)
    tight.set(zmq.MAXMSGSIZE, 64)
    ports = [CLEAR.bind_zmq(socket, "127.0.0.1") for socket in (server, tight)]
    assert [socket.get(zmq.MAXMSGSIZE) for socket in (server, tight)] == [MAX_ZMQ_BYTES, 64]
    large, small = (connected(CLEAR, other, ports[1]) for _ in range(2))
    large.send(b"x" * 65)
    small.send(b"x" * 64)
    assert tight.poll(5000) and tight.recv() == b"x" * 64 and not tight.poll(SILENT_MS)


def test_sockets_of_a_front_are_its_owners_alone() -> None:
    """Nothing authenticates there but the file system."""
    directory = SocketDirectory()
    try:
        status = Path(directory.name).stat()
        assert status.st_mode & 0o7777 == 0o700
    finally:
        directory.cleanup()
