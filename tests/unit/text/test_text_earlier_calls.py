"""Functions, earlier calls and their results in the prompts of each family of models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.engine.text import Chat, ChatTemplate, InvalidMessages

from ...helpers.family_answers import WRITERS, joined, told
from ...helpers.family_templates import FAMILIES

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
GIVEN = {"at": "größe"}


def call(call_id: str, arguments: Any = GIVEN) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def chat(call_id: str = "call_0123456789", **answer: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call(call_id)], **answer},
        {"role": "tool", "content": '"done"', "tool_call_id": call_id},
    ]


def render(family: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate({"default": FAMILIES[family]}).render(Chat(messages, TOOLS, **options))


WRITTEN = json.dumps(GIVEN, ensure_ascii=False)
SHOWN = {
    "mistral-list": f'[TOOL_CALLS] [{{"name": "look", "arguments": {WRITTEN}, "id": "',
    "mistral-named": f"[TOOL_CALLS]look[ARGS]{WRITTEN}</s>",
    "deepseek3": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{WRITTEN}\n```<｜tool▁call▁end｜>",
    "deepseek3.1": f"<｜tool▁call▁begin｜>look<｜tool▁sep｜>{WRITTEN}<｜tool▁call▁end｜>",
    "harmony": f"to=functions.look<|channel|>commentary json<|message|>{WRITTEN}<|call|>",
    "qwen3-coder": WRITERS["qwen3-coder"].write("", [("look", GIVEN)]),
    **{name: WRITERS[name].write("", [("look", GIVEN)]) for name in ("glm4.5", "minimax-m2", "deepseek3.2")},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_renders_functions_calls_and_results(family: str) -> None:
    template = ChatTemplate({"default": FAMILIES[family]})
    assert template.tool_call_format is not None
    assert (template.tool_call_format.name, "tools" in template.variables) == (family, True)
    text = render(family, chat())
    assert SHOWN[family] in text
    assert "done" in text
    assert text.index("look") < text.index(SHOWN[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_without_calls_is_rendered_unchanged(family: str) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Yes."}]
    assert "Yes." in render(family, [*messages, {"role": "user", "content": "why?"}])


def test_mistral_gets_ids_of_nine_characters_equal_in_call_and_result() -> None:
    text = render("mistral-list", chat())
    (called,) = json.loads(text.partition("[TOOL_CALLS] ")[2].partition("</s>")[0])
    (result,) = [text.partition("[TOOL_RESULTS] ")[2].partition("[/TOOL_RESULTS]")[0]]
    assert json.loads(result)["call_id"] == called["id"]
    assert len(called["id"]) == 9
    assert called["id"].isalnum()
    assert '"id": "abcdefg12"' in render("mistral-list", chat("abcdefg12"))
    assert called["id"] not in render("mistral-list", chat("call_0123456788"))


def test_the_reasoning_of_gpt_oss_before_a_call_is_rendered() -> None:
    analysis = "<|start|>assistant<|channel|>analysis<|message|>"
    assert analysis not in render("harmony", chat())
    assert f"{analysis}hm<|end|>" in render("harmony", chat(reasoning_content="hm"))
    assert f"{analysis}hm\n\nwell<|end|>" in render("harmony", chat(reasoning_content="hm", content="well"))


LAST = {"qwen3-coder": "</tool_call>", "glm4.5": "</tool_call>", "minimax-m2": "</minimax:tool_call>"}
LAST["deepseek3.2"] = "</｜DSML｜function_calls>"


@pytest.mark.parametrize("family", LAST)
def test_a_rendered_call_is_parsed_as_the_same_call(family: str) -> None:
    given = {"text": "a < b\n\n{c}", "sizes": [1, {"a": "größe"}], "all": True, "none": None, "count": 5}
    types = {"text": "string", "sizes": "array", "all": "boolean", "none": "null", "count": "integer"}
    schema = {"type": "object", "properties": {name: {"type": kind} for name, kind in types.items()}}
    text = render(family, chat(content="Well.", tool_calls=[call("a", given), call("b", {})]))
    shown = text[text.index("Well.") : text.rindex(LAST[family]) + len(LAST[family])]
    form = ChatTemplate({"default": FAMILIES[family]}).tool_call_format
    assert form is not None
    parts = joined(form.new_parser({"look": schema}).push(shown, finished=True))
    assert parts == told("Well.", [("look", given), ("look", {})])


def test_glms_prompt_of_a_message_without_content_has_no_none() -> None:
    assert "None" not in render("glm4.5", chat())


def test_gpt_oss_accepts_one_call_a_message() -> None:
    with pytest.raises(InvalidMessages, match="2 tool_calls"):
        render("harmony", chat(tool_calls=[call("a"), call("b")]))


def test_arguments_that_are_a_string_are_rendered_unchanged() -> None:
    text = render("deepseek3.1", chat(tool_calls=[call("a", '{"at":1}')]))
    assert '<｜tool▁sep｜>{"at":1}<｜tool▁call▁end｜>' in text


def test_arguments_are_an_object_for_templates_that_access_their_fields() -> None:
    looks = "{{ messages[0].tool_calls[0].function.arguments.at }} {{ messages[0].tool_calls[0].function.arguments }}"
    message = {"role": "assistant", "content": None, "tool_calls": [call("a")]}
    assert ChatTemplate({"default": looks}).render(Chat([message])) == f"größe {WRITTEN}"


# Like DeepSeek's own templates, these do not render functions.
WITHOUT_FUNCTIONS = {
    family: FAMILIES[family].partition("{% endif %}")[2] for family in ("deepseek3", "deepseek3.1", "mistral-named")
}


@pytest.mark.parametrize("family", ["deepseek3", "deepseek3.1"])
def test_functions_that_a_template_does_not_render_are_in_the_system_message(family: str) -> None:
    template = ChatTemplate(
        {"default": "{% for m in messages %}{{ m.role + m.content }}{% endfor %}" + WITHOUT_FUNCTIONS[family]}
    )
    assert template.lists_tools
    hello = {"role": "user", "content": "hello"}
    text = template.render(Chat([hello], TOOLS))
    assert text.startswith("system## Tools\n\n### look\n\n")
    assert 'Parameters: {"type": "object"}' in text
    assert SHOWN[family].partition("look")[0] + "NAME" in text
    kind = template.render(Chat([{"role": "system", "content": "Be kind."}, hello], TOOLS))
    assert kind == text.replace("## Tools", "Be kind.\n\n## Tools")
    assert template.render(Chat([hello])).startswith("userhello"), "without functions there must be no system message"


def test_other_forms_need_a_template_that_renders_functions() -> None:
    assert not ChatTemplate({"default": WITHOUT_FUNCTIONS["mistral-named"]}).lists_tools
    assert not ChatTemplate({"default": "{{ messages }}"}).lists_tools
