"""The model's tokenizer as the router needs it: text to ids, and the bytes of every id."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from services.runtime.errors import CheckpointError, InvalidRequest


class Tokenizer:
    """A byte-level BPE tokenizer (`tokenizer.json`); thread-safe."""

    def __init__(self, inner: tokenizers.Tokenizer, bos_token_id: int) -> None:
        """Raises CheckpointError for a tokenizer that is not byte-level: its tokens are not plain bytes."""
        spec: dict[str, Any] = json.loads(inner.to_str())
        if not _is_byte_level(spec.get("decoder")):
            raise CheckpointError("tokenizer.json: its decoder is not ByteLevel but only byte-level BPE tokenizers are supported")
        self._inner = inner
        self._bos_token_id = bos_token_id
        special = {added["id"] for added in spec.get("added_tokens", ()) if added.get("special")}
        self.token_bytes: Sequence[bytes] = _byte_table(inner.get_vocab(with_added_tokens=True), special)
        self._longest = max(1, *map(len, self.token_bytes), *(len(added["content"]) for added in spec.get("added_tokens", ())))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return len(self.token_bytes)

    def encode(self, text: str, max_tokens: int) -> list[int]:
        """Ids of `text` after exactly one BOS.

        Text that cannot fit `max_tokens` however it splits is refused before the work of splitting it. Raises InvalidRequest.
        """
        longest = self._longest * max(max_tokens, 1)
        if len(text) > longest:
            limit = f"its {len(text)} characters cannot fit max_model_len {max_tokens} tokens (at most {longest} characters)"
            raise InvalidRequest("text", f"{text[:20]}...", limit)
        try:
            ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises bare Exception
            raise InvalidRequest("text", text[:40], f"the tokenizer cannot split it: {error}") from None
        return ids if ids[:1] == [self._bos_token_id] else [self._bos_token_id, *ids]


def load_tokenizer(folder: Path, bos_token_id: int) -> Tokenizer:
    """Read `folder/tokenizer.json`; raises CheckpointError in one sentence."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; the router needs the model's tokenizer there")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from None
    return Tokenizer(inner, bos_token_id)


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    parts: list[dict[str, Any]] = decoder.get("decoders", []) if decoder["type"] == "Sequence" else [decoder]
    return any(part["type"] == "ByteLevel" for part in parts)


def _byte_table(vocab: dict[str, int], special: set[int]) -> list[bytes]:
    """Bytes of each id. Special tokens, and ids that no token has (padding of the vocabulary), show nothing."""
    characters = _byte_of_character()
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        if token_id in special:
            continue
        try:
            table[token_id] = bytes(characters[character] for character in token)
        except KeyError:  # an added token written as plain text
            table[token_id] = token.encode()
    return table


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in table]
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}
