"""Everything that can be wrong with a GenerateRequest is found here, before any pool is involved.

Rules worth knowing: `max_tokens` beyond the model's longest sequence is no error: the request stops with LENGTH there. Text and chats get
exactly one BOS, and nothing that a client writes in them becomes a control token; token ids are taken as they are. An optional field that
is unset gets its default, one that is zero is zero.
"""

import math
import secrets
import uuid
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from proto.baton.v1 import generation_pb2
from services.kv.hash import page_digests
from services.model.params import SamplingParams
from services.router.chat import ChatTemplate, Message
from services.router.tokenizer import Tokenizer
from services.runtime.errors import InvalidRequest

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_IDS = 64
MAX_LOGPROBS = 20
MAX_NAME_CHARACTERS = 256
MAX_TEMPERATURE = 100.0
MIN_TEMPERATURE = 1e-3  # below it, other than 0, logits / temperature leaves fp32


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
    params: SamplingParams
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
        params=params,
        end_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids)),
        stops=_stops(message),
        include_stop_str=message.include_stop_str,
        received_at=received_at,
    )


def _check_supported(message: generation_pb2.GenerateRequest) -> None:
    if message.HasField("n") and message.n != 1:
        raise InvalidRequest("n", message.n, "only 1 choice a request is supported yet")
    if message.priority:
        raise InvalidRequest("priority", message.priority, "only 0 is supported yet")
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
        raise InvalidRequest(kind, f"{len(ids)} tokens", f"prompt and one output token must fit max_model_len {limits.max_model_len}")
    if max(ids) >= limits.vocab_size:
        at = next(i for i, token_id in enumerate(ids) if token_id >= limits.vocab_size)
        raise InvalidRequest(f"{kind}[{at}]", ids[at], f"token ids must be below vocab_size {limits.vocab_size}")
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
    max_tokens = _integer(message, "max_tokens", room, 1)
    min_tokens = _integer(message, "min_tokens", 0, 0)
    if min_tokens > max_tokens and message.HasField("max_tokens"):
        raise InvalidRequest("min_tokens", min_tokens, f"it must not be above max_tokens {max_tokens}")
    temperature = _number(message, "temperature", 1.0, 0.0, MAX_TEMPERATURE)
    if 0.0 < temperature < MIN_TEMPERATURE:
        raise InvalidRequest("temperature", temperature, f"it must be 0 (greedy) or at least {MIN_TEMPERATURE}")
    top_p = _number(message, "top_p", 1.0, 0.0, 1.0)
    repetition_penalty = _number(message, "repetition_penalty", 1.0, 0.0, 100.0)
    for field, value in (("top_p", top_p), ("repetition_penalty", repetition_penalty)):
        if value == 0.0:
            raise InvalidRequest(field, value, "it must be above 0")
    return SamplingParams(
        max_tokens=min(max_tokens, room),
        min_tokens=min(min_tokens, max_tokens, room),
        temperature=temperature,
        top_k=min(_integer(message, "top_k", 0, 0), limits.vocab_size),
        top_p=top_p,
        min_p=_number(message, "min_p", 0.0, 0.0, 1.0),
        frequency_penalty=_number(message, "frequency_penalty", 0.0, -2.0, 2.0),
        presence_penalty=_number(message, "presence_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=repetition_penalty,
        stop_token_ids=_stop_token_ids(message, limits),
        ignore_eos=message.ignore_eos,
        seed=message.seed if message.HasField("seed") else secrets.randbits(64),
        logprobs=_integer(message, "logprobs", 0, 0, MAX_LOGPROBS) if message.HasField("logprobs") else -1,
    )


def _integer(message: generation_pb2.GenerateRequest, field: str, default: int, low: int, high: int | None = None) -> int:
    if not message.HasField(field):
        return default
    value: int = getattr(message, field)
    if value < low:
        raise InvalidRequest(field, value, f"it must be at least {low}")
    if high is not None and value > high:
        raise InvalidRequest(field, value, f"it must be at most {high}")
    return value


def _number(message: generation_pb2.GenerateRequest, field: str, default: float, low: float, high: float) -> float:
    if not message.HasField(field):
        return default
    value: float = getattr(message, field)
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(field, value, f"it must be a number from {low:g} to {high:g}")
    return value


def _stop_token_ids(message: generation_pb2.GenerateRequest, limits: Limits) -> tuple[int, ...]:
    ids = tuple(dict.fromkeys(message.stop_token_ids))
    if len(ids) > MAX_STOP_IDS:
        raise InvalidRequest("stop_token_ids", f"{len(ids)} ids", f"at most {MAX_STOP_IDS} are allowed")
    for token_id in ids:
        if token_id >= limits.vocab_size:
            raise InvalidRequest("stop_token_ids", token_id, f"token ids must be below vocab_size {limits.vocab_size}")
    return ids


def _stops(message: generation_pb2.GenerateRequest) -> tuple[str, ...]:
    if len(message.stop) > MAX_STOPS:
        raise InvalidRequest("stop", f"{len(message.stop)} strings", f"at most {MAX_STOPS} are allowed")
    for stop in message.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest("stop", stop[:40], f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters, not {len(stop)}")
    return tuple(message.stop)
