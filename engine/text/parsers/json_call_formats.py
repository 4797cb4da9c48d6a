"""Tool-call formats with JSON arguments: marks around calls, and a head that names the function."""

from __future__ import annotations

from typing import Any

from .incremental import BLANKS
from .json_call_parser import JsonToolCallFormat
from .tool_call_format import SectionToolCallFormat, with_short_ids

_QUOTED = r'(?P<name>"(?:[^"\\]|\\.){0,400}")'
_BARE = r"(?P<name>[\w.-]{1,64})"


def _object_head(key: str) -> str:
    r"""Return a pattern for `{"name": NAME, KEY: {`."""
    return rf'{BLANKS}\{{{BLANKS}"name"{BLANKS}:{BLANKS}{_QUOTED}{BLANKS},{BLANKS}"{key}"{BLANKS}:{BLANKS}\{{'


class Hermes(JsonToolCallFormat):
    """`<tool_call>{"name": NAME, "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

    name = "hermes"
    taught_by = ("<tool_call>", "arguments")
    taught_not_by = ("<function=", "<arg_key>")  # tags of other formats
    begin, close = "<tool_call>", "</tool_call>"
    marks = (begin, close)
    triggers = (begin,)
    object_key = "arguments"
    head = _object_head(object_key)
    opening, closing, separator = '<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>", "\n"


class Llama3(JsonToolCallFormat):
    """`{"name": NAME, "parameters": {...}}`, which is the whole answer: Llama 3.1 to 3.3."""

    name = "llama3"
    taught_by = ('{"name": function name, "parameters":',)
    marks = ()
    takes_one = True
    head, close = _object_head("parameters"), "}"
    triggers = ('{"name": ',)
    opening, closing = '{"name": "%s", "parameters": ', "}"


class MistralList(SectionToolCallFormat, JsonToolCallFormat):
    """`[TOOL_CALLS] [{"name": NAME, "arguments": {...}}, ...]`: Mistral 7B v0.3, Mixtral 8x22B, Nemo, Small 3.1."""

    name = "mistral-list"
    taught_by = ("[TOOL_CALLS]",)
    taught_not_by = ("[ARGS]",)
    begin, lead, close, more, end = "[TOOL_CALLS]", BLANKS + r"\[", "}", ",", "]"
    marks = (begin,)
    object_key = "arguments"
    head = _object_head(object_key)
    section_lead = r" ?\["  # some tokenizers put a blank there
    opening, closing, separator = '{"name": "%s", "arguments": ', "}", ", "

    def adapt_message(self, message: dict[str, Any]) -> dict[str, Any]:
        return with_short_ids(message)


class MistralNamed(JsonToolCallFormat):
    """`[TOOL_CALLS]NAME[ARGS]{...}`, once for each call: Mistral Small 3.2, Devstral, Ministral 3, and later ones."""

    name = "mistral-named"
    taught_by = ("[TOOL_CALLS]", "[ARGS]")
    begin = "[TOOL_CALLS]"
    triggers = (begin,)
    marks = (begin, "[ARGS]", "[CALL_ID]")
    head = rf"{BLANKS}{_BARE}{BLANKS}(?:\[CALL_ID\]{BLANKS}\w{{1,64}}+{BLANKS})?(?:\[ARGS\]{BLANKS})?\{{"
    opening, closing = "[TOOL_CALLS]%s[ARGS]", ""

    def adapt_message(self, message: dict[str, Any]) -> dict[str, Any]:
        return with_short_ids(message)


_CALLS, _END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _END_CALL, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class _DeepSeek(SectionToolCallFormat, JsonToolCallFormat):
    """DeepSeek's formats. The makers' templates show earlier calls, and do not list tools."""

    begin, close, more, end = _CALLS, _END_CALL, _CALL, _END_CALLS
    marks = (_CALLS, _END_CALLS, _CALL, _END_CALL, _SEP)
    lead = BLANKS + _CALL


def _introduction(opening: str, closing: str, separator: str) -> str:
    call = f"{opening % 'NAME'}ARGUMENTS{closing}"
    return (
        f"To call one or more of them, end your answer with:\n{_CALLS}{call}{_END_CALLS}\n\n"
        "NAME is that of the function, exactly, and ARGUMENTS are a JSON object that fits its parameters. "
        f"Several calls follow each other like this: {call}{separator}{call}"
    )


class DeepSeek3(_DeepSeek):
    """A name, and arguments in a JSON code block, between special tokens: DeepSeek-V3, -R1."""

    name = "deepseek3"
    taught_by = (_CALL, "```json")
    head = rf"{BLANKS}function{BLANKS}{_SEP}{BLANKS}{_BARE}{BLANKS}```json{BLANKS}\{{"
    opening, closing, separator = f"{_CALL}function{_SEP}%s\n```json\n", f"\n```{_END_CALL}", "\n"
    introduction = _introduction(opening, closing, separator)


class DeepSeek31(_DeepSeek):
    """A name and arguments between special tokens: DeepSeek-V3.1."""

    name = "deepseek3.1"
    taught_by = (_CALL,)
    taught_not_by = ("```json",)
    head = rf"{BLANKS}{_BARE}{BLANKS}{_SEP}{BLANKS}\{{"
    opening, closing, separator = f"{_CALL}%s{_SEP}", _END_CALL, ""
    introduction = _introduction(opening, closing, separator)
