"""Every test of a rig ends with all pages back on both sides."""
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.decode.rig import Rig


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**fields: Any) -> Rig:
        rigs.append(Rig(**fields))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.assert_conserved()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()
