"""Random lives of hand-offs: every invariant holds after every event, and every transition of DESIGN.md section 5 happens.

A failure prints the events that led to it; `run_machine(n, seed, shrinks=True)` finds fewer of them.
"""

from collections import Counter

import pytest

from tests.model_based.observe import TRANSITIONS
from tests.model_based.running import SEEDS, run_machine

NUM_FAST = 300
NUM_SLOW, PER_SEED = 5000, 500


def test_random_lives() -> None:
    transitions = run_machine(NUM_FAST, from_seed=5)
    common = [name for name in TRANSITIONS if name.startswith(("request", "pull")) and "paused" not in name]
    assert not [name for name in common if not transitions[name]], transitions


@pytest.mark.slow
def test_thousands_of_random_lives_with_every_transition() -> None:
    """The first examples are those in which the planted faults are to be caught."""
    transitions: Counter[str] = Counter()
    for seed in SEEDS:
        transitions += run_machine(PER_SEED, seed)
    transitions += run_machine(NUM_SLOW - PER_SEED * len(SEEDS), from_seed=4)
    missing = [name for name in TRANSITIONS if not transitions[name]]
    assert not missing, f"never happened: {missing}; of {dict(sorted(transitions.items()))}"
