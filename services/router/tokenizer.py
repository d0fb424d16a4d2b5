"""The model's tokenizer as the router needs it: text to ids, and the bytes of every id.

Control tokens (BOS, "<｜User｜>", "<think>" ...) come from token ids or from the chat template only: what a client writes as text is
split as plain text, whatever it spells.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from services.router.chat import ChatTemplate, Rendered, load_chat_template, read_json_object, token_text
from services.runtime.errors import Amount, CheckpointError, InvalidRequest


class Tokenizer:
    """A byte-level BPE tokenizer (`tokenizer.json`); thread-safe."""

    def __init__(self, inner: tokenizers.Tokenizer, bos_token_id: int, *, adds_bos: bool = True) -> None:
        """`adds_bos`: whether text begins with BOS. Raises CheckpointError for a tokenizer that is not byte-level: its tokens are
        not plain bytes."""
        spec: dict[str, Any] = json.loads(inner.to_str())
        if not _is_byte_level(spec.get("decoder")):
            raise CheckpointError("tokenizer.json: its decoder is not ByteLevel but only byte-level BPE tokenizers are supported")
        self._bos_token_id = bos_token_id
        self._adds_bos = adds_bos
        added: list[dict[str, Any]] = spec.get("added_tokens") or []
        special = {token["id"] for token in added if token.get("special")}
        self.token_bytes: Sequence[bytes] = _byte_table(inner.get_vocab(with_added_tokens=True), special)
        self._longest = max(1, *map(len, self.token_bytes), *(len(token["content"]) for token in added))
        controls = [token for token in added if _is_control(token)]
        self._control_ids: dict[str, int] = {token["content"]: token["id"] for token in controls}
        self._control_pattern = _pattern(controls)
        self._plain = _plain_tokenizer(spec, self._control_ids)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return len(self.token_bytes)

    @property
    def control_ids(self) -> dict[str, int]:
        """The control tokens: text to id."""
        return self._control_ids

    def max_characters(self, max_tokens: int) -> int:
        """No text longer than this fits `max_tokens`, however it splits."""
        return self._longest * max(max_tokens, 1)

    def encode(self, text: str, max_tokens: int) -> list[int]:
        """Ids of a client's text, none of them a control token, after exactly one BOS (if the model's tokenizer puts one).

        Text that cannot fit `max_tokens` however it splits is refused before the work of splitting it. Raises InvalidRequest.
        """
        longest = self.max_characters(max_tokens)
        if len(text) > longest:
            limit = f"max_model_len {max_tokens} tokens hold at most {longest} characters"
            raise InvalidRequest("text", Amount(len(text), "characters"), limit)
        return self._with_bos(self._split(text))

    def encode_chat(self, rendered: Rendered) -> list[int]:
        """Ids of a rendered chat: its control tokens, and what stands between two of them as one plain text each. Exactly one BOS,
        the template's own or the tokenizer's. Raises InvalidRequest."""
        ids: list[int] = []
        start = 0
        for found in self._control_pattern.finditer(rendered.text) if self._control_pattern else ():
            ids += self._split(rendered.marks.clear(rendered.text[start:found.start()]))
            ids.append(self._control_ids[found[found.lastindex or 0]])
            start = found.end()
        return self._with_bos(ids + self._split(rendered.marks.clear(rendered.text[start:])))

    def _split(self, text: str) -> list[int]:
        try:
            return self._plain.encode(text, add_special_tokens=False).ids if text else []
        except Exception as error:  # the library raises bare Exception
            raise InvalidRequest("text", text[:40], f"the tokenizer cannot split it: {error}") from None

    def _with_bos(self, ids: list[int]) -> list[int]:
        return ids if not self._adds_bos or ids[:1] == [self._bos_token_id] else [self._bos_token_id, *ids]


def load_tokenizer(folder: Path, bos_token_id: int) -> Tokenizer:
    """Read `folder/tokenizer.json`; raises CheckpointError in one sentence."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        reason = "the router needs the model's tokenizer there"
        if (folder / "tiktoken.model").is_file():
            reason = "only tokenizer.json is supported: convert tiktoken.model to it"
        raise CheckpointError(f"{path} does not exist; {reason}")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from None
    return Tokenizer(inner, bos_token_id, adds_bos=_adds_bos(folder, inner, bos_token_id))


def load_template(folder: Path, tokenizer: Tokenizer, bos_token_id: int, eos_token_ids: Sequence[int]) -> ChatTemplate | None:
    """The folder's chat template for `tokenizer`; None when it has none. Raises CheckpointError."""
    names = {token_id: text for text, token_id in tokenizer.control_ids.items()}
    ids = {"bos_token": bos_token_id, "eos_token": eos_token_ids[0] if eos_token_ids else -1}
    return load_chat_template(folder, list(tokenizer.control_ids), lambda key: names.get(ids[key]))


def _adds_bos(folder: Path, inner: tokenizers.Tokenizer, bos_token_id: int) -> bool:
    """tokenizer_config.json's `add_bos_token`, else what tokenizer.json's post-processor does; a folder without the former: yes.

    Raises CheckpointError when its `bos_token` is another one than the model's: prompts would get both."""
    path = folder / "tokenizer_config.json"
    settings = read_json_object(path)
    said = settings.get("add_bos_token")
    adds_bos = said if isinstance(said, bool) else inner.encode("", add_special_tokens=True).ids[:1] == [bos_token_id] or not path.is_file()
    bos = token_text(settings.get("bos_token"))
    if adds_bos and bos is not None and inner.token_to_id(bos) != bos_token_id:
        found = f"bos_token {bos!r} has the id {inner.token_to_id(bos)} but config.json's bos_token_id is {bos_token_id}"
        raise CheckpointError(f"{path}: {found}; take both from one checkpoint")
    return adds_bos


def _is_control(token: dict[str, Any]) -> bool:
    """Whether an added token is a control token. DeepSeek's "<｜User｜>" and "<think>" are not marked special; its single letters
    ("ø") and words that are missing in the vocabulary are text."""
    content: str = token["content"]
    return bool(token.get("special")) or (len(content) > 1 and not all(c.isalnum() or c.isspace() for c in content))


def _pattern(controls: Sequence[dict[str, Any]]) -> re.Pattern[str] | None:
    """Finds control tokens as the library does: leftmost, of those the longest, with the space that a token takes at its sides."""
    alternatives: list[str] = []
    for token in sorted(controls, key=lambda token: -len(token["content"])):
        word = f"({re.escape(token['content'])})"
        if token.get("single_word"):
            word = rf"(?<!\w){word}(?!\w)"
        before, after = (r"\s*" if token.get(side) else "" for side in ("lstrip", "rstrip"))
        alternatives.append(before + word + after)
    return re.compile("|".join(alternatives)) if alternatives else None


def _plain_tokenizer(spec: dict[str, Any], control_ids: dict[str, int]) -> tokenizers.Tokenizer:
    """The same tokenizer, blind to control tokens. Raises CheckpointError when one comes out of plain text even so."""
    added = [token | {"special": token["content"] in control_ids} for token in spec.get("added_tokens") or []]
    plain = tokenizers.Tokenizer.from_str(json.dumps(spec | {"added_tokens": added, "post_processor": None}))
    plain.encode_special_tokens = True
    ids = set(control_ids.values())
    for content in control_ids:
        if not ids.isdisjoint(plain.encode(content, add_special_tokens=False).ids):
            raise CheckpointError(f"tokenizer.json: the control token {content!r} is also an ordinary token, so text could spell it")
    return plain


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
