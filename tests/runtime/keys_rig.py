"""Certificates made once a test session: two clusters' worth, so that one can be a stranger to the other."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec

from services.doctor.keys import make_keys
from services.runtime.config import SecuritySection, load_config
from services.runtime.security import Security


@dataclasses.dataclass(frozen=True)
class Keys:
    """A folder as `python -m services.doctor keys` leaves it."""

    folder: Path

    def section(self, name: str = "inner") -> SecuritySection:
        return load_config(self.folder / f"{name}.toml").security

    @property
    def inner(self) -> Security:
        return Security.of(self.section())

    @property
    def client(self) -> Security:
        return Security.of(self.section("client"))


def keys_in(folder: Path, names: tuple[str, ...] = (), say: Callable[[str], None] = lambda _line: None) -> Keys:
    make_keys(folder, names, say=say)
    return Keys(folder)


def changed(section: SecuritySection, **values: str | bool) -> SecuritySection:
    return msgspec.structs.replace(section, **values)
