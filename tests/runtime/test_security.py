"""What `[security]` may say, and where listening and dialling in the clear end."""

from pathlib import Path

import pytest

from services.runtime.config import SecuritySection
from services.runtime.errors import ConfigError
from services.runtime.security import Security, is_loopback
from services.runtime.serve import Server
from tests.clear import CLEAR, INSECURE
from tests.runtime.keys_rig import Keys, changed

LOOPBACK = ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "::ffff:127.0.0.1"]
BEYOND = ["0.0.0.0", "[::]", "10.0.0.1", "[fd00::1]", "router", "localhost.example.com", "127.1", "0", "", "::ffff:10.0.0.1"]


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", BEYOND)
def test_beyond_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "router"])
async def test_beyond_loopback_nothing_is_clear_unless_told_so(host: str, keys: Keys) -> None:
    address = f"{host}:50050"
    advice = r"beyond loopback; give security.certificate.*doctor keys.*or say security.insecure = true"
    with pytest.raises(ConfigError, match=advice) as caught:
        CLEAR.check_listen(address, "gRPC")
    assert address in str(caught.value)
    with pytest.raises(ConfigError, match="gRPC cannot listen"):
        Server(address, [], CLEAR)
    with pytest.raises(ConfigError, match=advice) as caught:
        CLEAR.open_channel(address)
    assert address in str(caught.value)
    for security in (INSECURE, keys.inner):
        security.check_listen(address, "gRPC")
        await security.open_channel(address).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
async def test_loopback_is_always_allowed(host: str) -> None:
    CLEAR.check_listen(f"{host}:50050", "gRPC")
    await CLEAR.open_channel(f"{host}:50050").close()


@pytest.mark.parametrize("missing", ["certificate", "key", "ca"])
def test_certificate_key_and_ca_go_together(missing: str, keys: Keys) -> None:
    with pytest.raises(ConfigError, match=rf"security.{missing} must be given too"):
        Security.of(changed(keys.section(), **{missing: ""}))


@pytest.mark.parametrize("name", ["certificate", "key", "ca", "curve_key"])
@pytest.mark.parametrize(("content", "reason"), [(None, "cannot be read"), (b"SECRET-AS-WRITTEN\xff", "no |not of the form")])
def test_a_file_that_cannot_be_used_is_named_and_never_shown(
    name: str, content: bytes | None, reason: str, keys: Keys, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        Security.of(changed(keys.section(), **{name: str(path)}))
    assert f"security.{name}: {path}" in str(caught.value) and "SECRET" not in str(caught.value)


def test_a_key_of_another_certificate_is_refused(keys: Keys) -> None:
    with pytest.raises(ConfigError, match=r"client.key is not the key of .*inner.pem"):
        Security.of(changed(keys.section(), key=keys.section("client").key))


def test_a_curve_file_without_its_secret_is_refused(keys: Keys, tmp_path: Path) -> None:
    public = tmp_path / "public.key"
    public.write_text("".join(line for line in Path(keys.section().curve_key).read_text().splitlines(True) if "secret-key" not in line))
    with pytest.raises(ConfigError, match="and the secret key that it belongs to"):
        Security.of(SecuritySection(curve_key=str(public)))


def test_a_server_must_have_the_clusters_name(keys: Keys) -> None:
    with pytest.raises(ConfigError, match=r"client.pem names client.baton but a server's must name baton.internal"):
        Server("127.0.0.1:0", [], keys.client)


def test_no_secret_is_in_any_repr(keys: Keys) -> None:
    security = keys.inner
    shown = repr(vars(security)) + repr(security._tls.current()) + repr(security._curve)  # pyright: ignore
    secrets = [security._tls.current().key, security._curve.secret]  # pyright: ignore
    assert not [secret for secret in secrets if repr(secret)[2:-1] in shown]
