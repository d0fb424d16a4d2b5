"""Clients' text while a chat template works on it: the template reads and cuts it as it is, but nothing in it can become a control token.

Every character that begins or ends a control token ("<", ">", "[" ...) is written as another character, a stand-in that neither the
messages nor the template contain. So whatever control token stands in the rendered text was written by the template. Stand-ins are one
character for one, so lengths and cuts stay right, and the methods by which templates look into a message (`'</think>' in content`,
`content.split('</think>')`, `content == ''`) write what they look for in the same way, so that they find it.
"""

from collections.abc import Iterable, Iterator
from typing import Any, SupportsIndex, cast

from services.runtime.errors import Amount, InvalidRequest

_PRIVATE_USE = range(0xF0000, 0x110000)  # planes 15 and 16: no case, no whitespace, no meaning


class Marks:
    """The stand-ins of one request."""

    def __init__(self, controls: Iterable[str], taken: str) -> None:
        """`controls`: the control tokens as text; `taken`: everything that the rendered text is made of. Raises InvalidRequest."""
        used = set(taken)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        edges = sorted({edge for token in controls for edge in (token[0], token[-1])})
        try:
            self.end = next(free)  # where a continued message ends
            self._stand_in = {ord(edge): next(free) for edge in edges}
        except StopIteration:
            raise InvalidRequest("chat", Amount(len(taken), "characters"), "it must leave some private-use characters unused") from None
        self._original = {ord(stand_in): chr(edge) for edge, stand_in in self._stand_in.items()}

    def code(self, text: str) -> str:
        """`text` with stand-ins, as plain text."""
        return text.translate(self._stand_in)

    def clear(self, text: str) -> str:
        """Stand-ins back to what the client wrote."""
        return text.translate(self._original)


class ClientText(str):
    """A client's text with stand-ins. Whatever is cut out of it or joined to it is of this class too."""

    _marks: Marks

    @classmethod
    def of(cls, text: str, marks: Marks) -> "ClientText":
        """`text` is what the client wrote."""
        return cls._made(marks.code(text), marks)

    @classmethod
    def _made(cls, coded: str, marks: Marks) -> "ClientText":
        made = cls(coded)
        made._marks = marks
        return made

    def _wrap(self, result: Any) -> Any:
        if isinstance(result, str):
            return self._made(result, self._marks)
        if isinstance(result, list | tuple):
            parts = cast("list[Any] | tuple[Any, ...]", result)
            return type(parts)(self._wrap(part) for part in parts)
        return result

    def _code(self, argument: Any) -> Any:
        """What a template looks for, written as client text is."""
        if isinstance(argument, str):
            return argument if isinstance(argument, ClientText) else self._marks.code(argument)
        if isinstance(argument, tuple):
            return tuple(self._code(part) for part in cast("tuple[Any, ...]", argument))
        return argument

    def __str__(self) -> str:
        return self

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, self._code(other)) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __contains__(self, key: str) -> bool:
        return str.__contains__(self, self._code(key))

    def __iter__(self) -> Iterator[str]:
        return (self._wrap(character) for character in str.__iter__(self))

    def __getitem__(self, key: SupportsIndex | slice) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._wrap(str.__getitem__(self, key))

    def __add__(self, other: str) -> str:
        return self._wrap(str.__add__(self, other))

    def __radd__(self, other: str) -> str:
        return self._wrap(str.__add__(other, self))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What replaces is the template's own text: it stays as it is."""
        return self._wrap(str.replace(self, self._code(old), new, count))


def _looking(name: str) -> Any:
    """The method `name` of str, looking for its arguments as client text."""
    method = getattr(str, name)

    def looking(self: ClientText, *arguments: Any, **keywords: Any) -> Any:
        coded = [self._code(argument) for argument in arguments]  # pyright: ignore[reportPrivateUsage]
        return self._wrap(  # pyright: ignore[reportPrivateUsage]
            method(self, *coded, **{key: self._code(value) for key, value in keywords.items()})  # pyright: ignore[reportPrivateUsage]
        )

    looking.__name__ = name
    return looking


for _name in ("split", "rsplit", "partition", "rpartition", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "startswith",
              "endswith", "find", "rfind", "index", "rindex", "count", "lower", "upper", "title", "capitalize", "splitlines"):
    setattr(ClientText, _name, _looking(_name))
