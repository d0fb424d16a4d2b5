"""Everything that can be wrong with a GenerateRequest is found here, before any pool is involved.

Rules worth knowing: `max_tokens` beyond the model's longest sequence is no error: the request stops with LENGTH there. Text and chats get
exactly one BOS, and nothing that a client writes in them becomes a control token; token ids are taken as they are. An optional field that
is unset gets its default, one that is zero is zero.
"""

import secrets
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from proto.baton.v1 import generation_pb2
from services.kv.hash import page_digests
from services.model.params import SamplingParams, check_params, check_token_ids
from services.router.chat import ChatTemplate, Message
from services.router.tokenizer import Tokenizer
from services.runtime.errors import Amount, InvalidRequest

MAX_CHOICES = 16  # of one request: each takes a place at a decode rank
MAX_PRIORITY = 9
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_NAME_CHARACTERS = 256


class Limits(NamedTuple):
    """What the pools take."""

    max_model_len: int  # tokens of prompt and output together
    vocab_size: int


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request with nothing left open. Times are a monotonic clock's seconds."""

    request_id: str  # drawn here: a client's own id is never identity
    client_request_id: str
    prompt_ids: list[int]
    digests: list[bytes]  # of the prompt's pages, services/kv/hash.py
    salt: bytes
    tenant: str
    priority: int  # 0 first
    params: SamplingParams
    n: int  # choices
    end_ids: frozenset[int]  # EOS ids and stop token ids that end it
    stops: tuple[str, ...]
    include_stop_str: bool
    received_at: float


def validate(
    message: generation_pb2.GenerateRequest, tokenizer: Tokenizer, limits: Limits, eos_token_ids: Sequence[int], received_at: float,
    template: ChatTemplate | None = None,
) -> Request:
    """Check `message` completely; CPU-bound (tokenising, hashing), so call it off the event loop. Without `template` chats are
    refused. Raises InvalidRequest."""
    _check_supported(message)
    prompt_ids = _prompt(message, tokenizer, limits, template)
    params = _sampling(message, limits, room=limits.max_model_len - len(prompt_ids))
    salt = message.tenant.encode()
    return Request(
        request_id=uuid.uuid4().hex,
        client_request_id=message.client_request_id,
        prompt_ids=prompt_ids,
        digests=page_digests(prompt_ids, salt),
        salt=salt,
        tenant=message.tenant,
        priority=message.priority,
        params=params,
        n=message.n if message.HasField("n") else 1,
        end_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids)),
        stops=_stops(message),
        include_stop_str=message.include_stop_str,
        received_at=received_at,
    )


def _check_supported(message: generation_pb2.GenerateRequest) -> None:
    if message.HasField("n") and not 1 <= message.n <= MAX_CHOICES:
        raise InvalidRequest("n", message.n, f"a request has 1 to {MAX_CHOICES} choices")
    if message.priority > MAX_PRIORITY:
        raise InvalidRequest("priority", message.priority, f"it is 0 (ordinary) to {MAX_PRIORITY} (last)")
    for field in ("client_request_id", "tenant"):
        value: str = getattr(message, field)
        if len(value) > MAX_NAME_CHARACTERS:
            raise InvalidRequest(field, f"{value[:20]}...", f"its {len(value)} characters are more than {MAX_NAME_CHARACTERS}")


def _prompt(
    message: generation_pb2.GenerateRequest, tokenizer: Tokenizer, limits: Limits, template: ChatTemplate | None
) -> list[int]:
    """Token ids of the input, at least one, leaving room for one more."""
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("input", None, "one of text, chat and token_ids must be given")
    if kind == "chat":
        ids = _chat(message.chat, tokenizer, limits, template)
    elif kind == "text":
        if not message.text:
            raise InvalidRequest("text", "", "the prompt must not be empty; token_ids with the BOS alone starts from nothing")
        ids = tokenizer.encode(message.text, limits.max_model_len)
    else:
        ids = list(message.token_ids.ids)
    if not ids:
        raise InvalidRequest(kind, ids, "the prompt must not be empty")
    if len(ids) + 1 > limits.max_model_len:
        raise InvalidRequest(kind, Amount(len(ids), "tokens"), f"prompt and one output token must fit max_model_len {limits.max_model_len}")
    check_token_ids(kind, ids, limits.vocab_size)
    return ids


def _chat(chat: generation_pb2.Chat, tokenizer: Tokenizer, limits: Limits, template: ChatTemplate | None) -> list[int]:
    """Token ids of the conversation as the model's template writes it."""
    if template is None:
        count = f"{len(chat.messages)} messages"
        raise InvalidRequest("chat", count, "this model's folder has no chat template; send text or token_ids")
    rendered = template.render(
        [Message(message.role, message.content) for message in chat.messages],
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
        thinking=chat.thinking if chat.HasField("thinking") else None,
        max_characters=tokenizer.max_characters(limits.max_model_len),
    )
    return tokenizer.encode_chat(rendered)


def _sampling(message: generation_pb2.GenerateRequest, limits: Limits, room: int) -> SamplingParams:
    """Every field filled in, checked as the client said it, then cut to what fits; `room` = output tokens up to max_model_len."""
    def given(field: str, default: Any) -> Any:
        return getattr(message, field) if message.HasField(field) else default

    if message.HasField("logprobs") and message.logprobs < 0:  # -1 is our own word for none
        raise InvalidRequest("logprobs", message.logprobs, "it must be at least 0")
    max_tokens, min_tokens = given("max_tokens", room), given("min_tokens", 0)
    asked = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens if message.HasField("max_tokens") else min(min_tokens, room),
        temperature=given("temperature", 1.0),
        top_k=given("top_k", 0),
        top_p=given("top_p", 1.0),
        min_p=given("min_p", 0.0),
        frequency_penalty=given("frequency_penalty", 0.0),
        presence_penalty=given("presence_penalty", 0.0),
        repetition_penalty=given("repetition_penalty", 1.0),
        stop_token_ids=tuple(dict.fromkeys(message.stop_token_ids)),
        ignore_eos=message.ignore_eos,
        seed=message.seed if message.HasField("seed") else secrets.randbits(64),
        logprobs=given("logprobs", -1),
    )
    check_params(asked, limits.vocab_size)
    return msgspec.structs.replace(
        asked, max_tokens=min(asked.max_tokens, room), min_tokens=min(asked.min_tokens, room), top_k=min(asked.top_k, limits.vocab_size)
    )


def _stops(message: generation_pb2.GenerateRequest) -> tuple[str, ...]:
    if len(message.stop) > MAX_STOPS:
        raise InvalidRequest("stop", Amount(len(message.stop), "strings"), f"at most {MAX_STOPS} are allowed")
    for stop in message.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest("stop", stop[:40], f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters, not {len(stop)}")
    return tuple(message.stop)
