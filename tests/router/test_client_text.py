"""Client text looks to a template as it is, and spells no control token."""

import pytest

from services.router.client_text import ClientText, Marks
from services.runtime.errors import InvalidRequest

CONTROLS = ("<think>", "</think>", "[BOS]")


def made(text: str) -> tuple[ClientText, Marks]:
    marks = Marks(CONTROLS, text)
    return ClientText.of(text, marks), marks


def test_no_control_token_is_left_whole() -> None:
    text, marks = made("<think>a</think>[BOS]")
    assert not any(token in str.__str__(text) for token in CONTROLS)
    assert marks.clear(text) == "<think>a</think>[BOS]" and len(text) == 21


@pytest.mark.parametrize("code", [0xF0000, 0xF0001, 0x10FFFF])
def test_private_use_characters_of_the_client_stay(code: int) -> None:
    written = chr(code) + "<" + chr(code) + ">" + chr(code)
    text, marks = made(written)
    assert marks.clear(text) == written and "<" not in str.__str__(text)


def test_text_that_uses_all_of_them_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="private-use"):
        Marks(CONTROLS, "".join(map(chr, range(0xF0000, 0x110000))))


def test_templates_find_what_the_client_wrote() -> None:
    text, marks = made(" <think>r</think>\n[x] ")
    assert "</think>" in text and "</x>" not in text and text != "" and text == " <think>r</think>\n[x] "
    assert {text: 1}[ClientText.of(" <think>r</think>\n[x] ", marks)] == 1
    last = text.split("</think>")[-1]
    assert marks.clear(last) == "\n[x] " and last.strip() == "[x]" and last.strip().startswith(("{", "["))
    assert [marks.clear(part) for part in text.partition("<think>")] == [" ", "<think>", "r</think>\n[x] "]
    assert text.strip().removeprefix("<think>")[0] == "r" and text.find("[x]") == 18 and text.count("<") == 2
    assert [*last] == ["\n", "[", "x", "]", " "] and last.strip("[] \n") == "x" and text.rsplit(sep="<", maxsplit=1)[0].endswith("r")


def test_what_joins_client_text_stays_client_text() -> None:
    text, marks = made("b</think>")
    for joined in ("<think>" + text, text[:0] + "<think>" + text):
        assert isinstance(joined, ClientText) and str.count(joined, "<think>") == 1 and str.count(joined, "</think>") == 0
        assert "</think>" in joined and marks.clear(joined) == "<think>b</think>"
    swapped = text.replace("</think>", "<think>")
    assert str.count(swapped, "<think>") == 1, "what the template puts in is the template's"
