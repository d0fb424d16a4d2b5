"""Tokens to text: joined deltas equal the whole decode, cut at the first stop string."""

import functools
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.text import Detokenizer, TextStream
from services.router.tokenizer import Tokenizer, load_tokenizer
from services.runtime.errors import CheckpointError, InvalidRequest
from tests.router.byte_model import BOS, EOS, byte_tokenizer, ids_of

DEMO = Path(__file__).parents[2] / "deploy" / "demo_model"


def deltas(pieces: list[bytes], stops: list[str], include: bool = False) -> tuple[list[str], str]:
    """Deltas of tokens with these bytes, the last one from the flush; and the stop string found."""
    stream = TextStream(pieces, stops, include)
    found: list[str] = []
    for token_id in range(len(pieces)):
        found.append(stream.feed(token_id))
        if stream.matched:
            break
    return [*found, stream.flush()], stream.matched


def whole(text: str, stops: list[str]) -> str:
    """`text` up to the stop string that is complete first; of those that end together the longest."""
    ends = [(text.index(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    return text if not ends else text[: min(ends)[0] + min(ends)[1]]


@pytest.mark.parametrize(("texts", "shown", "matched"), [
    (["DEF", "G", "HI", "J"], ["", "", "", "", ""], "DEFGHIJ"),
    (["DEF", "X"], ["", "DEFX", ""], ""),
    (["DEF"], ["", "DEF"], ""),
    (["aDE", "DEFGHIJ"], ["a", "DE", ""], "DEFGHIJ"),
    (["abc", "d"], ["abc", "d", ""], ""),
])
def test_stop_across_tokens(texts: list[str], shown: list[str], matched: str) -> None:
    """B33."""
    assert deltas([text.encode() for text in texts], ["DEFGHIJ"]) == (shown, matched)


def test_stop_string_can_be_included() -> None:
    assert deltas([b"ab", b"cd", b"e"], ["bc"], include=True) == (["a", "bc", ""], "bc")


def test_character_split_across_tokens() -> None:
    """B34."""
    table = [b"\xf0\x9f", b"\x98\x80", b"A"]
    assert deltas(table, [])[0] == ["", "😀", "A", ""]
    assert deltas(table[:1], [])[0] == ["", "\ufffd"]
    assert "".join(deltas([b"\xc4", b"\x20"], [])[0]) == "\ufffd "
    assert deltas([b"x\xc3", b"\xa9y"], ["é"]) == (["x", "", ""], "é")


@given(st.lists(st.binary(max_size=5), max_size=20))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_random_bytes_equal_the_whole_decode(pieces: list[bytes]) -> None:
    stream = Detokenizer(pieces)
    text = "".join(stream.feed(i) for i in range(len(pieces))) + stream.flush()
    assert text == b"".join(pieces).decode(errors="replace")


@given(st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=4), st.data())
@settings(max_examples=500, deadline=None, derandomize=True)
def test_any_chunking_equals_the_whole(text: str, stops: list[str], data: st.DataObject) -> None:
    """B33: 500 random texts, stop sets and chunkings."""
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    shown, matched = deltas(pieces, stops)
    assert "".join(shown) == whole(text, stops)
    assert bool(matched) == any(stop in text for stop in stops)


@given(st.text("abc", max_size=12), st.text("abcd", min_size=1, max_size=6))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_only_what_begins_a_stop_is_held_back(text: str, stop: str) -> None:
    stream = TextStream([text.encode()], [stop])
    shown = stream.feed(0)
    if stop not in text:
        held = next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if n == 0 or text.endswith(stop[:n]))
        assert shown == text[: len(text) - held]


def test_table_of_a_byte_level_tokenizer() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), BOS)
    assert tokenizer.vocab_size == 258 and tokenizer.token_bytes[BOS] == tokenizer.token_bytes[EOS] == b""
    assert [tokenizer.token_bytes[2 + byte] for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert Detokenizer(tokenizer.token_bytes).feed(1_000_000) == ""  # ids that pad the vocabulary show nothing


def test_text_gets_exactly_one_bos() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), BOS)
    assert tokenizer.encode("hé", 100) == [BOS, 2 + 0x68, 2 + 0xC3, 2 + 0xA9]
    assert tokenizer.encode("<bos>h", 100) == [BOS, *ids_of("<bos>h")]  # what a client writes is text


def test_text_that_cannot_fit_is_not_split() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), BOS)
    with pytest.raises(InvalidRequest, match=r"1000000.*10 tokens"):
        tokenizer.encode("x" * 1_000_000, 10)


def test_tokenizer_that_is_not_byte_level_is_refused() -> None:
    inner = byte_tokenizer()
    inner.decoder = tokenizers.decoders.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(CheckpointError, match="ByteLevel"):
        Tokenizer(inner, BOS)


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path, BOS)


@given(st.lists(st.integers(0, 4095), max_size=60))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_demo_tokenizer_equals_its_library(ids: list[int]) -> None:
    tokenizer, library = _demo()
    ids = [i for i in ids if i < tokenizer.vocab_size]
    stream = Detokenizer(tokenizer.token_bytes)
    text = "".join(stream.feed(i) for i in ids) + stream.flush()
    assert text == library.decode(ids, skip_special_tokens=True)


@functools.cache
def _demo() -> tuple[Tokenizer, tokenizers.Tokenizer]:
    return load_tokenizer(DEMO, 0), tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
