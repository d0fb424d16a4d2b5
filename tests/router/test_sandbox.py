"""Templates come with checkpoints: they reach nothing, and end."""

import pytest

from services.router.chat import ChatTemplate, Message
from services.runtime.errors import CheckpointError, InvalidRequest

USER = [Message("user", "hi")]
PLAIN = "{% if messages[0].content == 'hi' %}BODY{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"


def render(body: str, seconds: float = 5.0) -> str:
    """`body` runs for the message "hi" only, not while the roles are probed."""
    template = ChatTemplate(PLAIN.replace("BODY", body), {"bos_token": "<s>"}, ["<s>"], "test")
    options = {"add_generation_prompt": True, "thinking": None, "max_characters": 10_000, "max_seconds": seconds}
    return template.render(USER, **options).text.removesuffix("user: hi")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("body", "text"), [
    ("{{ bos_token }}", "<s>"),
    ("{{ 'a' ~ 1 ~ none }}", "a1None"),
    ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ loop.index }}{% endfor %}", "12"),
    ("{% for i in [] %}x{% else %}none{% endfor %}", "none"),
    ("{% set ns = namespace(x=1) %}{% for i in [1, 2] %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}", "4"),
    ("{% macro m(a) %}[{{ a }}]{{ caller() }}{% endmacro %}{% call m('x') %}y{% endcall %}", "[x]y"),
    ("{% generation %}g{% endgeneration %}", "g"),
    ("{{ {'a': 'é', 'b': [1]} | tojson }}", '{"a": "é", "b": [1]}'),
    ("{{ {'a': 1} | tojson(indent=1) }}", '{\n "a": 1\n}'),
    ("{{ 'a-b'.split('-') | join('+') }}{{ '.'.join(['x', 'y']) }}{{ 'aa' | replace('a', 'b') }}{{ 'aa'.replace('a', 'c', 1) }}",
     "a+bx.ybbca"),
    ("{{ [{'n': 'x'}, {'n': 'y'}] | map(attribute='n') | join }}{{ [1, 2] | length }}{{ ' s ' | trim }}", "xy2s"),
    ("{{ strftime_now('%Y') | length }}", "4"),
    ("{{ tools is none }}{{ documents is none }}{{ undefined_thing is defined }}", "TrueTrueFalse"),
    ("{{ messages[0].content._marks }}{{ messages[0].content.split.__globals__ }}", ""),
    ("{{ messages[0].content | attr('_marks') }}", ""),
    ("\n    {% if true %}\n  x\n    {% endif %}\n", "  x\n"),
], ids=range(16))
def test_what_templates_use_works(body: str, text: str) -> None:
    assert render(body) == text


@pytest.mark.parametrize(("body", "words"), [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ 'x' * 10**9 }}", "more than 10000 characters"),
    ("{{ [1] * 10**9 }}", "more than 10000"),
    ("{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", "more than 10000"),
    ("{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "more than 10000"),
    ("{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
     "more than 10000"),
    ("{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}", "more than 10000"),
    ("{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] | join(ns.x) %}{% endfor %}", "more than 10000"),
    ("{% for i in range(99999) %}xxxxxxxxxx{% endfor %}", "more than 10000"),
    ("{% for i in range(10**9) %}{% endfor %}", "range"),
    ("{{ 9 ** 99999 }}", "too large a number"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ("{{ '%99999999d' % 1 }}", "not allowed"),
    ("{{ 'x'.center(10**9) }}", "unsafe"),
    ("{{ 'x'.format(1) }}", "unsafe"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{{ namespace(__class__=1) }}", "underscore"),
    ("{{ messages[7].content.x }}", "has no element 7"),
    ("{{ 1 / 0 }}", "division"),
], ids=range(20))
def test_refused_in_one_sentence(body: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refuses it") as caught:
        render(body)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("body", [
    "{% set xs = range(99999) | list %}{% for a in xs %}{% for b in xs %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
], ids=["loops", "macros"])
def test_endless_templates_end(body: str) -> None:
    with pytest.raises(InvalidRequest, match="takes too long"):
        render(body, seconds=0.1)


@pytest.mark.parametrize(("source", "words"), [
    ("{% if %}", "cannot be compiled"), ("{{ 'x' | center(9) }}", "center"), ("fixed", "user's message"), ("{{ 1 / 0 }}", "user's message"),
    ("x" * (2**20 + 1), "1048577"),
], ids=["syntax", "filter", "drops", "raises", "long"])
def test_broken_templates_are_found_at_start(source: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        ChatTemplate(source, {}, [], "folder/chat_template.jinja")
    assert "folder/chat_template.jinja" in str(caught.value)
