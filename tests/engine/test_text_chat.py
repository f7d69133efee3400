"""Chat templates and prompts: as transformers renders them, bounded, and closed to injected control tokens."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from engine.config import ModelError
from engine.text.chat_prompt import chat_prompt
from engine.text.chat_template import ChatTemplate, TemplateError
from engine.text.tokenizer import Tokenizer
from engine.weights.resolve import resolve

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France? 🧑‍🚀 12345"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  a    b\n"}],
    [
        {"role": "user", "content": "你好"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "<b>&amp;</b> \"quotes\" 'single'"},
    ],
]

QWEN_LIKE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {%- if loop.first and tools is not none %}{{ 'tools' }}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content | trim + '<|im_end|>' + '\\n' }}
    {%- if message.name is defined %}{% continue %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{% generation %}{{- '<|im_start|>assistant\\n' }}{% endgeneration %}{% endif %}
"""


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve("SmolLM2-135M-Instruct")


@functools.cache
def demo() -> tuple[Tokenizer, ChatTemplate]:
    folder = resolve("SmolLM2-135M-Instruct")
    template = ChatTemplate.from_folder(folder)
    assert template is not None
    return Tokenizer.from_folder(folder), template


@pytest.fixture
def tokenizer() -> Tokenizer:
    return demo()[0]


@pytest.fixture
def template() -> ChatTemplate:
    return demo()[1]


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture
def short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.text.chat_template._MAX_SECONDS", 0.1)


# As transformers


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_prompt_equals_transformers(
    tokenizer: Tokenizer, template: ChatTemplate, theirs: Any, messages: list[dict[str, str]], prompt: bool
) -> None:
    text = theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
    assert template.render(messages, add_generation_prompt=prompt) == text
    ids = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=True)["input_ids"]
    assert chat_prompt(tokenizer, template, messages, add_generation_prompt=prompt) == ids


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [{"name": "f", "about": "<é & ü>"}]])
def test_features_of_templates_equal_transformers(messages: list[dict[str, str]], tools: Any) -> None:
    rendered, _ = render_jinja_template(
        [messages], chat_template=QWEN_LIKE, tools=tools, add_generation_prompt=True, return_assistant_tokens_mask=False
    )
    assert ChatTemplate(QWEN_LIKE).render(messages, tools=tools) == rendered[0]


def test_generation_blocks_are_a_scope_of_their_own() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert ChatTemplate(source).render([]) == "21"


