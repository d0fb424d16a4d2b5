"""What no sampler may ever see is refused, with field, value and limit."""
import math

import msgspec
import pytest

from services.model.params import SamplingParams, check_params, check_token_ids
from services.runtime.errors import InvalidRequest

GOOD = SamplingParams(max_tokens=8, seed=1)


@pytest.mark.parametrize(("field", "value", "limit"), [
    ("max_tokens", 0, "at least 1"),
    ("min_tokens", -1, "at least 0"),
    ("min_tokens", 9, "max_tokens 8"),
    ("seed", -1, "at least 0"),
    ("seed", 2**64, "at most 18446744073709551615"),
    ("temperature", math.nan, "from 0 to 100"),
    ("temperature", math.inf, "from 0 to 100"),
    ("temperature", -0.5, "from 0 to 100"),
    ("temperature", 1e-9, "0 (greedy) or at least 0.001"),
    ("top_k", -1, "at least 0"),
    ("top_p", 0.0, "above 0"),
    ("top_p", 1.5, "from 0 to 1"),
    ("top_p", math.nan, "from 0 to 1"),
    ("min_p", -0.1, "from 0 to 1"),
    ("min_p", math.nan, "from 0 to 1"),
    ("frequency_penalty", 2.5, "from -2 to 2"),
    ("presence_penalty", -math.inf, "from -2 to 2"),
    ("repetition_penalty", 0.0, "above 0"),
    ("repetition_penalty", math.nan, "from 0 to 100"),
    ("logprobs", -2, "at least -1"),
    ("logprobs", 100_000, "at most 20"),
    ("stop_token_ids", (5, 4_000_000_000), "below vocab_size 100"),
    ("stop_token_ids", (-1,), "below vocab_size 100"),
    ("stop_token_ids", tuple(range(65)), "at most 64"),
])
def test_refused(field: str, value: object, limit: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_params(msgspec.structs.replace(GOOD, **{field: value}), vocab_size=100)
    assert refused.value.field == field and limit in str(refused.value)


def test_the_edges_are_taken() -> None:
    check_params(GOOD, vocab_size=100)
    check_params(SamplingParams(
        max_tokens=1, seed=2**64 - 1, temperature=0.0, top_k=10**9, top_p=1e-6, min_p=1.0, frequency_penalty=-2.0, presence_penalty=2.0,
        repetition_penalty=100.0, min_tokens=1, stop_token_ids=tuple(range(36, 100)), logprobs=20,
    ), vocab_size=100)
    check_params(msgspec.structs.replace(GOOD, temperature=1e-3, logprobs=0), vocab_size=100)


@pytest.mark.parametrize("bad", [100, 2**32 - 1, -1])
def test_token_ids_are_named_by_their_place(bad: int) -> None:
    check_token_ids("ids", [0, 99], vocab_size=100)
    check_token_ids("ids", [], vocab_size=100)
    with pytest.raises(InvalidRequest) as refused:
        check_token_ids("ids", [5, bad, bad], vocab_size=100)
    assert str(refused.value) == f"ids[1] is {bad} but token ids must be below vocab_size 100"
