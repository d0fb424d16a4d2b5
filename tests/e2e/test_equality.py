"""Output through the cluster equals Mono (DESIGN.md section 7's rule), cold and with prefix hits, together and alone.

The oracle is run once a stream: teacher-forced on its tokens, so that one forward of the reference checks all 24 of them.
"""

import random
from typing import Any

import pytest

from services.doctor.oracle import Tally, check_stream, demo_reference
from services.model.params import SamplingParams
from tests.e2e.conftest import RigFactory
from tests.e2e.rig import Answer, Rig, generate_all

MAX_MODEL_LEN = 4096
EDGES = (1, 2, 63, 64, 65, 127, 128, 129)
NUM_OUTPUT = 24


def make_requests(number: int, seed: int) -> list[dict[str, Any]]:
    """`number` prompts of random ids: every page edge, one of 1,000 tokens in ten, half greedy, half seeded with filters and penalties."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    requests: list[dict[str, Any]] = []
    for index in range(number):
        length = 1000 if index % 10 == 9 else EDGES[index % len(EDGES)]
        fields: dict[str, Any] = {"prompt": [0, *(draw.randrange(3, 4000) for _ in range(length - 1))], "max_tokens": NUM_OUTPUT,
                                  "ignore_eos": True, "seed": draw.randrange(2**64), "temperature": 0.0}
        if index % 2:
            fields |= {"temperature": draw.choice([0.7, 1.0, 1.5]), "top_p": draw.choice([1.0, 0.9]), "top_k": draw.choice([0, 40]),
                       "min_p": draw.choice([0.0, 0.02]), "frequency_penalty": draw.choice([0.0, 0.4]),
                       "presence_penalty": draw.choice([0.0, 0.3]), "repetition_penalty": draw.choice([1.0, 1.2])}
        requests.append(fields)
    return requests


def assert_equal_mono(requests: list[dict[str, Any]], answers: list[Answer]) -> None:
    tally = Tally()
    for fields, answer in zip(requests, answers, strict=True):
        sampling = {key: value for key, value in fields.items() if key != "prompt"}
        assert len(answer.token_ids) == min(NUM_OUTPUT, MAX_MODEL_LEN - len(fields["prompt"])), (len(fields["prompt"]), answer.token_ids)
        check_stream(demo_reference(), fields["prompt"], SamplingParams(**sampling), answer.token_ids, tally)
    tally.assert_equal()


def run_matrix(rig: Rig, seed: int, *, alone: int, together: int) -> None:
    """`alone` requests one at a time, `together` of them 16 at once, cold; then all again, with prefix hits."""
    requests = make_requests(alone + together, seed)
    cold = generate_all(rig.address, requests[:alone], at_once=1) + generate_all(rig.address, requests[alone:], at_once=16)
    assert_equal_mono(requests, cold)
    warm = generate_all(rig.address, requests, at_once=16)
    assert_equal_mono(requests, warm)
    full_pages = sum((len(fields["prompt"]) - 1) // 64 for fields in requests)
    cached = sum(answer.end.usage.cached_tokens for answer in warm)
    assert cached > 0.5 * 64 * full_pages, f"only {cached} cached tokens over {full_pages} full pages"


def test_cluster_equals_mono(rig: Rig) -> None:
    run_matrix(rig, 1, alone=4, together=16)


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2)])
def test_cluster_equals_mono_full(rigs: RigFactory, prefill: int, decode: int) -> None:
    rig = rigs(prefill, decode)
    run_matrix(rig, 60 + prefill, alone=15, together=45)
    rig.settle()


@pytest.mark.slow
def test_longest_prompts(rig: Rig) -> None:
    """The longest prompt leaves room for one token; 24 shorter leaves room for all."""
    draw = random.Random(7)
    requests = [
        {"prompt": [0, *(draw.randrange(3, 4000) for _ in range(length - 1))], "max_tokens": NUM_OUTPUT, "ignore_eos": True,
         "temperature": 0.0, "seed": 1}
        for length in (MAX_MODEL_LEN - 1, MAX_MODEL_LEN - NUM_OUTPUT)
    ]
    assert_equal_mono(requests, generate_all(rig.address, requests, at_once=2))


@pytest.mark.slow
def test_over_tcp(rigs: RigFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with UCX on TCP, where a reader and its holder share nothing."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    rig = rigs(1, 1, "log.level=error")
    requests = make_requests(20, 99)
    answers = generate_all(rig.address, requests, at_once=16)
    assert_equal_mono(requests, answers)
    assert all(answer.end.timeline.transfer.transport.startswith("tcp") for answer in answers)
    rig.settle()
