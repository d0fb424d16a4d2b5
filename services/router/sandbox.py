"""Jinja as chat templates expect it from Hugging Face, in a sandbox, and bounded: templates come with checkpoints.

A template can reach no Python internals (Jinja's immutable sandbox, and no names that begin with "_" in namespaces), runs for
`max_seconds` at most, and makes no value larger than `max_characters`, final text included. Filters and methods that build a
large value from a small one, and that no chat template needs, are not there.
"""

import json
import time
from collections.abc import Iterable, Sequence, Sized
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items", "last", "length", "list",
    "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum",
    "title", "trim", "truncate", "unique", "upper", "wordcount",
)
_REFUSED_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "encode", "translate"})
_MAX_INTEGER_BITS = 4096


class TemplateLimit(jinja2.TemplateError):
    """The template wanted more time or space than it may have."""


class _GenerationTag(Extension):
    """`{% generation %}` marks what was generated, for training: here its body only."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own type)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """A namespace whose attributes cannot be Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes: dict[str, Any] = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """One template's environment; not thread-safe: `restart` begins a rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters = {name: self.filters[name] for name in _FILTERS} | {"tojson": _tojson, "replace": self._replace, "join": self._join}
        self.globals = {"range": self.globals["range"], "dict": dict, "namespace": _SafeNamespace, "raise_exception": _raise_exception,
                        "strftime_now": lambda format: datetime.now().strftime(format)}
        self._end_at = 0.0
        self._max_size = 0

    def restart(self, max_seconds: float, max_characters: int) -> None:
        """Bounds of the rendering that follows; both are 0 until then."""
        self._end_at, self._max_size = time.monotonic() + max_seconds, max_characters

    def tick(self, *_: Any) -> str:
        """Called by every turn of a loop and every call of a macro. Raises TemplateLimit."""
        if time.monotonic() > self._end_at:
            raise TemplateLimit("it takes too long")
        return ""

    def check_size(self, size: int) -> None:
        """Raises TemplateLimit."""
        if size > self._max_size:
            raise TemplateLimit(f"it makes more than {self._max_size} characters")

    def concat(self, parts: Iterable[str]) -> str:
        """Jinja's way to make a block's text, and of `~` (see `_parse`)."""
        parts = list(parts)
        self.check_size(sum(map(len, parts)))
        return "".join(parts)

    def tilde(self, *parts: Any) -> str:
        """`a ~ b`."""
        return self.concat([str(part) for part in parts])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Jinja's own tree with the bounds put in."""
        template = super()._parse(source, name, filename)
        for block in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            block.body.insert(0, nodes.Output([tick]).set_lineno(block.lineno))
        return _TildeAsCall().visit(template)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and not (isinstance(obj, str) and attr in _REFUSED_METHODS)

    def wrap_str_format(self, value: Any) -> None:
        """Jinja's own `format` obeys any width; without it `is_safe_attribute` refuses the method."""

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.tick()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name == "replace":
            return self._replace(owner, *args)
        if isinstance(owner, str) and name == "join":
            return self._join(args[0], owner)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise SecurityError("text % value is not allowed in chat templates")
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_INTEGER_BITS:
                raise TemplateLimit("it makes too large a number")
        elif operator in ("+", "*"):
            self.check_size(_size_of(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def _replace(self, text: Any, old: Any, new: Any, count: int | None = -1) -> str:
        text, old, new = str(text), str(old), str(new)
        self.check_size(len(text) + text.count(old) * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _join(self, values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        parts = [str(value if attribute is None else self.getitem(value, attribute)) for value in values]
        self.check_size(sum(map(len, parts)) + len(parts) * len(d))
        return str(d).join(parts)


class _TildeAsCall(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("tilde"), node.nodes, [], None, None).set_lineno(node.lineno)


def _size_of(operator: str, left: Any, right: Any) -> int:
    """Elements of `left + right` or `left * right` where they are sequences."""
    if operator == "+":
        return len(left) + len(right) if isinstance(left, Sized) and isinstance(right, Sized) else 0
    sequence, times = (left, right) if isinstance(left, Sequence) else (right, left)
    return len(sequence) * times if isinstance(sequence, Sequence) and isinstance(times, int) else 0


def _check_name(name: str) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"namespace attribute {name!r} begins with an underscore")


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
            sort_keys: bool = False) -> str:
    if indent is not None and indent > 16:
        raise TemplateLimit("it indents JSON by more than 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
