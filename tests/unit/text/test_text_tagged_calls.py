"""Calls whose arguments have tags: of what type a value is, what is forgotten, and what resembles an end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from written_answers import glm45, glm47, joined, qwen3_coder

from baton.engine.text import AnswerPart, CallArguments, CallBegins, Reading, Words
from baton.engine.text.answers.forms import FORMATS

FORMS = {form.name: form for form in FORMATS}
WRITE = {"qwen3-coder": qwen3_coder, "glm4.5": glm45}
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


def read(form: str, text: str, *, schema: dict[str, Any] = SCHEMA, finished: bool = True) -> list[AnswerPart]:
    """The same as a whole and letter by letter."""
    whole, each = (Reading(FORMS[form], {"look": schema}).reader() for _ in range(2))
    parts = joined(whole.push(text, finished=finished))
    assert joined([part for letter in text for part in each.push(letter)] + each.push("", finished=finished)) == parts
    return parts


def arguments(form: str, text: str, *, schema: dict[str, Any] = SCHEMA) -> Any:
    """Of an answer that is one call."""
    begins, told = read(form, text, schema=schema)
    assert begins == CallBegins(0, "look")
    assert isinstance(told, CallArguments)
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


@pytest.mark.parametrize("form", WRITE)
@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_a_value_is_what_the_schema_of_its_function_says(form: str, key: str, text: str, value: Any) -> None:
    written = WRITE[form]("", [("look", {key: text})])
    assert arguments(form, written) == {key: value}


@pytest.mark.parametrize("form", WRITE)
def test_what_further_arguments_are_a_schema_may_say(form: str) -> None:
    written = WRITE[form]("", [("look", {"a": "5"})])
    of_text = {"type": "object", "additionalProperties": {"type": "string"}}
    assert arguments(form, written, schema=of_text) == {"a": "5"}
    assert arguments(form, written, schema={"properties": 3, "additionalProperties": False}) == {"a": 5}
    elsewhere = {"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"a": {"$ref": "#/$defs/a~1b"}}}, "a/b": {}}}
    assert arguments(form, written, schema=elsewhere) == {"a": 5}
    elsewhere["$defs"]["a/b"] = {"type": "string"}
    assert arguments(form, written, schema=elsewhere) == {"a": "5"}


@pytest.mark.parametrize("form", WRITE)
def test_text_is_told_as_it_comes_and_other_values_when_they_are_whole(form: str) -> None:
    text = WRITE[form]("", [("look", {"text": "here and there", "count": 15})])
    reader = Reading(FORMS[form], {"look": SCHEMA}).reader()
    at = text.index(" and")
    assert joined(reader.push(text[:at])) == [CallBegins(0, "look"), CallArguments(0, '{"text": "here')]
    assert reader.push(" and") == [CallArguments(0, " and")]
    at, end = at + len(" and"), text.index("5")
    assert joined(reader.push(text[at:end])) == [CallArguments(0, ' there", "count": ')]
    assert reader.push("5") == []
    assert joined(reader.push(text[end + 1 :])) == [CallArguments(0, "15}")]


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
}


@pytest.mark.parametrize(("form", "value"), [(form, value) for form, values in INSIDE.items() for value in values])
def test_text_may_hold_what_ends_a_value_elsewhere(form: str, value: str) -> None:
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
        "<tool_call>\n<function=look>\n<parameter=count>\n1\n</parameter>\n<parameter=text>\na\n</parameter>\n",
        "<tool_call>\n<function=look>\n<parameter=count>\n1\n</parameter>\n<parameter=text>\na\n</function>\n",
        "<tool_call>\n<function=look>\n<parameter=count>\n1\n</parameter>\n<parameter=text>\na\n",
    ],
    "glm4.5": [
        "<tool_call>look\n<arg_key>text</arg_key>a</arg_value><arg_key>count</arg_key>1</arg_value></tool_call>",
        "<tool_call>look\n<arg_key>text</arg_key><arg_value>a</arg_value><arg_key>count</arg_key><arg_value>1</arg_value>",
        "<tool_call>look<arg_key>count</arg_key>\n<arg_value>1</arg_value>\n<arg_key>text</arg_key>\n<arg_value>a",
    ],
}


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in FORGOTTEN.items() for text in texts])
def test_tags_that_a_model_forgot_are_not_missed(form: str, text: str) -> None:
    assert arguments(form, text) == {"text": "a", "count": 1}


@pytest.mark.parametrize("form", WRITE)
def test_an_answer_that_is_cut_off_ends_no_value(form: str) -> None:
    text = WRITE[form]("", [("look", {"text": "here", "count": 15})])
    begun = [CallBegins(0, "look"), CallArguments(0, '{"text": "he')]
    assert read(form, text[: text.index("re")], finished=False) == begun
    begun = [CallBegins(0, "look"), CallArguments(0, '{"text": "here", "count": ')]
    assert read(form, text[: text.index("5") + 1], finished=False) == begun


def test_calls_may_stand_in_one_pair_of_tags_and_words_behind_them() -> None:
    call = "<function=look>\n<parameter=count>\n1\n</parameter>\n</function>"
    told = [
        CallBegins(0, "look"),
        CallArguments(0, '{"count": 1}'),
        CallBegins(1, "look"),
        CallArguments(1, '{"count": 1}'),
    ]
    assert read("qwen3-coder", f"Well.\n\n<tool_call>\n{call}\n{call}\n</tool_call>\n") == [Words("Well."), *told]
    assert read("qwen3-coder", f"<tool_call>{call}</tool_call>\n{call}\nDone.") == [*told, Words("\nDone.")]


def test_lines_between_tags_are_no_part_of_a_call() -> None:
    calls = [("look", {"text": "a", "count": 1}), ("look", {})]
    assert read("glm4.5", glm45("", calls)) == read("glm4.5", glm47("", calls))
