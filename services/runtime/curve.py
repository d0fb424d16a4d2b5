"""CURVE for ZMQ: one key pair a cluster, in one file as pyzmq's `zmq.auth` writes it, and a doorkeeper that knows that one key.

CURVE alone lets in whoever knows the server's public key. So every context with an armed server has a handler of ZMQ's own
authentication protocol (ZAP, rfc.zeromq.org/spec/27): the socket's domain is the key that it wants, and only that key passes.
"""

import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.auth
from zmq.utils import z85

from services.runtime.errors import ConfigError
from services.runtime.telemetry import count_incident

logger = logging.getLogger(__name__)

_ZAP_ADDRESS = "inproc://zeromq.zap.01"


@dataclass(frozen=True)
class CurveKeys:
    """Both in Z85, 40 characters. No repr shows the secret one."""

    public: bytes
    secret: bytes = field(repr=False)


def read_keys(path: Path) -> CurveKeys:
    """The key pair in `path`. Raises ConfigError, which names the file."""
    advice = "`python -m services.doctor keys FOLDER` makes one"
    try:
        public, secret = zmq.auth.load_certificate(path)
        derived = zmq.curve_public(secret) if secret is not None else None
    except OSError as error:
        reason = error.strerror or "there is no such file"
        raise ConfigError(f"security.curve_key: {path} cannot be read ({reason}); {advice}") from None
    except (ValueError, zmq.ZMQError):  # their texts could quote the file
        raise ConfigError(f"security.curve_key: {path} is no ZMQ certificate; {advice}") from None
    if secret is None or derived != public:
        raise ConfigError(f"security.curve_key: {path} must hold a public key and the secret key that it belongs to; {advice}")
    return CurveKeys(public, secret)


def arm_client(socket: "zmq.Socket[Any]", keys: CurveKeys) -> None:
    """Before it connects: `socket` shows the cluster's key and talks only to a server that holds it."""
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = keys.public, keys.secret, keys.public


def arm_server(socket: "zmq.Socket[Any]", keys: CurveKeys) -> None:
    """Before it binds: `socket` lets in only peers that show the cluster's key."""
    _start_doorkeeper(socket.context)
    socket.curve_publickey, socket.curve_secretkey, socket.curve_server = keys.public, keys.secret, True
    socket.zap_domain = keys.public


def _start_doorkeeper(context: "zmq.Context[Any]") -> None:
    """One a context: its thread ends when the context does, by term() or destroy()."""
    shadow = zmq.Context.shadow(context.underlying)  # destroy() closes the sockets of the object that made them, from another thread
    door = shadow.socket(zmq.REP)
    door.linger = 0
    try:
        door.bind(_ZAP_ADDRESS)
    except zmq.ZMQError as error:
        door.close()
        if error.errno != zmq.EADDRINUSE:  # in use = this context has one
            raise
        return
    threading.Thread(target=_keep_door, args=(door,), daemon=True, name="zap").start()


def _keep_door(door: "zmq.Socket[Any]") -> None:
    try:
        while True:
            version, request_id, domain, peer, _, mechanism, *credentials = door.recv_multipart()
            may_enter = mechanism == b"CURVE" and len(credentials) == 1 and z85.encode(credentials[0]) == domain
            if not may_enter:
                count_incident("ZMQ peer refused")
                logger.warning("a ZMQ peer at %s was refused: it does not hold the cluster's key", peer.decode(errors="replace"))
            status = (b"200", b"") if may_enter else (b"400", b"not the cluster's key")
            door.send_multipart([version, request_id, *status, b"", b""])
    except zmq.ContextTerminated:
        pass
    finally:
        door.close()
