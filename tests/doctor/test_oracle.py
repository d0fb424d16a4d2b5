"""The oracle itself: it finds wrong tokens, excuses only what rounding explains, and agrees with Mono."""

import pytest
import torch

from services.doctor.oracle import Tally, check_stream, compare, flip_gap
from services.model.params import SamplingParams
from services.model.reference import Reference
from services.model.sampling import RowState
from tests.tiny_model import random_tensors, tiny_config

PARAMS = {
    "greedy": SamplingParams(max_tokens=12, seed=0, temperature=0.0),
    "seeded": SamplingParams(max_tokens=12, seed=2**63 + 5, temperature=0.9, ignore_eos=True),
    "everything": SamplingParams(
        max_tokens=12, seed=7, temperature=1.3, top_k=40, top_p=0.9, min_p=0.02, frequency_penalty=0.3, presence_penalty=0.2,
        repetition_penalty=1.2, min_tokens=4, ignore_eos=True,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def reference() -> Reference:
    config = tiny_config()
    return Reference(config, random_tensors(config, seed=20))


@pytest.mark.parametrize("name", PARAMS)
def test_mono_equals_the_oracle(reference: Reference, name: str) -> None:
    prompt, params = [0, *range(40, 70)], PARAMS[name]
    out = reference.generate(prompt, params)
    comparison = compare(reference, tuple(prompt), params, tuple(out.token_ids))
    assert not comparison.wrong and not comparison.excused and comparison.num_tokens == len(out.token_ids)
    assert comparison.logprobs == pytest.approx(out.logprobs, abs=1e-4)


@pytest.mark.parametrize("name", PARAMS)
def test_a_wrong_token_is_found(reference: Reference, name: str) -> None:
    prompt, params = [0, *range(40, 70)], PARAMS[name]
    stream = reference.generate(prompt, params).token_ids
    stream[5] = (stream[5] + 1) % 260
    tally = Tally()
    comparison = check_stream(reference, prompt, params, stream[:6], tally)
    assert len(comparison.wrong) == 1 and "output token 5" in comparison.wrong[0]
    with pytest.raises(AssertionError, match="1 of 6 tokens differ"):
        tally.assert_equal()


def test_tokens_after_the_end_are_wrong(reference: Reference) -> None:
    stream = reference.generate([0, 50], SamplingParams(max_tokens=4, seed=0, temperature=0.0, ignore_eos=True)).token_ids
    stop = SamplingParams(max_tokens=3, seed=0, temperature=0.0, ignore_eos=True, stop_token_ids=(stream[1],))
    wrong = compare(reference, (0, 50), stop, tuple(stream)).wrong
    assert any("goes on after" in sentence for sentence in wrong) and any("max_tokens is 3" in sentence for sentence in wrong)


def gap(logits: list[float], token: int, **params: float) -> float:
    row = RowState(params=SamplingParams(max_tokens=9, seed=3, **params), position=9, num_output_tokens=1)  # type: ignore[arg-type]
    return flip_gap(torch.tensor(logits), row, token)


def test_close_scores_and_close_cuts_are_excused() -> None:
    assert gap([1.0, 1.0 - 5e-5], 1, temperature=0.0) == pytest.approx(5e-5, rel=0.1)
    assert gap([1.0, 1.0 - 5e-4], 1, temperature=0.0) > 1e-4
    # token 1 is the third best by 5e-5 and dropped by top_k 2; whether it would win rests with the noise, that it may take part does not
    near, far = [9.0, 1.0 - 5e-5, 1.0, 0.0], [9.0, 0.5, 1.0, 0.0]
    assert gap(near, 1, top_k=2) < 100 and gap(far, 1, top_k=2) == float("inf")
    half = [0.001, 0.0]  # probabilities 0.50025 and 0.49975: the second stays when top_p is above 0.50025
    assert gap(half, 1, top_p=0.49) == float("inf") and gap(half, 1, top_p=0.5002) < 100
    assert gap([0.0, -1.0], 1, min_p=0.5) == float("inf") and gap([0.0, -0.69317], 1, min_p=0.5) < 100
