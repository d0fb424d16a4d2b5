"""What a request may ask of the sampler: one typed record from the router to both pools, unchanged on the way."""

import msgspec

SAMPLER_VERSION = 1  # part of the KV fingerprint: raised when the same params and logits would give another token; 1 = first version

MIN_TEMPERATURE = 1e-5


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling of one request; ranges are checked by the router, which fills every field (the seed too).

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
        return self.temperature < MIN_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens of the request change its logits."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0
