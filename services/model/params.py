"""What a request may ask of the sampler: one typed record from the router to both pools, unchanged on the way."""

import math
from collections.abc import Sequence

import msgspec

from services.runtime.errors import Amount, InvalidRequest

SAMPLER_VERSION = 1  # part of the KV fingerprint: raised when the same params and logits would give another token; 1 = first version

MIN_TEMPERATURE = 1e-3  # below it, other than 0, logits / temperature leaves fp32
MAX_STOP_IDS = 64
_GREEDY_BELOW = 1e-5
_INTEGERS: dict[str, tuple[int, int | None]] = {  # field -> least and most
    "max_tokens": (1, None), "min_tokens": (0, None), "top_k": (0, None), "seed": (0, 2**64 - 1), "logprobs": (-1, 20),
}
_NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0), "repetition_penalty": (0.0, 100.0),
}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling of one request; the router fills every field (the seed too), and `check_params` knows the ranges.

    A value at its default switches its rule off. `top_k` 0 = off; `logprobs` -1 = none, 0 = the chosen token only,
    k = the k best too (at most 20); `seed` is an unsigned 64-bit word; `temperature` 0 = the best token.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = -1

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken as it is; so small a temperature would overflow fp32 and choose the same."""
        return self.temperature < _GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens of the request change its logits."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Refuse what no sampler may see: the router asks for its clients, each pool for whoever calls it. Raises InvalidRequest."""
    for field, (least, most) in _INTEGERS.items():
        _check_integer(field, getattr(params, field), least, most)
    if params.min_tokens > params.max_tokens:
        raise InvalidRequest("min_tokens", params.min_tokens, f"it must not be above max_tokens {params.max_tokens}")
    for field, (low, high) in _NUMBERS.items():
        value: float = getattr(params, field)
        if not (math.isfinite(value) and low <= value <= high):
            raise InvalidRequest(field, value, f"it must be a number from {low:g} to {high:g}")
    if 0.0 < params.temperature < MIN_TEMPERATURE:
        raise InvalidRequest("temperature", params.temperature, f"it must be 0 (greedy) or at least {MIN_TEMPERATURE}")
    for field, value in (("top_p", params.top_p), ("repetition_penalty", params.repetition_penalty)):
        if value == 0.0:
            raise InvalidRequest(field, value, "it must be above 0")
    if len(params.stop_token_ids) > MAX_STOP_IDS:
        raise InvalidRequest("stop_token_ids", Amount(len(params.stop_token_ids), "ids"), f"at most {MAX_STOP_IDS} are allowed")
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest("stop_token_ids", token_id, f"token ids must be below vocab_size {vocab_size}")


def check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse a prompt with a token that the model does not have. Raises InvalidRequest naming the first such place of `field`."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        at = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        raise InvalidRequest(f"{field}[{at}]", ids[at], f"token ids must be below vocab_size {vocab_size}")


def _check_integer(field: str, value: int, least: int, most: int | None) -> None:
    if value < least:
        raise InvalidRequest(field, value, f"it must be at least {least}")
    if most is not None and value > most:
        raise InvalidRequest(field, value, f"it must be at most {most}")
