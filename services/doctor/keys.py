"""Everything that `[security]` names, made for a cluster of one's own: an authority, two certificates, a ZMQ key pair.

    ca.pem ca.key           signs the other two; ca.key is needed for nothing else and may be kept elsewhere
    inner.pem inner.key     routers, fronts and tools: names security.server_name, and whatever names clients dial
    client.pem client.key   clients: may generate, and nothing else
    curve.key               the cluster's ZMQ key pair
    inner.toml client.toml  [security] for the two, to be copied or given as --config

What exists is kept. To renew a certificate, remove it and its key and run again: processes take the new ones up by themselves.
"""

import datetime
import ipaddress
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import zmq.auth
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.runtime.config import SecuritySection
from services.runtime.errors import SetupError

CLIENT_NAME = "client.baton"
_CA_DAYS = 3650
_DAYS = 365
_SKEW = datetime.timedelta(hours=1)  # clocks of machines differ


class _Authority(NamedTuple):
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


def make_keys(folder: Path, names: Sequence[str] = (), server_name: str = SecuritySection().server_name,
              say: Callable[[str], None] = print) -> None:
    """Make what is missing in `folder`, files 0600; a line to `say` for each.

    names  DNS names and addresses that clients know the routers by, beside `server_name`
    Raises SetupError when a file cannot be written, or half of a pair is there.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_certificates(folder, [server_name, *names], say)
        _make_curve(folder / "curve.key", say)
        for name in ("inner", "client"):
            _make(folder / f"{name}.toml", lambda name=name: _section(folder.resolve(), name, server_name), say)
    except OSError as error:
        raise SetupError(f"{error.filename or folder} cannot be read or written ({error.strerror}); name a folder that is yours") from None


def _make_certificates(folder: Path, names: Sequence[str], say: Callable[[str], None]) -> None:
    if _is_missing(folder, "ca", say):
        key = ec.generate_private_key(ec.SECP256R1())
        _write_pair(folder, "ca", key, _sign("Baton authority", key), say)
    is_inner_missing, is_client_missing = _is_missing(folder, "inner", say), _is_missing(folder, "client", say)
    both = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
    if is_inner_missing:
        _make_leaf(folder, "inner", names, both, say)
    else:
        _tell_unnamed(folder / "inner.pem", names, say)
    if is_client_missing:
        _make_leaf(folder, "client", [CLIENT_NAME], (ExtendedKeyUsageOID.CLIENT_AUTH,), say)


def _is_missing(folder: Path, name: str, say: Callable[[str], None]) -> bool:
    """Whether a pair is to be made. Raises SetupError for half of one; the CA's key may be elsewhere once all is made."""
    there = [path for path in (folder / f"{name}.pem", folder / f"{name}.key") if path.exists()]
    if len(there) == 1 and not (name == "ca" and there[0].suffix == ".pem"):
        raise SetupError(f"{there[0]} is there without the other half of its pair; remove it, or bring the other one back")
    for path in there:
        say(f"kept {path}")
    return not there


def _tell_unnamed(path: Path, names: Sequence[str], say: Callable[[str], None]) -> None:
    held = _load_certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    unnamed = [name for name in names if _general_name(name) not in held]
    if unnamed:
        say(f"{path} does not name {', '.join(unnamed)}: remove it and its key and run again for one that does")


def _make_leaf(
    folder: Path, name: str, names: Sequence[str], usages: Sequence[x509.ObjectIdentifier], say: Callable[[str], None]
) -> None:
    authority = _load_authority(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    _write_pair(folder, name, key, _sign(f"Baton {name}", key, authority, names, usages), say)


def _sign(
    title: str, key: ec.EllipticCurvePrivateKey, authority: _Authority | None = None, names: Sequence[str] = (),
    usages: Sequence[x509.ObjectIdentifier] = (),
) -> x509.Certificate:
    """A certificate for `key`; without `authority` it is an authority's, signed by itself."""
    now, subject = datetime.datetime.now(datetime.UTC), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title)])
    signer = authority.key if authority is not None else key
    is_ca, days = authority is None, _DAYS if authority is not None else _CA_DAYS
    builder = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(authority.certificate.subject if authority is not None else subject)
        .public_key(key.public_key()).serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW).not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(_key_usage(is_ca), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
    if usages:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _key_usage(is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca, key_cert_sign=is_ca, crl_sign=is_ca, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    """Raises SetupError for what is neither a DNS name nor an address."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError:
        raise SetupError(f"--names: {name!r} is neither a DNS name nor an address; write others as punycode") from None


def _load_authority(folder: Path) -> _Authority:
    """Raises SetupError."""
    path = folder / "ca.key"
    if not path.exists():
        raise SetupError(f"{path} is not there to sign with; bring it back, or remove ca.pem and what it signed to begin anew")
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SetupError(f"{path} is no private key that this command made; remove ca.pem, ca.key and what they signed to begin anew")
    return _Authority(key, _load_certificate(folder / "ca.pem"))


def _load_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise SetupError(f"{path} is no certificate in PEM; remove it and its key and run again") from None


def _write_pair(
    folder: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate, say: Callable[[str], None]
) -> None:
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _make(folder / f"{name}.key", lambda: secret, say)
    _make(folder / f"{name}.pem", lambda: certificate.public_bytes(pem), say)


def _make_curve(path: Path, say: Callable[[str], None]) -> None:
    def content() -> bytes:
        with tempfile.TemporaryDirectory() as private:  # 0700
            _, secret = zmq.auth.create_certificates(private, "curve")
            return Path(secret).read_bytes()

    _make(path, content, say)


def _section(folder: Path, name: str, server_name: str) -> bytes:
    """[security] in TOML; strings as JSON writes them are TOML too."""
    values = {"certificate": folder / f"{name}.pem", "key": folder / f"{name}.key", "ca": folder / "ca.pem"}
    if name == "inner":
        values["curve_key"] = folder / "curve.key"
    lines = [f"{key} = {json.dumps(str(path), ensure_ascii=False)}" for key, path in values.items()]
    return "\n".join(["[security]", *lines, f'server_name = "{server_name}"', ""]).encode()


def _make(path: Path, content: Callable[[], bytes], say: Callable[[str], None]) -> None:
    """Write a file that is not there yet, whole, for its owner alone."""
    if path.exists():
        say(f"kept {path}")
        return
    whole = content()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(whole)
    say(f"made {path}")
