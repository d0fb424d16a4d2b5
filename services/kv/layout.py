"""What a page of KV is, byte for byte, and which ranks may exchange pages (no torch here: the router imports it).

A page holds PAGE_SIZE tokens of latent KV of all layers, contiguous: `[layer, token, width]`. `width` is made of named fields.

    layout = KvLayout(num_layers=61, kv_lora_rank=512, rope_dim=64, dtype="bfloat16")
    layout.width, layout.token_bytes, layout.page_bytes          576, 70272, 4497408
    mine = compatibility(dataclasses.asdict(config), revision, layout, sampler_version=SAMPLER_VERSION)
    mine.fingerprint                                             32 hex digits; equal fingerprints may exchange pages
    mine.difference(theirs)                                      "num_hidden_layers is 61 here and 27 there"
"""
import hashlib
import json
import sys
from collections.abc import Mapping
from typing import Literal

import msgspec

PAGE_SIZE = 64  # tokens

# 1: 512 latent values, then 64 rotated key values; [page, layer, token, width]; no MTP layer; no scales.
LAYOUT_VERSION = 1

KvDtype = Literal["float32", "bfloat16"]
_ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}


def num_pages_for(num_tokens: int) -> int:
    """Pages that hold the KV of `num_tokens` tokens."""
    return -(-num_tokens // PAGE_SIZE)


class KvField(msgspec.Struct, frozen=True):
    """A named range of `width`: values `[offset, offset + size)`."""

    name: str
    offset: int
    size: int


class KvLayout(msgspec.Struct, frozen=True):
    """The shape of a page; every size below is in bytes unless it says values."""

    num_layers: int
    kv_lora_rank: int
    rope_dim: int
    dtype: KvDtype

    @property
    def fields(self) -> tuple[KvField, ...]:
        """The fields of one token of one layer, in memory order."""
        return (KvField("latent", 0, self.kv_lora_rank), KvField("rope_key", self.kv_lora_rank, self.rope_dim))

    @property
    def width(self) -> int:
        """Values of one token of one layer."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers."""
        return self.num_layers * self.width * _ITEM_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: the unit of transfer."""
        return PAGE_SIZE * self.token_bytes


class Compatibility(msgspec.Struct, frozen=True):
    """All that two ranks must agree on before a page may pass, as printable values by name."""

    values: dict[str, str]

    @property
    def fingerprint(self) -> str:
        """blake2b-128 over the values, 32 hex digits."""
        text = json.dumps(self.values, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def difference(self, theirs: "Compatibility") -> str:
        """The first few values that differ, by name; empty when none does."""
        names = sorted(name for name in self.values.keys() | theirs.values.keys() if self.values.get(name) != theirs.values.get(name))
        shown = [f"{name} is {self.values.get(name, 'absent')} here and {theirs.values.get(name, 'absent')} there" for name in names[:3]]
        return "; ".join(shown) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")


def compatibility(
    model_config: Mapping[str, object],
    revision: str,
    layout: KvLayout,
    *,
    sampler_version: int,
    rope_pairing: str = "interleaved",
    num_mtp_layers: int = 0,
) -> Compatibility:
    """Collect what the fingerprint covers; `model_config` is the parsed config as plain values (`dataclasses.asdict`)."""
    values = {name: json.dumps(value, sort_keys=True) for name, value in model_config.items()}
    values |= {
        "revision": revision,
        "page.size": str(PAGE_SIZE),
        "page.layers": str(layout.num_layers),
        "page.fields": " ".join(f"{field.name}[{field.offset}:{field.offset + field.size}]" for field in layout.fields),
        "page.dtype": layout.dtype,
        "page.scales": "none",
        "page.byte_order": sys.byteorder,
        "page.version": str(LAYOUT_VERSION),
        "rope_pairing": rope_pairing,
        "num_mtp_layers": str(num_mtp_layers),
        "sampler_version": str(sampler_version),
    }
    return Compatibility(values)


def fingerprint(model_config: Mapping[str, object], revision: str, layout: KvLayout, *, sampler_version: int) -> str:
    """The fingerprint alone, for those who only compare."""
    return compatibility(model_config, revision, layout, sampler_version=sampler_version).fingerprint
