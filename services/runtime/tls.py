"""A process's certificate, key and authorities: PEM files, checked when read and taken up anew when they change on disk.

Renewal (cert-manager replaces the files): a server looks at every handshake, a channel when it is opened; neither needs a restart. A file
that cannot be used then, half written or expired, changes nothing: what was read last stays, and the event is counted.
"""

import datetime
import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from services.runtime.errors import ConfigError
from services.runtime.telemetry import count_incident

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pem:
    """What the three files held, and the DNS names in the certificate. No repr of it shows the key."""

    certificate: bytes
    key: bytes = field(repr=False)
    ca: bytes
    names: tuple[str, ...]


class TlsFiles:
    """The three files. Thread-safe: gRPC's own threads ask too."""

    def __init__(self, certificate: Path, key: Path, ca: Path) -> None:
        """Raises ConfigError, which names the file."""
        self._paths = (certificate, key, ca)
        self._lock = threading.Lock()
        self._stamp = self._stamp_now()
        self._pem = _read(*self._paths)

    @property
    def certificate(self) -> Path:
        """Where the certificate is."""
        return self._paths[0]

    def current(self) -> Pem:
        """What the files hold now; while they cannot be used, what they held last."""
        with self._lock:
            stamp = self._stamp_now()
            if stamp != self._stamp:
                self._stamp = stamp  # taken before reading: what changes meanwhile is read again
                try:
                    self._pem = _read(*self._paths)
                    logger.info("certificate %s was renewed", self.certificate)
                except ConfigError as error:
                    count_incident("renewed certificate refused")
                    logger.warning("the certificate in use stays: %s", error)
            return self._pem

    def _stamp_now(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_identity(path) for path in self._paths)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a port: clients must show a certificate of our authorities."""
        served = self.current()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            pem = self.current()
            if pem is served:
                return None  # gRPC keeps what it has
            served = pem
            return _configuration(pem)

        return grpc.dynamic_ssl_server_credentials(_configuration(served), renewed, require_client_authentication=True)  # pyright: ignore[reportArgumentType] (the stubs forget None)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel; it keeps them for its life."""
        pem = self.current()
        return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], root_certificates=pem.ca)


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever the file is replaced or written; a symbolic link counts as what it points at."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read(certificate: Path, key: Path, ca: Path) -> Pem:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    pem_certificate, pem_key, pem_ca = (read_secret(name, path) for name, path in
                                        (("certificate", certificate), ("key", key), ("ca", ca)))
    ours = _parse("certificate", certificate, pem_certificate)[0]
    _parse("ca", ca, pem_ca)
    try:
        private = load_pem_private_key(pem_key, None)
    except (ValueError, TypeError):  # their texts could quote the file
        raise ConfigError(f"security.key: {key} is no private key in PEM without a password; give the one of {certificate}") from None
    if private.public_key() != ours.public_key():
        raise ConfigError(f"security.key: {key} is not the key of {certificate}; give the two that belong together")
    return Pem(pem_certificate, pem_key, pem_ca, _dns_names(ours))


def read_secret(name: str, path: Path) -> bytes:
    """The bytes of the file that `security.<name>` names. Raises ConfigError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"security.{name}: {path} cannot be read ({error.strerror}); name an existing file") from None


def _parse(name: str, path: Path, pem: bytes) -> list[Any]:
    """The certificates in `pem`, at least one, the first of them valid now."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise ConfigError(f"security.{name}: {path} holds no certificate in PEM; give one that begins with BEGIN CERTIFICATE") from None
    begin, end = found[0].not_valid_before_utc, found[0].not_valid_after_utc
    if not begin <= datetime.datetime.now(datetime.UTC) <= end:
        raise ConfigError(f"security.{name}: {path} is valid from {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC only; renew it")
    return found


def _dns_names(certificate: Any) -> tuple[str, ...]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return ()
    return tuple(names.get_values_for_type(x509.DNSName))
