"""Calls whose arguments have tags: types of values, missing tags, and text that resembles an end tag."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.engine.text import ContentPart, OutputPart, ParserConfig, ToolCallArguments, ToolCallStart
from baton.engine.text.parsers import FORMATS

from ...helpers.family_answers import deepseek32, glm45, glm47, joined, minimax_m2, qwen3_coder, told

FORMS = {form.name: form for form in FORMATS}
WRITE = {"qwen3-coder": qwen3_coder, "glm4.5": glm45, "minimax-m2": minimax_m2, "deepseek3.2": deepseek32}
LAST_CLOSE = {"qwen3-coder": "</function>", "glm4.5": "</tool_call>", "minimax-m2": "</invoke>"}
LAST_CLOSE["deepseek3.2"] = "</｜DSML｜invoke>"
UNTYPED = [form for form in WRITE if form != "deepseek3.2"]  # the model does not write the types of values
DEEP: dict[str, Any] = {"type": "string"}
for _ in range(5000):
    DEEP = {"anyOf": [DEEP]}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "all": {"type": "boolean"},
        "sizes": {"type": "array", "items": {"type": "integer"}},
        "place": {"$ref": "#/$defs/place"},
        "title": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "key": {"type": ["string", "integer"]},
        "color": {"enum": ["red", "1"]},
        "level": {"enum": [1, 2]},
        "kind": {"const": "7"},
        "both": {"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]},
        "loop": {"$ref": "#/$defs/loop"},
        "bush": {"$ref": "#/$defs/bush"},
        "deep": DEEP,
        "any": {},
        "broken": {"type": ["strin", 3], "$ref": 5},
    },
    "$defs": {
        "place": {"type": "object"},
        "loop": {"$ref": "#/$defs/loop"},
        "bush": {"anyOf": [{"type": "null"}, *({"oneOf": [{"$ref": "#/$defs/bush"}]} for _ in range(50))]},
    },
}


def read(form: str, text: str, *, schema: dict[str, Any] = SCHEMA, finished: bool = True) -> list[OutputPart]:
    """Return the parts of a text, after checking that they are the same letter by letter and as a whole."""
    whole, each = (ParserConfig(FORMS[form], {"look": schema}).new_parser() for _ in range(2))
    parts = joined(whole.push(text, finished=finished))
    assert joined([part for letter in text for part in each.push(letter)] + each.push("", finished=finished)) == parts
    return parts


def arguments(form: str, text: str, *, schema: dict[str, Any] = SCHEMA) -> Any:
    """Return the arguments of an answer that is one call."""
    begins, told = read(form, text, schema=schema)
    assert begins == ToolCallStart(0, "look")
    assert isinstance(told, ToolCallArguments)
    return json.loads(told.text)


VALUES: list[tuple[str, str, Any]] = [
    ("text", "5", "5"),
    ("text", "null", "null"),
    ("text", '"quoted"', '"quoted"'),
    ("text", "  two\n\nlines \\ and a\ttab  \n", "  two\n\nlines \\ and a\ttab  \n"),
    ("text", "", ""),
    ("text", "a < b && <b>c</b> <parameter", "a < b && <b>c</b> <parameter"),
    ("text", "größe 😀 \u2028", "größe 😀 \u2028"),
    ("count", "5", 5),
    ("count", " 5\n", 5),
    ("count", "12345678901234567890123", 12345678901234567890123),
    ("count", "five", "five"),
    ("count", "1e999", "1e999"),
    ("share", "0.5", 0.5),
    ("share", "NaN", "NaN"),
    ("all", "true", True),
    ("all", "True", True),
    ("all", "yes", "yes"),
    ("sizes", '[1, {"a": [2]}]', [1, {"a": [2]}]),
    ("sizes", "[1,\n 2\n]", [1, 2]),
    ("sizes", "[1, 2", "[1, 2"),
    ("place", '{"x": "a\nb"}', {"x": "a\nb"}),
    ("place", "{'x': 1}", "{'x': 1}"),
    ("place", "[" * 9999, "[" * 9999),
    ("place", '{"x": "\\ud800"}', {"x": "\ud800"}),
    ("title", "hello", "hello"),
    ("title", "null", None),
    ("title", "None", "None"),
    ("title", "5", "5"),
    ("key", "5", 5),
    ("key", "5.x", "5.x"),
    ("color", "1", "1"),
    ("level", "2", 2),
    ("kind", "7", "7"),
    ("both", "7", "7"),
    ("loop", "7", 7),
    ("bush", "7", 7),
    ("deep", "7", 7),
    ("any", "7", 7),
    ("any", "seven", "seven"),
    ("broken", "7", 7),
    ("unheard-of", '{"a": 1}', {"a": 1}),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", UNTYPED)
@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_the_type_of_a_value_follows_the_schema_of_its_function(form: str, key: str, text: str, value: Any) -> None:
    written = WRITE[form]("", [("look", {key: text})])
    assert arguments(form, written) == {key: value}


SAID: list[tuple[str, str, str, Any]] = [
    ("text", "true", "5", "5"),
    ("text", "true", " a\n</parameter>\n", " a\n</parameter>\n"),
    ("text", "false", "5", "5"),
    ("count", "false", "5", 5),
    ("count", "true", "5", 5),
    ("title", "true", "null", "null"),
    ("title", "false", "null", None),
    ("any", "true", "5", "5"),
    ("any", "true", "[1]", "[1]"),
    ("any", "false", "5", 5),
    ("any", "false", '"5"', '"5"'),
    ("unheard-of", "true", "7", "7"),
    ("unheard-of", "false", '{"a": 1}', {"a": 1}),
]


@pytest.mark.parametrize(("key", "is_text", "text", "value"), SAID)
def test_the_schema_overrides_the_type_that_a_model_writes(key: str, is_text: str, text: str, value: Any) -> None:
    parameter = f'<｜DSML｜parameter name="{key}" string="{is_text}">{text}</｜DSML｜parameter>'
    call = f'<｜DSML｜invoke name="look">\n{parameter}\n</｜DSML｜invoke>'
    assert arguments("deepseek3.2", f"<｜DSML｜function_calls>\n{call}\n</｜DSML｜function_calls>") == {key: value}


@pytest.mark.parametrize("form", UNTYPED)
def test_additional_properties_of_a_schema_give_types_of_further_arguments(form: str) -> None:
    written = WRITE[form]("", [("look", {"a": "5"})])
    of_text = {"type": "object", "additionalProperties": {"type": "string"}}
    assert arguments(form, written, schema=of_text) == {"a": "5"}
    assert arguments(form, written, schema={"properties": 3, "additionalProperties": False}) == {"a": 5}
    elsewhere = {"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"a": {"$ref": "#/$defs/a~1b"}}}, "a/b": {}}}
    assert arguments(form, written, schema=elsewhere) == {"a": 5}
    elsewhere["$defs"]["a/b"] = {"type": "string"}
    assert arguments(form, written, schema=elsewhere) == {"a": "5"}


@pytest.mark.parametrize("form", WRITE)
def test_strings_are_streamed_and_other_values_come_when_they_are_complete(form: str) -> None:
    text = WRITE[form]("", [("look", {"text": "here and there", "count": 15})])
    reader = ParserConfig(FORMS[form], {"look": SCHEMA}).new_parser()
    at = text.index(" and")
    assert joined(reader.push(text[:at])) == [ToolCallStart(0, "look"), ToolCallArguments(0, '{"text": "here')]
    assert reader.push(" and") == [ToolCallArguments(0, " and")]
    at, end = at + len(" and"), text.index("5")
    assert joined(reader.push(text[at:end])) == [ToolCallArguments(0, ' there", "count": ')]
    assert reader.push("5") == []
    assert joined(reader.push(text[end + 1 :])) == [ToolCallArguments(0, "15}")]


INSIDE: dict[str, list[str]] = {
    "qwen3-coder": [
        "<parameter=text>\nx\n</parameter>\nis how it is written",
        "</parameter> </parameter>",
        "a line\n<parameter=other>\n",
        "\n<parameter=other>\n<parameter=other>",
        "</function> and </tool_call>",
        "\n</function>\n",
        "<tool_call>\n<function=look>\n",
    ],
    "glm4.5": ["</arg_value> is its end", "</tool_call>", "<arg_key>count</arg_key>", "<tool_call>look\n"],
    "minimax-m2": ["</parameter> is its end", "</invoke>\n", '<parameter name="count">', '\n<invoke name="look">\n'],
    "deepseek3.2": ["</｜DSML｜parameter> ends it", "</｜DSML｜invoke>\n", '<｜DSML｜invoke name="look">\n'],
}


@pytest.mark.parametrize(("form", "value"), [(form, value) for form, values in INSIDE.items() for value in values])
def test_strings_may_contain_end_tags_of_other_values(form: str, value: str) -> None:
    text = WRITE[form]("", [("look", {"text": value, "count": 1})])
    assert arguments(form, text) == {"text": value, "count": 1}


FORGOTTEN = {
    "qwen3-coder": [
        "<function=look>\n<parameter=text>\na\n</parameter>\n<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>",
        "<function=look>\n<parameter=text>\na\n</parameter>\n<parameter=count>\n1\n</parameter>\n</function>",
        "<tool_call>\n<function=look>\n<parameter=text>a</parameter>\n<parameter=count>1</parameter>\n</tool_call>",
        "<tool_call>\n<function=look>\n<parameter=text>\na\n<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=look>\n<parameter=text>\na\n</parameter>\n<parameter=count>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=look>\n<parameter=count>\n1\n</parameter>\n<parameter=text>\na\n</function>\n</tool_call>",
        "<tool_call>\n<function=look>\n<parameter=count>\n1\n</parameter>\n<parameter=text>\na\n</function>\n",
    ],
    "glm4.5": [
        "<tool_call>look\n<arg_key>text</arg_key>a</arg_value><arg_key>count</arg_key>1</arg_value></tool_call>",
    ],
}


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in FORGOTTEN.items() for text in texts])
def test_missing_end_tags_are_tolerated(form: str, text: str) -> None:
    assert arguments(form, text) == {"text": "a", "count": 1}


@pytest.mark.parametrize("finished", [False, True], ids=["cut off", "ended by the model"])
@pytest.mark.parametrize("form", WRITE)
def test_an_answer_that_ends_within_a_call_leaves_the_call_unfinished(form: str, finished: bool) -> None:
    text = WRITE[form]("", [("look", {"text": "here", "count": 15})])
    begun = [ToolCallStart(0, "look"), ToolCallArguments(0, '{"text": "he')]
    assert read(form, text[: text.index("re")], finished=finished) == begun
    begun = [ToolCallStart(0, "look"), ToolCallArguments(0, '{"text": "here", "count": ')]
    assert read(form, text[: text.index("5") + 1], finished=finished) == begun
    before_close = text[: text.rindex(LAST_CLOSE[form])]
    assert read(form, before_close, finished=finished) == begun


def test_several_calls_in_one_pair_of_tags_may_be_followed_by_text() -> None:
    call = "<function=look>\n<parameter=count>\n1\n</parameter>\n</function>"
    told = [
        ToolCallStart(0, "look"),
        ToolCallArguments(0, '{"count": 1}'),
        ToolCallStart(1, "look"),
        ToolCallArguments(1, '{"count": 1}'),
    ]
    assert read("qwen3-coder", f"Well.\n\n<tool_call>\n{call}\n{call}\n</tool_call>\n") == [ContentPart("Well."), *told]
    assert read("qwen3-coder", f"<tool_call>{call}</tool_call>\n{call}\nDone.") == [*told, ContentPart("\nDone.")]


SECTIONS = {"minimax-m2": ("<minimax:tool_call>", ""), "deepseek3.2": ("<｜DSML｜function_calls>", "｜DSML｜")}


@pytest.mark.parametrize("form", SECTIONS)
def test_calls_are_parsed_only_within_a_section(form: str) -> None:
    begin, prefix = SECTIONS[form]
    two: list[tuple[str, dict[str, Any]]] = [("look", {"count": 1}), ("look", {})]
    text = WRITE[form]("Well.", two)
    assert read(form, text.replace("\n", "")) == told("Well.", two)
    bare = f'<{prefix}invoke name="look"></{prefix}invoke>'
    assert read(form, f"{text}\nDone: {bare}") == [*told("Well.", two), ContentPart(f"\nDone: {bare}")]
    one, mark, last = text.rpartition(f"\n<{prefix}invoke")
    unknown = mark + last.replace("look", "unknown")
    assert read(form, one + unknown) == [*told("Well.", two[:1]), ContentPart(unknown)]
    assert read(form, begin + unknown) == [ContentPart(begin + unknown)]


def test_lines_between_tags_are_no_part_of_a_call() -> None:
    calls = [("look", {"text": "a", "count": 1}), ("look", {})]
    assert read("glm4.5", glm45("", calls)) == read("glm4.5", glm47("", calls))
