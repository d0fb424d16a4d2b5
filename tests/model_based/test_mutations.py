"""Faults planted in the product are caught by the machine within 500 examples, at each of three seeds."""

import pytest

from tests.model_based.mutations import MUTATIONS, planted
from tests.model_based.running import SEEDS, run_machine
from tests.model_based.test_machine import PER_SEED


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_is_in_date(mutation: str) -> None:
    with planted(mutation):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_planted_fault_is_caught(mutation: str) -> None:
    for seed in SEEDS:
        with planted(mutation), pytest.raises(Exception) as caught:
            run_machine(PER_SEED, seed)
        assert not isinstance(caught.value, TimeoutError | KeyboardInterrupt)
