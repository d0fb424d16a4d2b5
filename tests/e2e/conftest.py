"""One cluster a layout is shared by all tests; after each test everything must have come back."""

from collections.abc import Callable, Iterator

import pytest

from tests.e2e.rig import Rig

RigFactory = Callable[..., Rig]


@pytest.fixture(scope="session")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RigFactory]:
    """`rigs(prefill, decode, *settings)`: the running cluster of that layout, started once a run."""
    running: dict[tuple[object, ...], Rig] = {}

    def get(prefill: int, decode: int, *settings: str) -> Rig:
        key = (prefill, decode, *settings)
        if key not in running:
            running[key] = Rig(prefill, decode, settings, tmp_path_factory.mktemp("run"))
        return running[key]

    yield get
    for rig in running.values():
        rig.close()


@pytest.fixture
def rig(rigs: RigFactory) -> Iterator[Rig]:
    """Two prefill and two decode ranks; conservation is asserted after the test."""
    rig = rigs(2, 2)
    yield rig
    rig.settle()
