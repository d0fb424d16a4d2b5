"""Where a model folder keeps its template, and what its tokenizer files say about BOS."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.router.chat import Message
from services.router.tokenizer import load_template, load_tokenizer
from services.runtime.errors import CheckpointError
from tests.router.chat_families import MOONLIGHT, V2, V3, library_tokenizer, load, write_folder

DEMO = Path(__file__).parents[2] / "deploy" / "demo_model"


def say(source: str) -> str:
    return source + ": {{ messages[0].content }}"


def rendered(folder: Path) -> str | None:
    tokenizer = load_tokenizer(folder, 0)
    template = load_template(folder, tokenizer, 0, (1,))
    if template is None:
        return None
    return template.render([Message("user", "hi")], add_generation_prompt=True, thinking=None, max_characters=1000).text


@pytest.mark.parametrize(("files", "text"), [
    ({}, None),
    ({"tokenizer_config.json": {"add_bos_token": True}}, None),
    ({"tokenizer_config.json": {"chat_template": say("config")}}, "config: hi"),
    ({"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": say("rag")}, {"name": "default", "template": say("x")}]}},
     "x: hi"),
    ({"chat_template.json": {"chat_template": say("json")}}, "json: hi"),
    ({"chat_template.jinja": say("jinja"), "tokenizer_config.json": {"chat_template": say("config")}}, "jinja: hi"),
    ({"chat_template.jinja": say("{{ bos_token }}{{ eos_token }}"), "tokenizer_config.json": {"eos_token": {"content": "</s>"}}},
     V3.bos + "</s>: hi"),
], ids=range(7))
def test_template_is_found(tmp_path: Path, files: dict[str, Any], text: str | None) -> None:
    library_tokenizer(V3).save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert rendered(tmp_path) == text


@pytest.mark.parametrize(("name", "content", "words"), [
    ("tokenizer_config.json", "{", "cannot be read as JSON"),
    ("tokenizer_config.json", "[]", "JSON object"),
    ("tokenizer_config.json", '{"chat_template": 5}', "must be text"),
    ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": ""}]}', "rag.*default"),
    ("chat_template.jinja", "{% for %}", "chat_template.jinja.*compiled"),
], ids=range(5))
def test_broken_files_are_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    library_tokenizer(V3).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=words):
        rendered(tmp_path)


@pytest.mark.parametrize(("family", "said", "num_bos"), [
    (V3, None, 1), (V3, True, 1), (V3, False, 0), (V2, True, 1), (V2, False, 0), (MOONLIGHT, None, 0), (MOONLIGHT, True, 1),
], ids=lambda value: getattr(value, "name", str(value)))
def test_one_bos_where_the_files_say_so(tmp_path: Path, family: Any, said: bool | None, num_bos: int) -> None:
    """V3 says it in both files, V2 in tokenizer_config.json alone, Moonlight nowhere."""
    write_folder(family, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"add_bos_token": said}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = load_tokenizer(tmp_path, 0).encode("hello", 100)
    assert ids == [0] * num_bos + library_tokenizer(family).encode("hello", add_special_tokens=False).ids


def test_another_bos_than_the_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"bos_token .* has the id 0 but config\.json's bos_token_id is 1"):
        load_tokenizer(write_folder(V3, tmp_path), 1)


def test_without_tokenizer_config_there_is_one_bos(tmp_path: Path) -> None:
    library_tokenizer(V2).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path, 0).encode("hello", 100).count(0) == 1


def test_tiktoken_alone_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text("")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*convert tiktoken"):
        load_tokenizer(tmp_path, 0)


def test_control_token_that_text_could_spell_is_refused(tmp_path: Path) -> None:
    """A vocabulary whose merges give a control token: no way to keep text from it."""
    inner = library_tokenizer(V3)
    spec = json.loads(inner.to_str())
    word = next(token for token in spec["model"]["vocab"] if token.isalpha() and token.isascii() and len(token) > 3)
    spec["added_tokens"].append(spec["added_tokens"][0] | {"id": spec["model"]["vocab"][word], "content": word})
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(CheckpointError, match=f"{word}.*ordinary token"):
        load_tokenizer(tmp_path, 0)


def test_demo_models_chat_is_a_scene() -> None:
    tokenizer = load_tokenizer(DEMO, 0)
    template = load_template(DEMO, tokenizer, 0, (1,))
    assert template is not None and template.roles == {"system", "user", "assistant"}
    messages = [Message("system", "ACT I."), Message("user", "Who's there?"), Message("assistant", "A friend."), Message("user", "So.")]
    scene = template.render(messages, add_generation_prompt=True, thinking=None, max_characters=1000)
    assert scene.text == V3.bos + "ACT I.\n\nHAMLET.\nWho's there?\n\nHORATIO.\nA friend.\n\nHAMLET.\nSo.\n\nHORATIO.\n"
    assert tokenizer.encode_chat(scene).count(0) == 1


def test_tokens_beside_a_control_token_that_takes_the_space(tmp_path: Path) -> None:
    """`lstrip` and `rstrip` of a control token: as the library does."""
    _, template = load(V3, tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in spec["added_tokens"]:
        token["rstrip"] = token["content"] == "<｜User｜>"
        token["lstrip"] = token["content"] == "<｜Assistant｜>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = load_tokenizer(tmp_path, 0)
    rendered = template.render([Message("user", "  hi  ")], add_generation_prompt=True, thinking=None, max_characters=1000)
    ids = tokenizer.encode_chat(rendered)
    whole = type(library_tokenizer(V3)).from_file(str(tmp_path / "tokenizer.json"))
    assert ids == whole.encode(f"{V3.bos}<｜User｜>  hi  <｜Assistant｜>", add_special_tokens=False).ids
