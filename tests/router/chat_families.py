"""Small tokenizers and chat templates in the forms of the DeepSeek families, in our own words.

What is copied from the published models is facts only: names of control tokens, which of them are marked special, and what text a
conversation becomes.
"""

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers

from services.router.chat import ChatTemplate, Message
from services.router.tokenizer import Tokenizer, load_template, load_tokenizer

TEXTS = ("The user asks the assistant: what is 12345 + 67890? Think step by step, then answer. " * 3,
         "User: hello there!\n\nAssistant: Hello! How can I help?\n\n",
         "<b>bold</b> [1] <tag> a < b > c | d", "Größe, naïve, 日本語のテキスト, ½ 🎉")
BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"


@dataclass(frozen=True, eq=False)
class Family:
    name: str
    bos: str
    eos: str
    special: tuple[str, ...]  # marked so in tokenizer.json; BOS, EOS and padding are ids 0, 1, 2
    unmarked: tuple[str, ...]  # control tokens all the same
    has_post_processor: bool
    settings: dict[str, object]  # of tokenizer_config.json
    template: str


_V3_UNMARKED = (USER, ASSISTANT, "<think>", "</think>", "<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
                "<｜tool▁outputs▁end｜>")
_TOOL = ("{% elif m.role == 'tool' %}<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{{ m.content }}"
         "<｜tool▁output▁end｜><｜tool▁outputs▁end｜>")
_V3_HEAD = ("{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}{% set ns.system = ns.system + m.content %}"
            "{% endfor %}{{ bos_token }}{{ ns.system }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}" + _TOOL)

V3 = Family("V3", BOS, EOS, (), _V3_UNMARKED, True, {"add_bos_token": True}, _V3_HEAD + (
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"))
# The answer of an earlier turn stays, what was thought before it goes; the next turn begins with an open tag.
R1 = replace(V3, name="R1", template=_V3_HEAD + (
    "{% elif m.role == 'assistant' %}{% set said = m.content %}{% if '</think>' in said %}{% set said = said.split('</think>')[-1] %}"
    "{% endif %}<｜Assistant｜>{{ said }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"))
# No open tag that the model has to close: the template opens (thinking) or closes (not) it.
V31 = replace(V3, name="V3.1", template="{% if thinking is not defined %}{% set thinking = false %}{% endif %}" + _V3_HEAD + (
    "{% elif m.role == 'assistant' %}{% set said = m.content %}{% if '</think>' in said %}{% set said = said.split('</think>', 1)[1] %}"
    "{% endif %}<｜Assistant｜></think>{{ said }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}"))
# Roles are plain words beside the contents. BOS comes from add_bos_token alone: no post-processor.
V2 = Family("V2", BOS, EOS, (), (USER, ASSISTANT, "<|EOT|>"), False, {"add_bos_token": True, "bos_token": {"content": BOS}}, (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\\n\\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + eos_token }}"
    "{% elif m['role'] == 'system' %}{{ m['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"))
# ChatML's form under other names, a system message of its own, and no BOS anywhere.
_KIMI = ("{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_system|>system<|im_middle|>You are a helpful assistant"
         "<|im_end|>{% endif %}{% if m.role in ('user', 'assistant') %}<|im_{{ m.role }}|>{% else %}<|im_system|>{% endif %}"
         "{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
         "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}")
_IM = ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>")
MOONLIGHT = Family("Moonlight", "[BOS]", "[EOS]", _IM, (), False, {}, _KIMI)
KIMI_K2 = replace(MOONLIGHT, name="Kimi K2", special=(*_IM, "<|tool_calls_section_begin|>"), unmarked=("<think>", "</think>"))
FAMILIES = (V3, R1, V31, V2, MOONLIGHT, KIMI_K2)


@functools.cache
def library_tokenizer(family: Family) -> tokenizers.Tokenizer:
    """Byte-level BPE with the family's control tokens, and "ø" as an added token that is text (V2 has such)."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    pattern = Regex(r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(pattern, behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    marked = [AddedToken(token, special=True, normalized=False) for token in (family.bos, family.eos, "<｜▁pad▁｜>")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=marked, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("okey", special=False)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.unmarked])
    if family.has_post_processor:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{family.bos} $A", special_tokens=[(family.bos, 0)])
    return tokenizer


def write_folder(family: Family, folder: Path) -> Path:
    """tokenizer.json and tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    library_tokenizer(family).save(str(folder / "tokenizer.json"))
    settings = {"bos_token": family.bos, "eos_token": family.eos, "chat_template": family.template} | family.settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def load(family: Family, folder: Path) -> tuple[Tokenizer, ChatTemplate]:
    """As the router loads it."""
    write_folder(family, folder)
    tokenizer = load_tokenizer(folder, 0)
    template = load_template(folder, tokenizer, 0, (1,))
    assert template is not None
    return tokenizer, template


def chat(*pairs: str) -> list[Message]:
    """`chat("system: be brief", "user: hi")`."""
    return [Message(*pair.split(": ", 1)) for pair in pairs]
