"""Every wrong request is refused with field, value and limit; every unset field gets its default; zero stays zero."""

import math
import re
from typing import Any

import pytest

from proto.baton.v1 import generation_pb2
from services.kv.hash import page_digests
from services.router.chat import ChatTemplate
from services.router.dispatch import sampling_message
from services.router.tokenizer import Tokenizer
from services.router.validate import Limits, Request, validate
from services.runtime.errors import InvalidRequest
from tests.router.byte_model import BOS, EOS, VOCAB, byte_tokenizer, ids_of
from tests.router.rig import request_of

TOKENIZER = Tokenizer(byte_tokenizer(), BOS)
LIMITS = Limits(max_model_len=64, vocab_size=VOCAB)


def check(prompt: list[int] | None = None, **fields: Any) -> Request:
    return validate(request_of(prompt, **fields), TOKENIZER, LIMITS, (EOS,), 0.0)


@pytest.mark.parametrize(("fields", "words"), [
    ({"prompt": []}, ["token_ids", "empty"]),
    ({"text": ""}, ["text", "empty"]),
    ({"prompt": [5] * 64}, ["token_ids", "64 tokens", "max_model_len 64"]),
    ({"text": "x" * 64}, ["text", "65 tokens", "max_model_len 64"]),
    ({"text": "x" * 10_000}, ["text", "10000 characters", "64 tokens"]),
    ({"prompt": [5, VOCAB]}, ["token_ids[1]", str(VOCAB), "vocab_size"]),
    ({"prompt": [5, 2**32 - 1]}, ["token_ids[1]", "4294967295"]),
    ({"chat": generation_pb2.Chat()}, ["chat", "no chat template"]),
    ({"max_tokens": 0}, ["max_tokens", "0", "at least 1"]),
    ({"max_tokens": -1}, ["max_tokens", "-1", "at least 1"]),
    ({"min_tokens": -1}, ["min_tokens", "-1", "at least 0"]),
    ({"min_tokens": 5, "max_tokens": 4}, ["min_tokens", "5", "max_tokens 4"]),
    ({"top_p": 0.0}, ["top_p", "0", "above 0"]),
    ({"top_p": 2.0}, ["top_p", "2.0", "1"]),
    ({"top_p": math.nan}, ["top_p", "nan"]),
    ({"min_p": 1.5}, ["min_p", "1.5"]),
    ({"temperature": -0.5}, ["temperature", "-0.5", "0"]),
    ({"temperature": math.nan}, ["temperature", "nan"]),
    ({"temperature": math.inf}, ["temperature", "inf"]),
    ({"temperature": 1e-9}, ["temperature", "0.001"]),
    ({"top_k": -1}, ["top_k", "-1", "at least 0"]),
    ({"frequency_penalty": math.inf}, ["frequency_penalty", "inf"]),
    ({"presence_penalty": -3.0}, ["presence_penalty", "-3.0", "-2"]),
    ({"repetition_penalty": 0.0}, ["repetition_penalty", "above 0"]),
    ({"repetition_penalty": math.nan}, ["repetition_penalty", "nan"]),
    ({"logprobs": 21}, ["logprobs", "21", "at most 20"]),
    ({"logprobs": -1}, ["logprobs", "-1"]),
    ({"n": 17}, ["n is 17", "1 to 16"]),
    ({"n": 0}, ["n is 0", "1 to 16"]),
    ({"n": 0}, ["n is 0"]),
    ({"priority": 10}, ["priority", "10", "9"]),
    ({"stop": ["x"] * 17}, ["stop", "17", "16"]),
    ({"stop": ["x" * 257]}, ["stop", "257", "256"]),
    ({"stop": ["a", ""]}, ["stop", "''", "not 0"]),
    ({"stop_token_ids": [VOCAB]}, ["stop_token_ids", str(VOCAB)]),
    ({"stop_token_ids": list(range(65))}, ["stop_token_ids", "65 ids", "64"]),
    ({"tenant": "x" * 257}, ["tenant", "257"]),
], ids=str)
def test_refused(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(**fields)
    for word in words:
        assert re.search(rf"(?<![\w-]){re.escape(word)}", str(caught.value)), f"{word!r} is not in {caught.value}"


def test_chat_goes_through_the_template() -> None:
    """B36, B40: one BOS, the generation prompt unless it is refused, an empty chat is an error, the length is that of all of it."""
    source = "{{ bos_token }}{% for m in messages %}{{ m.role[0] ~ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    template = ChatTemplate(source, {"bos_token": "<bos>"}, list(TOKENIZER.control_ids), "test")

    def ask(*contents: str, **options: Any) -> Request:
        messages = [generation_pb2.ChatMessage(role="user", content=content) for content in contents]
        return validate(request_of(chat=generation_pb2.Chat(messages=messages, **options)), TOKENIZER, LIMITS, (EOS,), 0.0, template)

    assert ask("<bos>", "").prompt_ids == [BOS, *ids_of("u<bos>u>")]
    assert ask("a", add_generation_prompt=False).prompt_ids == [BOS, *ids_of("ua")]
    for contents, options, words in (
        ((), {}, "messages is .* empty"), (("x" * 63,), {}, "chat has 66 tokens but.*max_model_len 64"),
        (("x" * 999,), {}, "999 characters.*320"), (("a",), {"thinking": False}, "chat.thinking is False"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            ask(*contents, **options)


def test_no_input_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="input"):
        validate(generation_pb2.GenerateRequest(), TOKENIZER, LIMITS, (EOS,), 0.0)


def test_unset_fields_get_defaults() -> None:
    params = check([BOS] * 10).params
    assert (params.max_tokens, params.min_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (54, 0, 1.0, 0, 1.0, 0.0)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty, params.logprobs) == (0.0, 0.0, 1.0, -1)
    assert not params.ignore_eos and params.stop_token_ids == ()


def test_zero_stays_zero() -> None:
    params = check(temperature=0.0, seed=0, logprobs=0, top_k=0).params
    assert (params.temperature, params.seed, params.logprobs, params.top_k) == (0.0, 0, 0, 0)


def test_seed_is_drawn_when_unset() -> None:
    seeds = {check().params.seed for _ in range(50)}
    assert len(seeds) == 50 and max(seeds) >= 2**40


@pytest.mark.parametrize(("num_prompt", "asked", "got"), [(60, 10, 4), (60, 4, 4), (60, 3, 3), (63, 9, 1), (1, 10**15, 63)])
def test_max_tokens_ends_at_the_longest_sequence(num_prompt: int, asked: int, got: int) -> None:
    """B25."""
    assert check([BOS] * num_prompt, max_tokens=asked).params.max_tokens == got


def test_end_ids() -> None:
    stop = ids_of("Z")
    assert check(stop_token_ids=stop).end_ids == {EOS, *stop}
    assert check(stop_token_ids=stop, ignore_eos=True).end_ids == set(stop)


def test_ids_never_repeat() -> None:
    """B43, with 2,000 instead of 10^5 ids: they are 128 random bits."""
    ids = {check([BOS], client_request_id="x").request_id for _ in range(2000)}
    assert len(ids) == 2000 and all(len(request_id) == 32 for request_id in ids)


def test_digests_carry_the_tenants_salt() -> None:
    prompt = [BOS, *[7] * 62]
    limits = Limits(200, VOCAB)
    long = [*prompt, 5, 6]
    mine = validate(request_of(long, tenant="t"), TOKENIZER, limits, (EOS,), 0.0)
    assert mine.digests == page_digests(long, b"t") and len(mine.digests) == 1
    assert mine.digests != validate(request_of(long), TOKENIZER, limits, (EOS,), 0.0).digests


def test_sampling_reaches_the_pools_whole() -> None:
    """B37."""
    fields = {"max_tokens": 9, "min_tokens": 3, "temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "frequency_penalty": 0.5,
              "presence_penalty": -0.5, "repetition_penalty": 1.5, "seed": 2**64 - 1, "logprobs": 2, "ignore_eos": True}
    message = sampling_message(check(**fields, stop_token_ids=[4]).params)
    assert {name: getattr(message, name) for name in fields} == fields and list(message.stop_token_ids) == [4]