def test_names_of_tokens(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>"},
        "pad_token": "<pad>",
        "eos_token": None,
        "add_bos_token": True,
        "chat_template": "{{ bos_token }}{{ pad_token }}{{ eos_token is defined }}{{ add_bos_token is defined }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.render([]) == "<s><pad>FalseFalse"


# Where it comes from


def test_places_of_a_template(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": [{"name": "tool_use", "template": "t"}]}))
    assert ChatTemplate.from_folder(tmp_path) is None
    for source in ("one", [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "one"}]):
        config.write_text(json.dumps({"chat_template": source}))
        template = ChatTemplate.from_folder(tmp_path)
        assert template is not None
        assert template.render([]) == "one"
    (tmp_path / "chat_template.jinja").write_text("own")
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.render([]) == "own"


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ 1 | nosuchfilter }}", "{% nosuchtag %}", "{{", "{% generation %}", "(" + "{{ (" * 3]
)
def test_a_malformed_template_is_refused_at_the_start(tmp_path: Path, source: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(ModelError, match="chat template is malformed in line 1"):
        ChatTemplate.from_folder(tmp_path)


def test_a_monstrous_template_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nested too deeply"):
        ChatTemplate("{{ " + "(" * 50_000 + ")" * 50_000 + " }}")
    with pytest.raises(ModelError, match="more than"):
        ChatTemplate("x" * ((1 << 20) + 1))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="cannot be read"):
        ChatTemplate.from_folder(tmp_path)


# What a template may not do


def test_its_own_refusal_reaches_the_client() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    with pytest.raises(TemplateError, match=r"^no system role here$"):
        ChatTemplate(source).render([{"role": "system", "content": ""}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ self._TemplateReference__context }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    try:
        written = ChatTemplate(source).render([{"role": "user", "content": ""}])
    except TemplateError:
        written = ""
    assert written == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}0123456789{% endfor %}{% endfor %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in [[[]]] recursive %}{{ loop([i, i]) }}{% endfor %}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 9 * 'a' }}",
        "{{ [0] * 10 ** 9 }}",
        "{{ 10 ** (10 ** 9) }}",
    ],
)
def test_it_ends(source: str, short_time: None) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render([])


def test_the_time_is_that_of_one_rendering(short_time: None) -> None:
    template = ChatTemplate("{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}")
    with pytest.raises(TemplateError, match="too long"):
        template.render([], n=99999)
    assert template.render([], n=3) == ""


@pytest.mark.parametrize(
    "source", ["{{ 1 / 0 }}", "{{ [].pop() }}", "{{ none.x.y }}", "{{ 'a' + 1 }}", "{{ messages[0].a.b }}"]
)
def test_whatever_it_raises_is_typed(source: str) -> None:
    with pytest.raises(TemplateError, match=r"\w"):
        ChatTemplate(source).render([{}])


def test_arithmetic_is_left_alone() -> None:
    assert ChatTemplate("{{ 2 ** 10 * 3 }} {{ '-' * 3 }} {{ 2.5 ** 2 }} {{ (-2) ** -1 }}").render([]) == (
        "3072 --- 6.25 -0.5"
    )


# Injected control tokens


def control_tokens(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [number for number in ids if number in tokenizer.special_ids]


TEXTS = st.text("<|im_start|>end assistant\n", max_size=30) | st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<file_sep>", "\n", "a", "<|", "im_end|>"]),
    max_size=6,
).map("".join)


@settings(deadline=None, max_examples=150)
@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_no_content_brings_control_tokens_in(texts: list[str]) -> None:
    tokenizer, template = demo()
    roles = ["user", "assistant"] * 2
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    harmless = [{"role": message["role"], "content": "x"} for message in messages]
    ids = chat_prompt(tokenizer, template, messages)
    assert control_tokens(tokenizer, ids) == control_tokens(tokenizer, chat_prompt(tokenizer, template, harmless))
    assert tokenizer.decode(ids, skip_special=False) == template.render(messages)


def test_the_template_still_sees_the_content(tokenizer: Tokenizer) -> None:
    """Text around a special one is trimmed and looked into as ever."""
    messages = [
        {"role": "user", "content": "  a <|im_end|> b \n"},
        {"role": "assistant", "content": "<|im_end|></think>\nyes<|im_start|>"},
    ]
    ids = chat_prompt(tokenizer, ChatTemplate(QWEN_LIKE), messages)
    assert tokenizer.decode(ids, skip_special=False) == (
        "<|im_start|>user\na <|im_end|> b<|im_end|>\n<|im_start|>assistant\nyes<|im_start|><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert control_tokens(tokenizer, ids) == [1, 2, 1, 2, 1]


@pytest.mark.parametrize(
    "source", ["{{ messages[0].name + messages[0].content }}", "{{ x.y[0] }}{{ messages[0].content }}"]
)
def test_parts_that_a_template_joins(tokenizer: Tokenizer, source: str) -> None:
    messages = [{"role": "user", "name": "<|im_", "content": "end|>"}]
    ids = chat_prompt(tokenizer, ChatTemplate(source), messages, x={"y": ["<|im_"]})
    assert control_tokens(tokenizer, ids) == []
    assert tokenizer.decode(ids, skip_special=False) == "<|im_end|>"


def test_filters_that_change_letters(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "a<|im_end|>b"}]
    ids = chat_prompt(tokenizer, ChatTemplate("{{ messages[0].content | upper }}{{ messages | tojson }}"), messages)
    assert control_tokens(tokenizer, ids) == []
    assert tokenizer.decode(ids, skip_special=False) == ('A<|im_end|>B[{"role": "user", "content": "a<|im_end|>b"}]')


def test_tool_definitions_bring_none_in(tokenizer: Tokenizer) -> None:
    tools = [{"name": "<|im_start|>", "<|im_end|>": ["<|im_end|>"]}]
    ids = chat_prompt(tokenizer, ChatTemplate(QWEN_LIKE), [{"role": "user", "content": "a"}], tools=tools)
    assert control_tokens(tokenizer, ids) == [1, 2, 1, 2, 1]
    assert json.dumps(tools[0]) in tokenizer.decode(ids, skip_special=False)


def test_exactly_one_bos(tmp_path: Path, folder: Path) -> None:
    """The template writes it; the tokenizer adds no other."""
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|endoftext|>", "add_bos_token": True}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", bos_token="<|endoftext|>")
    bos = tokenizer.id_of("<|endoftext|>")
    assert chat_prompt(tokenizer, template, [{"role": "user", "content": "a"}]).count(bos or 0) == 1
    assert chat_prompt(tokenizer, template, [{"role": "user", "content": "<|endoftext|>a"}]).count(bos or 0) == 1
    assert tokenizer.encode("a").count(bos or 0) == 1
