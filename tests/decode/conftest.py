"""Every test of a rig ends with all pages back on both sides."""
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.decode.move_rig import MoveRig
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


@pytest.fixture
def make_move_rig() -> Iterator[Callable[..., MoveRig]]:
    rigs: list[MoveRig] = []

    def make(**fields: Any) -> MoveRig:
        rigs.append(MoveRig(**fields))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.assert_conserved()


@pytest.fixture
def moving(make_move_rig: Callable[..., MoveRig]) -> MoveRig:
    return make_move_rig()
