"""A model folder's chat template: messages become the prompt's text, in which only the template wrote control tokens.

What a template is given is what Hugging Face gives it: `messages`, `add_generation_prompt`, `tools` and `documents` (none), every
`*_token` of tokenizer_config.json, and `thinking` when the client set it (DeepSeek-V3.1's switch).
"""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jinja2
import jinja2.meta

from services.router.client_text import ClientText, Marks
from services.router.sandbox import BoundedEnvironment
from services.runtime.errors import Amount, CheckpointError, InvalidRequest

ROLES = ("system", "user", "assistant", "tool")
MAX_MESSAGES = 4096
MAX_RENDER_S = 2.0
_MAX_TEMPLATE_CHARACTERS = 1 << 20
_PROBES: dict[str, tuple[str, ...]] = {
    "user": ("user",), "system": ("system", "user"), "assistant": ("user", "assistant", "user"), "tool": ("user", "assistant", "tool"),
}
"""A conversation in which each role is at its place."""

_TEMPLATE_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


class Message(NamedTuple):
    """One message as the client sent it."""

    role: str
    content: str


class Rendered(NamedTuple):
    """The prompt's text with stand-ins, and what clears them."""

    text: str
    marks: Marks


class ChatTemplate:
    """One template; thread-safe."""

    def __init__(self, source: str, tokens: dict[str, str], controls: Sequence[str], where: str) -> None:
        """`tokens`: bos_token, eos_token and the like; `controls`: the tokenizer's control tokens; `where`: the file, for errors.

        Raises CheckpointError."""
        if len(source) > _MAX_TEMPLATE_CHARACTERS:
            raise CheckpointError(f"{where}: a chat template of {len(source)} characters is longer than {_MAX_TEMPLATE_CHARACTERS}")
        self._environment = BoundedEnvironment()
        self._lock = threading.Lock()
        self._tokens, self._controls = tokens, controls
        self._own_text = "".join([source, *tokens.values()])
        try:
            self._template = self._environment.from_string(source)
            self._has_thinking = "thinking" in jinja2.meta.find_undeclared_variables(self._environment.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(f"{where}: the chat template cannot be compiled: {error}") from None
        self.roles = self._find_roles()
        if "user" not in self.roles:
            raise CheckpointError(f"{where}: the chat template fails on a user's message or does not show it")

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, thinking: bool | None, max_characters: int,
        max_seconds: float = MAX_RENDER_S,
    ) -> Rendered:
        """The prompt. Without a generation prompt a final assistant message stays open, to be continued. Raises InvalidRequest."""
        self._check(messages, max_characters)
        if thinking is not None and not self._has_thinking:
            raise InvalidRequest("chat.thinking", thinking, "this model's chat template has no such switch")
        marks = Marks(self._controls, "".join([self._own_text, *(message.content for message in messages)]))
        contents: list[str] = [ClientText.of(message.content, marks) for message in messages]
        is_continued = not add_generation_prompt and messages[-1].role == "assistant"
        if is_continued:
            contents[-1] += marks.end + " "  # the space tells whether the template trims
        variables: dict[str, Any] = {} if thinking is None else {"thinking": thinking}
        variables |= {"messages": [{"role": m.role, "content": c} for m, c in zip(messages, contents, strict=True)],
                      "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        try:
            text = self._run(variables, max_characters, max_seconds)
        except _TEMPLATE_ERRORS as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequest("chat", Amount(len(messages), "messages"), f"the model's chat template refuses it: {reason}") from None
        return Rendered(_open_end(text, marks.end) if is_continued else text, marks)

    def _check(self, messages: Sequence[Message], max_characters: int) -> None:
        if not messages:
            raise InvalidRequest("chat.messages", [], "it must not be empty")
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest("chat.messages", Amount(len(messages), "messages"), f"at most {MAX_MESSAGES} are allowed")
        for i, message in enumerate(messages):
            if message.role not in self.roles:
                known = ", ".join(role for role in ROLES if role in self.roles)
                raise InvalidRequest(f"chat.messages[{i}].role", message.role[:40], f"this model's chat template takes {known}")
        size = sum(len(message.content) for message in messages)
        if size > max_characters:
            raise InvalidRequest("chat.messages", Amount(size, "characters"), f"at most {max_characters} fit the longest sequence")

    def _run(self, variables: dict[str, Any], max_characters: int, max_seconds: float) -> str:
        pieces: list[str] = []
        size = 0
        with self._lock:
            self._environment.restart(max_seconds, max_characters)
            for piece in self._template.generate(self._tokens | variables):
                pieces.append(piece)
                size += len(piece)
                self._environment.check_size(size)
        return "".join(pieces)

    def _find_roles(self) -> frozenset[str]:
        """Roles whose messages the template shows: one that it drops in silence, or raises on, is not taken from clients either."""

        def is_shown(role: str) -> bool:
            probe = [{"role": at, "content": f"probe{i}of{at}" } for i, at in enumerate(_PROBES[role])]
            variables: dict[str, Any] = {"messages": probe, "add_generation_prompt": True, "tools": None, "documents": None}
            try:
                text = self._run(variables, _MAX_TEMPLATE_CHARACTERS, MAX_RENDER_S)
            except _TEMPLATE_ERRORS:
                return False
            return all(message["content"] in text for message in probe)

        return frozenset(role for role in ROLES if is_shown(role))


def _open_end(text: str, end: str) -> str:
    """`text` up to where the continued message ends."""
    head, found, tail = text.rpartition(end)
    if not found:
        limit = "the model's chat template does not show its end, so it cannot be continued"
        raise InvalidRequest("chat.messages", "a final assistant message", limit)
    return head if tail.startswith(" ") else head.rstrip()


def load_chat_template(
    folder: Path, controls: Sequence[str], token_of: Callable[[str], str | None]
) -> ChatTemplate | None:
    """The folder's template, None when it has none; `token_of("bos_token")`: the token's text where tokenizer_config.json is silent.

    Raises CheckpointError.
    """
    settings = read_json_object(folder / "tokenizer_config.json")
    found = [(str(folder / name), source) for name, source in _sources(folder, settings) if source is not None]
    if not found:
        return None
    where, source = found[0]
    tokens = {key: token_of(key) for key in ("bos_token", "eos_token")}
    tokens |= {key: text for key, value in settings.items() if key.endswith("_token") and (text := token_text(value)) is not None}
    return ChatTemplate(_choose(source, where), {key: text for key, text in tokens.items() if text is not None}, controls, where)


def _sources(folder: Path, settings: dict[str, Any]) -> Sequence[tuple[str, Any]]:
    """Where templates are kept, the strongest first: (file, template or None)."""
    path = folder / "chat_template.jinja"
    try:
        jinja = path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as text: {error}") from None
    return (
        (path.name, jinja),
        ("tokenizer_config.json", settings.get("chat_template")),
        ("chat_template.json", read_json_object(folder / "chat_template.json").get("chat_template")),
    )


def _choose(source: Any, where: str) -> str:
    """The template itself, or the one named "default" of a list of named ones."""
    if isinstance(source, list):
        named = {str(entry.get("name")): entry.get("template") for entry in cast("list[Any]", source) if isinstance(entry, dict)}
        if "default" not in named:
            raise CheckpointError(f"{where}: its chat templates are {sorted(named)} but one must be named 'default'")
        source = named["default"]
    if not isinstance(source, str):
        raise CheckpointError(f"{where}: chat_template is {type(source).__name__} but must be text or a list of named templates")
    return source


def token_text(value: Any) -> str | None:
    """A token's text, given as such or as an object with `content`."""
    if isinstance(value, dict):
        value = cast("dict[str, Any]", value).get("content")
    return value if isinstance(value, str) else None


def read_json_object(path: Path) -> dict[str, Any]:
    """An optional file of a model folder; {} when there is none. Raises CheckpointError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__} but must hold a JSON object")
    return cast("dict[str, Any]", value)
