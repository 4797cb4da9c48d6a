from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.engine.text import Chat, ChatTemplate, ChatTemplateError, InvalidMessages, Tokenizer

from .small_tokenizers import NAMED, byte_level_backend

# Features that templates of published models use: tools, loops with breaks, JSON, macros, trimming, refusals.
TEMPLATE = """\
{%- if messages[0]['role'] == 'assistant' %}{{ raise_exception('A chat begins with a user.') }}{% endif %}
{{- bos_token }}
{%- macro line(role, text) %}<|im_start|>{{ role }}
{{ text }}{% endmacro %}
{%- if tools %}
    {{- line('system', 'Tools:') }}
    {%- for tool in tools %}
        {{- '\n' + tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'end' %}{% break %}{% endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- line('assistant', message.content) }}
        {%- endgeneration %}
    {%- else %}
        {{- line(message.role, message.content) }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{%- endif %}
"""
TRIMMING = "{% for message in messages %}[{{ message.content | trim }}]{% endfor %}"
CHAT = [
    {"role": "system", "content": "Be <b>brief</b> & kind."},
    {"role": "user", "content": "Grüße!"},
    {"role": "assistant", "content": "Hello, "},
]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"type": "object"}}}]


def write_folder(folder: Path, template: Any = None, **files: str) -> Path:
    byte_level_backend().save(str(folder / "tokenizer.json"))
    config = {**NAMED, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | ({"chat_template": template} if template else {}))
    )
    for name, text in files.items():
        (folder / f"{name}.jinja").write_text(text)
    return folder


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    "arguments",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "tools": TOOLS},
        {"add_generation_prompt": True, "variables": {"enable_thinking": False}},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
)
@pytest.mark.parametrize("template", [TEMPLATE, TRIMMING])
def test_a_chat_is_rendered_as_by_transformers(tmp_path: Path, template: str, arguments: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    write_folder(tmp_path, template)
    flat = {name: value for name, value in arguments.items() if name != "variables"} | arguments.get("variables", {})
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(CHAT, tokenize=False, **flat)
    assert Tokenizer.from_folder(tmp_path).render_chat(Chat(CHAT, **arguments)) == theirs


def test_a_continued_message_keeps_its_space_unless_the_template_trims_it() -> None:
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert ChatTemplate({"default": TEMPLATE}).render(Chat(CHAT, **options)).endswith("Hello, ")
    assert ChatTemplate({"default": TRIMMING}).render(Chat(CHAT, **options)).endswith("[Hello,")


def test_rendering_leaves_the_messages_as_they_are() -> None:
    messages = [dict(message) for message in CHAT]
    chat = Chat(messages, add_generation_prompt=False, continue_final_message=True)
    ChatTemplate({"default": TEMPLATE}).render(chat)
    assert messages == CHAT


def test_templates_are_found_in_files_first_and_by_name(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "in config"}, {"name": "tool_use", "template": "with tools"}]
    write_folder(tmp_path, named)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.render_chat(Chat(CHAT)) == "in config"
    assert tokenizer.render_chat(Chat(CHAT, TOOLS)) == "with tools"
    (tmp_path / "chat_template.jinja").write_text("in a file")
    assert Tokenizer.from_folder(tmp_path).render_chat(Chat(CHAT)) == "in a file"


def test_the_template_of_a_processor_is_used_if_the_tokenizer_has_none(tmp_path: Path) -> None:
    """As Mistral Small 3.1 is published."""
    processors = {"chat_template": "of the processor"}
    (tmp_path / "chat_template.json").write_text(json.dumps(processors))
    assert Tokenizer.from_folder(write_folder(tmp_path)).render_chat(Chat(CHAT)) == "of the processor"
    assert Tokenizer.from_folder(write_folder(tmp_path, "in config")).render_chat(Chat(CHAT)) == "in config"


def test_text_parts_become_one_text() -> None:
    content = [{"type": "text", "text": "one"}, "two"]
    assert ChatTemplate({"default": TRIMMING}).render(Chat(user(content))) == "[one\ntwo]"


PRINTING = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
JOINING = "{% for message in messages %}{{ '[' ~ message.content ~ ']' }}{% endfor %}"
ASKING = "{% for message in messages %}{% if MESSAGE is none %}(calls){% else %}[{{ MESSAGE }}]{% endif %}{% endfor %}"


