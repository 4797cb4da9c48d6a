"""Tool calls that are parsed from text in pieces."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from baton.engine.text import OutputPart, ParserConfig, ReasoningStart, ToolCallFormat, ToolCallStart
from baton.engine.text.parsers import FORMATS

from ...helpers.family_answers import FUNCTIONS, TYPES, WRITERS, joined

untimed = settings(deadline=None)
FORMS: dict[str, ToolCallFormat] = {form.name: form for form in FORMATS}


def read(
    text: str,
    form: str = "hermes",
    sizes: list[int] | None = None,
    *,
    at_most_one: bool = False,
    thoughts: ReasoningStart = ReasoningStart.NONE,
) -> list[OutputPart]:
    """Return what a parser reports of text in pieces of these sizes; parts of one kind are joined."""
    reader = ParserConfig(FORMS[form], FUNCTIONS, at_most_one, thoughts).new_parser()
    parts: list[OutputPart] = []
    rest = text
    for size in sizes or []:
        piece, rest = rest[:size], rest[size:]
        parts += reader.push(piece)
    parts += reader.push(rest, finished=True)
    assert reader.num_calls == sum(isinstance(part, ToolCallStart) for part in parts)
    return joined(parts)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


TYPE_OF: dict[type, str] = dict(zip((type(None), bool, int, str, list, dict), TYPES, strict=True))
some_sizes = st.lists(st.integers(0, 9), max_size=80)


def named(given: dict[str, Any]) -> dict[str, Any]:
    return {f"{TYPE_OF[type(value)]}_{at}": value for at, value in enumerate(given.values())}


_DEEPSEEK = ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"]
PIECES = {
    "hermes": [
        *("<tool_call>", "</tool_call>", '{"name": "look", "arguments": {'),
        *('{"arguments": {"a": 1}, "name": "look"}', '{"arguments": {', '{"name": "look"'),
    ],
    "llama3": ['{"name": "look", "parameters": {', '{"parameters": {}, "name": "look"}', "; "],
    "mistral-list": [
        *("[TOOL_CALLS]", "[", "]", ",", '{"name": "look", "arguments": {'),
        '{"arguments": {}, "name": "look"}',
    ],
    "mistral-named": ["[TOOL_CALLS]", "[ARGS]", "look", "[CALL_ID]", "[ARGS]{"],
    "deepseek3": [*_DEEPSEEK, "function<｜tool▁sep｜>look\n```json\n{", "\n```"],
    "deepseek3.1": [*_DEEPSEEK, "look<｜tool▁sep｜>{"],
    "pythonic": ["[look(", "[look(a=1)", ", look(b='x')", "]", ")", ", ", "'", "1", "a=", "look(c=[1, {}])"],
    "qwen3-coder": [
        *("<tool_call>", "</tool_call>", "<function=look>", "</function>", "<parameter=string_0>", "</parameter>"),
        *("\n<parameter=a>\n", "<parameter=integer_0>\n", "<parameter=look>", "<function=unknown>"),
    ],
    "glm4.5": [
        *("<tool_call>", "</tool_call>", "<tool_call>look", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        *("<arg_key>string_0</arg_key>", "<arg_key>a</arg_key>\n<arg_value>", "<tool_call>unknown"),
    ],
    "minimax-m2": [
        *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="look">', "</invoke>", "</parameter>"),
        *('<parameter name="string_0">', '<parameter name="a">', '<minimax:tool_call>\n<invoke name="look">'),
        '<invoke name="unknown">',
    ],
    "deepseek3.2": [
        *("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", '<｜DSML｜invoke name="look">', "</｜DSML｜invoke>"),
        *('<｜DSML｜parameter name="string_0" string="true">', '<｜DSML｜parameter name="a" string="false">'),
        *("</｜DSML｜parameter>", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">'),
        '<｜DSML｜invoke name="unknown">',
    ],
    "harmony": [
        *("<|channel|>", "analysis", "final", "commentary", " to=functions.look", "<|constrain|>json", "<|message|>"),
        *("<|end|>", "<|start|>assistant", "<|start|>", "<|call|>"),
        *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ],
}
anywhere = ["\n", " ", "words", "{", "}", "}}", '"', "\\", '{"a": "}"}', "<", "[", "|>"]


def texts(form: str, *, whole: bool = True) -> st.SearchStrategy[str]:
    """Return a strategy for calls, markers and parts of markers in any order; without `whole`, only for parts."""
    marks = PIECES[form]
    calls = [WRITERS[form].write("", [("look", {"a": [1]})])] if whole else []
    parts = [mark[:-1] for mark in marks if len(mark) > 3]
    pieces = st.sampled_from([*(marks if whole else []), *calls, *parts, *anywhere])
    return st.lists(pieces, max_size=12).map("".join)
