"""`python -m services.doctor keys`: what it makes, keeps, and refuses."""

from pathlib import Path

import pytest
from cryptography import x509

from services.doctor.__main__ import main
from services.runtime.config import load_config
from services.runtime.security import Security

FILES = ["ca.key", "ca.pem", "client.key", "client.pem", "client.toml", "curve.key", "inner.key", "inner.pem", "inner.toml"]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def names(path: Path) -> list[str]:
    found = x509.load_pem_x509_certificate(path.read_bytes()).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in found]


def test_what_is_made_can_be_used_and_is_its_owners_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "keys"
    assert main(["keys", str(folder), "--names", "router.example,10.0.0.7"]) == 0
    assert sorted(contents(folder)) == FILES
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600} and folder.stat().st_mode & 0o777 == 0o700
    assert names(folder / "inner.pem") == ["baton.internal", "router.example", "10.0.0.7"]
    assert "baton.internal" not in names(folder / "client.pem")
    inner = Security.of(load_config(folder / "inner.toml").security)
    client = Security.of(load_config(folder / "client.toml").security)
    assert (inner.has_tls, inner.has_curve, client.has_tls, client.has_curve) == (True, True, True, False)
    out = capsys.readouterr().out
    assert all(f"made {folder / name}" in out for name in FILES) and "PRIVATE" not in out


def test_what_is_there_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", str(tmp_path)]) == 0
    before = contents(tmp_path)
    assert main(["keys", str(tmp_path), "--names", "router.example"]) == 0
    assert contents(tmp_path) == before
    assert "inner.pem does not name router.example: remove it and its key" in capsys.readouterr().out
    for name in ("inner.pem", "inner.key"):
        (tmp_path / name).unlink()
    assert main(["keys", str(tmp_path), "--names", "router.example"]) == 0
    after = contents(tmp_path)
    assert {name for name in FILES if after[name] != before[name]} == {"inner.pem", "inner.key"}
    assert names(tmp_path / "inner.pem") == ["baton.internal", "router.example"]
    Security.of(load_config(tmp_path / "inner.toml").security)


@pytest.mark.parametrize(("gone", "words"), [
    (("inner.key",), "inner.pem is there without the other half"),
    (("ca.pem",), "ca.key is there without the other half"),
    (("ca.key", "client.pem", "client.key"), "ca.key is not there to sign with"),
])
def test_half_a_pair_is_one_sentence(gone: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["keys", str(tmp_path)])
    for name in gone:
        (tmp_path / name).unlink()
    before = contents(tmp_path)
    assert main(["keys", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and contents(tmp_path) == before


def test_the_authoritys_key_may_be_kept_elsewhere(tmp_path: Path) -> None:
    main(["keys", str(tmp_path)])
    (tmp_path / "ca.key").unlink()
    assert main(["keys", str(tmp_path)]) == 0


@pytest.mark.parametrize("name", ["bücher.example"])
def test_names_that_are_none_are_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", str(tmp_path), "--names", name]) == 1
    assert "neither a DNS name nor an address" in capsys.readouterr().err


def test_a_folder_that_cannot_be_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["keys", str(tmp_path / "file" / "keys")]) == 1
    assert "cannot be read or written (Not a directory)" in capsys.readouterr().err
