"""How the machine is run: so many examples from a seed, no database, no shrinking unless asked for."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model_based.machine import HandoffMachine
from tests.model_based.observe import observed_states
from tests.model_based.scripted import small_pages

STEPS = 30
SEEDS = (1, 2, 3)


@contextmanager
def quiet() -> Iterator[None]:
    """The product logs every fault; here there are thousands."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def run_machine(num_examples: int, from_seed: int, *, shrinks: bool = False) -> Counter[str]:
    """Run the machine; returns the transitions that happened. Raises what the first failing example raises."""

    class Machine(HandoffMachine):
        transitions: ClassVar[Counter[str]] = Counter()

    phases = (Phase.generate, Phase.shrink) if shrinks else (Phase.generate,)
    with small_pages(), observed_states(), quiet():
        run_state_machine_as_test(seed(from_seed)(Machine), settings=settings(
            max_examples=num_examples, stateful_step_count=STEPS, phases=phases, database=None, deadline=None,
            suppress_health_check=list(HealthCheck), report_multiple_bugs=False, print_blob=False,
        ))
    return Machine.transitions
