"""Typed access to the keys of a `config.json`: each reader returns a checked value or raises one clear sentence."""

import math
from typing import TypeVar, cast

from services.runtime.errors import CheckpointError

T = TypeVar("T")

# Bounds far beyond any model: what lies outside is a damaged file, and would end in overflow or in names without end.
_MAX_INTEGER = 1 << 24
_MAX_NUMBER = 1e6

_ALIASES = {"num_nextn_predict_layers": "num_mtp_layers"}  # transformers 5 may write the right-hand name


class Fields:
    """A decoded JSON object and where it came from."""

    def __init__(self, raw: dict[str, object], source: str, prefix: str = "") -> None:
        self._raw, self._source, self._prefix = raw, source, prefix

    def get(self, key: str) -> object:
        """The raw value under `key` or its newer spelling; None when absent, as JSON's null."""
        value = self._raw.get(key)
        return self._raw.get(_ALIASES[key]) if value is None and key in _ALIASES else value

    def error(self, key: str, limit: str) -> CheckpointError:
        """`source: key is value but limit`, to be raised by the caller."""
        name = self._prefix + key
        if self.get(key) is None:
            return CheckpointError(f"{self._source}: {name} is missing but {limit}")
        return CheckpointError(f"{self._source}: {name} is {self.get(key)!r} but {limit}")

    def section(self, key: str) -> "Fields | None":
        """The object under `key`, None when absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "it must be an object")
        return Fields(cast("dict[str, object]", value), self._source, f"{self._prefix}{key}.")

    def choice(self, key: str, supported: tuple[T, ...], *, required: bool = False) -> T:
        """One of the `supported` values; the first when absent, unless `required`."""
        value = self.get(key)
        if value is None and not required:
            return supported[0]
        for candidate in supported:
            if value == candidate and type(value) is type(candidate):
                return candidate
        words = " and ".join(repr(candidate) for candidate in supported)
        raise self.error(key, f"only {words} {'is' if len(supported) == 1 else 'are'} supported")

    def require_only(self, key: str, supported: object) -> None:
        """Refuse every value of `key` other than `supported`, which an absent key means."""
        self.choice(key, (supported,))

    def integer(self, key: str, *, minimum: int = 1, maximum: int = _MAX_INTEGER, default: int | None = None) -> int:
        """A whole number of at least `minimum` and at most `maximum`."""
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.error(key, f"it must be a whole number of at least {minimum} and at most {maximum}")
        return value

    def optional_integer(self, key: str) -> int | None:
        """A whole number of at least 1; null and absent are None."""
        return None if self.get(key) is None else self.integer(key)

    def number(
        self, key: str, *, minimum: float = 0.0, maximum: float = _MAX_NUMBER, exclusive: bool = True, default: float | None = None
    ) -> float:
        """A number above (or, not `exclusive`, at) `minimum` and at most `maximum`."""
        value = default if self.get(key) is None else self.get(key)
        word = "above" if exclusive else "at least"
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.error(key, f"it must be a number {word} {minimum:g}")
        if value < minimum or (exclusive and value == minimum):
            raise self.error(key, f"it must be {word} {minimum:g}")
        if value > maximum:
            raise self.error(key, f"it must be at most {maximum:g}")
        return float(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        """true or false."""
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, bool):
            raise self.error(key, "it must be true or false")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One token id or a list of at least one, all of the vocabulary."""
        value = self.get(key)
        items = cast("list[object]", value) if isinstance(value, list) else [value]
        ids = tuple(item for item in items if isinstance(item, int) and not isinstance(item, bool) and item >= 0)
        if not ids or len(ids) != len(items):
            raise self.error(key, "it must be a token id or a list of token ids")
        if max(ids) >= vocab_size:
            raise self.error(key, f"ids end at vocab_size - 1 ({vocab_size - 1})")
        return ids


def read_yarn(fields: Fields) -> tuple[float, tuple[float, int, float, float, float, float] | None]:
    """rope_theta, and YarnConfig's values in its order (None without scaling).

    Published V3 configs have `rope_theta` and `rope_scaling`; transformers 5 writes both into `rope_parameters`.
    """
    newer = fields.section("rope_parameters")
    scaling = newer or fields.section("rope_scaling")
    holder = newer if newer is not None and newer.get("rope_theta") is not None else fields
    theta = holder.number("rope_theta", minimum=1.0, maximum=1e12, default=10000.0)
    if scaling is None:
        return theta, None
    type_key = "rope_type" if scaling.get("rope_type") is not None else "type"
    kind = scaling.get(type_key)
    if kind == "default" or (kind is None and newer is not None):
        return theta, None
    if kind != "yarn":
        raise scaling.error(type_key, "only 'yarn' and no scaling at all are supported")
    if scaling.get("attention_factor") is not None:
        raise scaling.error("attention_factor", "the factor comes from mscale and mscale_all_dim only; remove this key")
    if scaling.get("truncate") is False:
        raise scaling.error("truncate", "only true is supported")
    values = (
        scaling.number("factor", minimum=1.0, exclusive=False),
        scaling.integer("original_max_position_embeddings"),
        scaling.number("beta_fast", default=32.0),
        scaling.number("beta_slow", default=1.0),
        scaling.number("mscale", exclusive=False, default=1.0),
        scaling.number("mscale_all_dim", exclusive=False, default=0.0),
    )
    if values[2] < values[3]:  # equal in Kimi K2: a ramp over a single pair
        raise scaling.error("beta_fast", f"it must be at least beta_slow ({values[3]:g})")
    return theta, values


def read_block_size(fields: Fields) -> tuple[int, int] | None:
    """`weight_block_size` of FP8 block quantisation; None when the weights are not quantised."""
    section = fields.section("quantization_config")
    if section is None:
        return None
    section.choice("quant_method", ("fp8",), required=True)
    section.require_only("fmt", "e4m3")
    section.require_only("activation_scheme", "dynamic")
    section.choice("scale_fmt", ("float32", "ue8m0"))  # V3.1: powers of two, stored as fp32 all the same
    section.choice("weight_block_size", ([128, 128],), required=True)
    return (128, 128)