@pytest.mark.parametrize("template", [PRINTING, JOINING, TRIMMING, PRINTING.replace("] }}", "] + '' }}")])
@pytest.mark.parametrize("message", [{}, {"content": None}, {"content": []}, {"content": ""}])
def test_a_message_without_content_has_none_in_the_prompt(template: str, message: dict[str, Any]) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {}}}
    chat = [{"role": "assistant", "tool_calls": [call], **message}, {"role": "user", "content": "so?"}]
    assert ChatTemplate({"default": template}).render(Chat(chat)) == "[][so?]"
    assert ChatTemplate({"default": "", "tool_use": template}).render(Chat(chat, TOOLS)) == "[][so?]"


@pytest.mark.parametrize("asked", ["message['content']", "message.content", "message.get('content')"])
def test_a_template_can_test_if_there_is_content(asked: str) -> None:
    chat = [{"role": "assistant", "content": None}, {"role": "user", "content": "so?"}]
    for template in (ASKING, ASKING.replace("is none", "== none")):
        source = template.replace("MESSAGE", asked)
        assert ChatTemplate({"default": source}).render(Chat(chat)) == "(calls)[so?]"
        assert ChatTemplate({"default": PRINTING, "tool_use": source}).render(Chat(chat)) == "[][so?]"
    elsewhere = "{% set content = message.content %}" + ASKING.split("%}", 1)[1].replace("MESSAGE", "content")
    source = "{% for message in messages %}" + elsewhere
    assert ChatTemplate({"default": source}).render(Chat(chat)) == "(calls)[so?]"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one message"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "hi"}], r"messages\[0\].role must be a string"),
        (
            [*user("a"), {"role": "user", "contents": "hi"}],
            r"messages\[1\] has no content, which the role 'user' needs",
        ),
        (user(None), r"messages\[0\] has no content"),
        (user(7), r"messages\[0\].content must be a string or a list"),
        (user([{"type": "image_url", "image_url": {}}]), r"content\[0\] is of type 'image_url'"),
        (user([{"type": "text"}]), r"content\[0\]"),
        ([{"role": "assistant", "content": "hi"}], "refuses these messages: A chat begins with a user."),
        (user(""), "cannot read these messages"),
    ],
)
def test_messages_that_cannot_be_rendered_say_why(messages: list[Any], reason: str) -> None:
    template = ChatTemplate({"default": TEMPLATE.replace("{{ text }}", "{{ text }}{{ 1 // text | length }}")})
    with pytest.raises(InvalidMessages, match=reason):
        template.render(Chat(messages))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"continue_final_message": True}, "exclude each other"),
        ({"variables": {"messages": []}}, "'messages' is not a template variable"),
        ({"variables": {"self": 1}}, "'self' is not a template variable"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidMessages, match=reason):
        ChatTemplate({"default": TEMPLATE}).render(Chat(CHAT, **arguments))


def test_a_final_message_that_cannot_be_continued_is_refused() -> None:
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(InvalidMessages, match="whose content can be continued"):
        ChatTemplate({"default": TEMPLATE}).render(Chat(user(""), **options))
    with pytest.raises(InvalidMessages, match="leaves the last message out"):
        ChatTemplate({"default": "{{ messages[0].content }}"}).render(Chat([*user("a"), *user("b")], **options))


def test_a_broken_template_is_found_when_it_is_loaded(tmp_path: Path) -> None:
    write_folder(tmp_path, "line one\n{% if %}")
    with pytest.raises(ChatTemplateError, match="'default', line 2"):
        Tokenizer.from_folder(tmp_path)
    write_folder(tmp_path, 7)
    with pytest.raises(ChatTemplateError, match="must be a string or a list"):
        Tokenizer.from_folder(tmp_path)


def test_a_model_without_a_template_says_so(byte_level: Tokenizer) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        byte_level.render_chat(Chat(CHAT))


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(attack: str) -> None:
    with pytest.raises(InvalidMessages, match=r"refuses these messages|cannot read these messages"):
        ChatTemplate({"default": attack}).render(Chat(CHAT))
