"""Text that resembles a tool call but is none stays text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.text import ContentPart, ParserConfig, ReasoningStart, ToolCallStart

from ...helpers.family_answers import FUNCTIONS, joined
from .call_texts import FORMS, call, read, some_sizes, texts, untimed

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("form", FORMS)
@untimed
@given(data=st.data(), sizes=some_sizes, at_most_one=st.booleans(), thoughts=st.sampled_from(ReasoningStart))
def test_the_split_of_the_text_changes_nothing(
    form: str, data: st.DataObject, sizes: list[int], at_most_one: bool, thoughts: ReasoningStart
) -> None:
    text = data.draw(texts(form))
    whole = read(text, form, at_most_one=at_most_one, thoughts=thoughts)
    assert read(text, form, sizes, at_most_one=at_most_one, thoughts=thoughts) == whole


@pytest.mark.parametrize("form", FORMS)
@untimed
@given(data=st.data(), sizes=some_sizes)
def test_parts_of_markers_are_text_including_all_whitespace(form: str, data: st.DataObject, sizes: list[int]) -> None:
    text = data.draw(texts(form, whole=False))
    marks = FORMS[form].marks or ('{"name"',)
    if not any(mark in text for mark in marks):
        assert read(text, form, sizes) == ([ContentPart(text)] if text else [])


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in FORMS if form != "harmony"])
@untimed
@given(data=st.data())
def test_nothing_is_lost_where_there_is_no_call(form: str, data: st.DataObject) -> None:
    text = data.draw(texts(form))
    parts = read(text, form)
    if not any(isinstance(part, ToolCallStart) for part in parts):
        assert parts == ([ContentPart(text)] if text else [])


NO_CALLS = {
    "hermes": [
        "",
        "  ",
        "no call at all \n",
        "half a mark: <tool_",
        "a mark alone: <tool_call>",
        'a mark <tool_call> in words, and {"name": "look"}',
        call("look", "[1]"),
        call("look", '"text"'),
        "<tool_call>{'name': 'look', 'arguments': {}}</tool_call>",
        '<tool_call>{"arguments": {}, "name": "unknown"}</tool_call>',
        '<tool_call>{"arguments": [], "name": "look"}</tool_call>',
        '<tool_call>{"arguments": {}, "name": 3}</tool_call>',
        '<tool_call>{"arguments": {}, "name": "look"',
        '<tool_call>{"arguments": {]}</tool_call>',
        '<tool_call>{"name": "lo',
    ],
    "llama3": [
        '{"answer": 42}',
        ' \n{"answer": 42} ',
        '{"name": "look"}',
        "text {",
        '{"parameters": {}, "name": "look"}',
    ],
    "mistral-list": [
        "[TOOL_CALLS] not JSON",
        "[TOOL_CALLS] []",
        '[TOOL_CALLS] {"name": "look", "arguments": {}}',
        '[TOOL_CALLS] [{"name": "look", "arguments": "x"}] ',
    ],
    "mistral-named": ["[TOOL_CALLS]look", "[TOOL_CALLS]look[ARGS]", "[TOOL_CALLS]look[ARGS] [1]", "[ARGS]{}"],
    "deepseek3": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
    "deepseek3.1": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>[]<｜tool▁call▁end｜>"],
    "pythonic": [
        "[1, 2]",
        "[look]",
        "[look(1)]",
        "[look(a=b)]",
        "[look(**{'a': 1})]",
        "[look(a=1, a=2)]",
        "[look(a={1})]",
        "[look(a=1",
        "look(a=1)",
        "[look(a='",
        "[",
    ],
    "qwen3-coder": [
        "<tool_call>",
        "<tool_call>\n<function=look>",
        "<tool_call>\n<function=look>\n{}\n</function>\n</tool_call>",
        "<tool_call>\n<function=look>\n<parameter=\nx\n</parameter>\n</function>\n</tool_call>",
        '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>',
        "It is written `<function=look>`, and `<parameter=at>`.",
    ],
    "glm4.5": [
        "<tool_call>look",
        "<tool_call>look at it</tool_call>",
        "<tool_call>look\n<arg_key>at",
        "<tool_call>look\n<arg_value>1</arg_value></tool_call>",
        '<tool_call>{"name": "look", "arguments": {}}</tool_call>',
    ],
    "minimax-m2": [
        "<minimax:tool_call>",
        '<invoke name="look"></invoke>',
        '<minimax:tool_call>\n<invoke name="look">\n{}\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="a',
        "<minimax:tool_call>\n<invoke name='look'>\n</invoke>\n</minimax:tool_call>",
        '<tool_call>{"name": "look", "arguments": {}}</tool_call>',
    ],
    "deepseek3.2": [
        "<｜DSML｜function_calls>\n",
        '<｜DSML｜invoke name="look"></｜DSML｜invoke>',
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="a">1</｜DSML｜parameter>',
        '<function_calls>\n<invoke name="look">\n</invoke>\n</function_calls>',
    ],
    "harmony": [
        '{"color": "red"}',
        "plain words, as of a model that was taught otherwise",
        " to=functions.look",
        "<|channel|>commentary to=functions.look <|constrain|>json<|message|>[1]",
        "<|channel|>commentary to=python code<|message|>print(1)",
        "<|start|>functions.look to=assistant<|channel|>commentary<|message|>{}",
    ],
}


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in NO_CALLS.items() for text in texts])
def test_invalid_calls_are_text(form: str, text: str) -> None:
    assert read(text, form) == ([ContentPart(text)] if text else [])


BEGUN = {
    "hermes": "<tool_call>",
    "qwen3-coder": "<tool_call>\n<function=look>",
    "glm4.5": "<tool_call>look<arg_key>at</arg_key>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="look">',
    "deepseek3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">',
    "llama3": "{",
    "mistral-list": "[TOOL_CALLS] [",
    "mistral-named": "[TOOL_CALLS]look",
    "deepseek3": "<｜tool▁calls▁begin｜>",
    "deepseek3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>",
    "pythonic": "[look",
    "harmony": "<|channel|>final",
}


@pytest.mark.parametrize(("form", "begun"), BEGUN.items())
def test_endless_whitespace_is_not_held_back(form: str, begun: str) -> None:
    reader = ParserConfig(FORMS[form], FUNCTIONS).new_parser()
    assert reader.push(begun) == []
    (said,) = joined([part for _ in range(500) for part in reader.push(" ")])
    assert isinstance(said, ContentPart)
    assert said.text.startswith(begun)
