"""Who may talk to whom on the inner plane, read from `[security]` once a process.

gRPC   mTLS on every port and channel when certificates are given (tls.py). Every peer must show a certificate of `ca`; one that names
       `server_name` belongs to the cluster, any other to a client, which peer_check.py keeps to what clients may call. Peers dial by
       IP, so a channel looks for `server_name` in the certificate, not for the address.
ZMQ    CURVE with the cluster's one key pair, and nobody else's key is let in (curve.py).
Clear  on loopback always; beyond it gRPC only when `insecure` says so, ZMQ never.
"""

import asyncio
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import zmq

from services.runtime.config import SecuritySection
from services.runtime.curve import CurveKeys, arm_client, arm_server, read_keys
from services.runtime.errors import ConfigError, SetupError
from services.runtime.peer_check import PeerCheck
from services.runtime.serve import CHANNEL_OPTIONS
from services.runtime.tls import TlsFiles
from services.runtime.tls_probe import explain

MAX_ZMQ_BYTES = 16 * 2**20  # of one message over TCP, as large as any over gRPC
_MADE_BY = "`python -m services.doctor keys FOLDER` makes them"
_ADVICE = f"give security.certificate, .key and .ca ({_MADE_BY}), or say security.insecure = true"


class Security:
    """What a process may do and how; `Security.of(config.security)`."""

    def __init__(self, section: SecuritySection, tls: TlsFiles | None, curve: CurveKeys | None) -> None:
        self._section, self._tls, self._curve = section, tls, curve

    @classmethod
    def of(cls, section: SecuritySection) -> "Security":
        """Read and check the files that `section` names. Raises ConfigError, which names the file."""
        paths = {name: getattr(section, name) for name in ("certificate", "key", "ca")}
        missing = [f"security.{name}" for name, path in paths.items() if not path]
        if 0 < len(missing) < len(paths):
            raise ConfigError(f"{' and '.join(missing)} must be given too: certificate, key and ca go together, all three or none")
        tls = None if missing else TlsFiles(*(Path(path) for path in paths.values()))
        return cls(section, tls, read_keys(Path(section.curve_key)) if section.curve_key else None)

    # ---- gRPC

    @property
    def has_tls(self) -> bool:
        """Whether every gRPC port and channel is under mTLS."""
        return self._tls is not None

    def check_listen(self, address: str, what: str) -> None:
        """Raises ConfigError when `what` ("gRPC") would be served at `address` (host:port) in the clear beyond loopback."""
        if self._is_clear_beyond(address):
            raise ConfigError(f"{what} cannot listen on {address} in the clear, since that is beyond loopback; {_ADVICE}")

    def check_dial(self, address: str) -> None:
        """Raises ConfigError when `address` (host:port) would be dialled in the clear beyond loopback."""
        if self._is_clear_beyond(address):
            raise ConfigError(f"{address} cannot be dialled in the clear, since it is beyond loopback; {_ADVICE}")

    def _is_clear_beyond(self, address: str) -> bool:
        return self._tls is None and not self._section.insecure and not is_loopback(address.rpartition(":")[0])

    def open_channel(self, address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
        """Channel with Baton's bounds and keepalive, `options` above them; connects lazily. Raises ConfigError, see check_dial()."""
        self.check_dial(address)
        merged = list(dict([*CHANNEL_OPTIONS, *options]).items())
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=merged)
        name = ("grpc.ssl_target_name_override", self._section.server_name)
        return grpc.aio.secure_channel(address, self._tls.channel_credentials(), options=[*merged, name])

    async def why_refused(self, address: str) -> str:
        """After a call could not be connected: what TLS has to do with it, in a few words for the user; "" = nothing."""
        return await asyncio.to_thread(explain, address, self._section)

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """For a port, None = in the clear. Raises ConfigError when our certificate is none that peers would believe a server."""
        if self._tls is None:
            return None
        names, name = self._tls.current().names, self._section.server_name
        if name not in names:
            held = ", ".join(names) or "nothing"
            raise ConfigError(f"security.certificate: {self._tls.certificate} names {held} but a server's must name {name} "
                              "(security.server_name) among its DNS names; make one that does")
        return self._tls.server_credentials()

    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """What every server puts before its services."""
        return [] if self._tls is None else [PeerCheck(self._section.server_name)]

    # ---- ZMQ

    @property
    def has_curve(self) -> bool:
        """Whether ZMQ sockets may leave loopback."""
        return self._curve is not None

    def curve_server(self, socket: "zmq.Socket[Any]") -> None:
        """Let in only peers that hold the cluster's key. Before it binds; without a key nothing changes."""
        if self._curve is not None:
            arm_server(socket, self._curve)

    def curve_client(self, socket: "zmq.Socket[Any]") -> None:
        """Talk only to a server that holds the cluster's key. Before it connects; without a key nothing changes."""
        if self._curve is not None:
            arm_client(socket, self._curve)

    def bind_zmq(self, socket: "zmq.Socket[Any]", host: str, port: int = 0) -> int:
        """Bind a TCP port of `host`, an address (IPv6 in brackets or not); 0 = any free one. Returns the port.

        The only way to a ZMQ port here. Raises ConfigError beyond loopback without CURVE, SetupError when the port cannot be had.
        """
        plain = host.strip("[]")
        self._check_zmq(plain, f"ZMQ cannot listen on {host}")
        _bound(socket, plain)
        self.curve_server(socket)
        shown = f"[{plain}]" if ":" in plain else plain
        try:
            socket.bind(f"tcp://{shown}:{port or '*'}")
        except zmq.ZMQError as error:
            advice = "choose another address (port 0 = any free one)"
            raise SetupError(f"cannot listen on {shown}:{port} ({error.strerror}); {advice}") from None
        return int(socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def connect_zmq(self, socket: "zmq.Socket[Any]", endpoint: str) -> None:
        """Connect to `endpoint`, "tcp://host:port". Raises ConfigError beyond loopback without CURVE, and for what is no such endpoint."""
        scheme, _, address = endpoint.partition("://")
        host = address.rpartition(":")[0].strip("[]")
        if scheme != "tcp" or not host:
            raise ConfigError(f"{endpoint!r} is not of the form tcp://host:port")
        self._check_zmq(host, f"{endpoint} cannot be dialled")
        _bound(socket, host)
        self.curve_client(socket)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"{endpoint} cannot be dialled ({error.strerror}); it must be tcp://host:port") from None

    def _check_zmq(self, host: str, what: str) -> None:
        if self._curve is None and not is_loopback(host):
            raise ConfigError(f"{what} without CURVE, since that is beyond loopback; give security.curve_key ({_MADE_BY})")


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine's own and nobody else's: an address of loopback or `localhost`. Other names may be anything, and
    are not looked up: that would wait."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _bound(socket: "zmq.Socket[Any]", host: str) -> None:
    if ":" in host:
        socket.set(zmq.IPV6, 1)
    if socket.getsockopt(zmq.MAXMSGSIZE) == -1:  # the caller knows no tighter bound
        socket.set(zmq.MAXMSGSIZE, MAX_ZMQ_BYTES)
