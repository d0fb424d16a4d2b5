"""Certificates that tests of this folder share."""

import pytest

from tests.runtime.keys_rig import Keys, keys_in


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return keys_in(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="session")
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """Of another authority, with the same names."""
    return keys_in(tmp_path_factory.mktemp("other"))
