"""Tool calls with a tag for each argument: the base class of formats, their parser, and the formats.

The parser converts arguments to JSON. Between tags, strings are written as they are, other values as JSON; the
function's schema says which values are strings.

        a mark       name, first key                  end, no key             tail, or none
OUTSIDE ──────> HEAD ───────────────> VALUE ──────────────────────────> TAIL ───────────────> OUTSIDE
                 │                      ^ └── end, next key ──┐          ^ └── more ──> HEAD
                 │                      └─────────────────────┘          │
                 ├── name, and no key ───────────────────────────────────┘
                 └── other text, or an unknown function: it was content ────────────────────> OUTSIDE

A value may contain text that looks like its end: it ends only before another key or the end of the call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto
from functools import cached_property
from typing import Any, ClassVar

import regex

from .argument_values import TEXT, TYPES, argument_names, argument_types, json_of_text, to_json
from .incremental import BLANKS, InlineToolCallParser, Step
from .output_parser import OutputParser, OutputPart
from .tool_call_format import DelimitedToolCallFormat, Functions, FunctionSignature, GrammarSpec, SectionToolCallFormat


class XmlToolCallFormat(DelimitedToolCallFormat):
    """FIRST, with the name, then KEY value VALUE_CLOSE for each argument, CLOSE [NEXT ... CLOSE ...] TAIL.

    All parts but the values are patterns; parts that models tend to forget are optional. KEY extends to the value.
    """

    first: ClassVar[str]
    next: ClassVar[str] = "(?!)"  # pattern of the beginning of another call within the same outer tags
    more: ClassVar[str] = ""  # the text that NEXT begins with
    key: ClassVar[str]
    value_close: ClassVar[str]
    forgotten_close: ClassVar[str] = "(?P<known_key>(?!))"  # the group `known_key` must be an argument of the function
    close: ClassVar[str]
    tail: ClassVar[str] = ""  # optional text
    style: ClassVar[str]  # xgrammar's name for the format of arguments

    def new_parser(self, functions: Functions, *, at_most_one: bool = False) -> OutputParser:
        return XmlToolCallParser(self, functions, at_most_one=at_most_one)

    @cached_property
    def head(self) -> regex.Pattern[str]:
        """Pattern from the mark to the first argument's value, or to the end of a call without arguments."""
        return regex.compile(rf"{self.first}{BLANKS}(?:{self.key}|{self.close})")

    @cached_property
    def next_head(self) -> regex.Pattern[str]:
        """The same pattern, beginning with `more` instead of the mark."""
        return regex.compile(rf"{self.next}{BLANKS}(?:{self.key}|{self.close})")

    @cached_property
    def value_end(self) -> regex.Pattern[str]:
        """Pattern from a value's end to the next value, or to the end of the call."""
        return regex.compile(rf"{self.value_close}{BLANKS}(?:{self.key}|{self.close})|{self.forgotten_close}")

    @cached_property
    def last_close(self) -> regex.Pattern[str]:
        """Pattern from a value's end to the end of the call, if the call's closing tag ends the answer."""
        return regex.compile(rf"\n?(?:{self.close})")

    def types(self, key: regex.Match[str], allowed: frozenset[str]) -> frozenset[str]:
        """Return the possible types of the value after `key`, out of those that the function's schema allows."""
        return allowed

    def _arguments(self, function: FunctionSignature) -> GrammarSpec:
        return {**function.grammar, "style": self.style}


class _State(Enum):
    OUTSIDE = auto()
    HEAD = auto()
    VALUE = auto()
    TAIL = auto()
    DISCARD = auto()  # the rest is dropped: no more calls are allowed


class XmlToolCallParser(InlineToolCallParser):
    """The `OutputParser` of `XmlToolCallFormat`. It reports strings as they arrive, other values once complete."""

    OUTSIDE, HEAD, DISCARD = _State.OUTSIDE, _State.HEAD, _State.DISCARD

    def __init__(self, form: XmlToolCallFormat, functions: Functions, *, at_most_one: bool) -> None:
        """`at_most_one`: drop everything after the first call."""
        super().__init__(_State.OUTSIDE, *form.triggers)
        self._form = form
        self._functions = functions
        self._at_most_one = at_most_one
        self._parameters: Mapping[str, Any] = {}  # JSON schema of the called function's arguments
        self._names: Collection[str] = ()  # names of its arguments
        self._has_keys = False
        self._types = TYPES  # types of the current value
        self._value = ""  # the value so far, unless it is reported as it arrives

    def _other_steps(self) -> Mapping[Enum, Step]:
        return {
            _State.OUTSIDE: self._look_for_call,
            _State.HEAD: self._read_head,
            _State.VALUE: self._read_values,
            _State.TAIL: self._skip_tail,
        }

    def _read_head(self, finished: bool) -> list[OutputPart]:
        head = self._form.next_head if self._mark == self._form.more else self._form.head
        found = head.match(self._held, self._behind_blanks(), partial=True)
        if found is None or (found.partial and finished):
            return self._take_for_text()
        if found.partial:
            return []
        if found["name"] not in self._functions:
            return self._take_for_text()
        self._parameters, self._has_keys = self._functions[found["name"]], False
        self._names = argument_names(self._parameters)
        self._take(found.end())
        return self._begin_call(found["name"]) + self._go_on(found, found["key"])

    def _go_on(self, found: regex.Match[str], key: str | None) -> list[OutputPart]:
        """Begin the next argument, or end the call if there is none."""
        if key is None:
            return self._end_call()
        self._state, self._value = _State.VALUE, ""
        self._types = self._form.types(found, argument_types(self._parameters, key))
        before = ", " if self._has_keys else "{"
        self._has_keys = True
        return self._arguments(f"{before}{to_json(key)}: {self._quote}")

    @property
    def _quote(self) -> str:
        """The JSON quote around a string that is reported as it arrives; "" for other values."""
        return '"' if self._types == TEXT else ""

    def _read_values(self, finished: bool) -> list[OutputPart]:
        parts: list[OutputPart] = []
        while self._state is _State.VALUE:
            found = self._find_end()
            end = len(self._held) if found is None else found.start()
            parts += self._grow(end)
            if found is not None and not found.partial:
                self._take(found.end() - end)
                parts += self._end_value() + self._go_on(found, found["key"] or found["known_key"])
            elif finished and self._form.last_close.match(self._held):
                self._held = ""
                parts += self._end_value() + self._end_call()
            else:
                break
        return parts

    def _find_end(self) -> regex.Match[str] | None:
        """Find the end of the value in the held text, or a beginning of it."""
        for found in self._form.value_end.finditer(self._held, overlapped=True, partial=True):
            if found.partial or found["known_key"] is None or found["known_key"] in self._names:
                return found
        return None

    def _grow(self, length: int) -> list[OutputPart]:
        """Extend the value by held text."""
        text = self._take(length)
        if self._quote:
            return self._arguments(to_json(text)[1:-1])
        self._value += text
        return []

    def _end_value(self) -> list[OutputPart]:
        return self._arguments(self._quote or json_of_text(self._value, self._types))

    def _end_call(self) -> list[OutputPart]:
        self._state = _State.DISCARD if self._at_most_one else _State.TAIL
        return self._last_arguments("}" if self._has_keys else "{}")

    def _skip_tail(self, finished: bool) -> list[OutputPart]:
        more, tail, rest = self._form.more, self._form.tail, self._held.lstrip()
        if more and rest.startswith(more):
            self._state, self._mark = _State.HEAD, more
        elif tail and rest.startswith(tail):
            self._state, self._held = _State.OUTSIDE, rest[len(tail) :]
        elif finished or not (more.startswith(rest) or tail.startswith(rest)):
            self._state = _State.OUTSIDE
        return []


_NAME = r"(?P<name>[\w.-]{1,64})"


class Qwen3Coder(XmlToolCallFormat):
    """`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`, each in a line of its own.

    Qwen3-Coder, Qwen3.5, Nemotron 3. In long answers these models forget to close values.
    """

    name = "qwen3-coder"
    taught_by = ("<tool_call>", "<function=", "<parameter=")
    triggers = ("<tool_call>", "<function=")  # Qwen3-Coder may omit the first
    marks = ("<tool_call>", "</tool_call>")
    first = rf"(?:<tool_call>{BLANKS})?<function={_NAME}>"
    key = r"<parameter=(?P<key>[^<>\n]{1,200})>(?:\n|(?=[^\n]))"
    value_close = r"\n?</parameter>"
    forgotten_close = rf"\n?</function>{BLANKS}</tool_call>|\n<parameter=(?P<known_key>[^<>\n]{{1,200}})>\n"
    close = "</function>|</tool_call>"
    tail = "</tool_call>"
    style = "qwen_xml"
    opening, closing, separator = "<tool_call>\n<function=%s>\n", "</function>\n</tool_call>", "\n"

    def text_and_calls_grammar(
        self, functions: Sequence[FunctionSignature], *, at_most_one: bool = False
    ) -> GrammarSpec:
        """Return the grammar; it also constrains calls without the outer tags, which the parser accepts."""
        opening = self.opening.removeprefix("<tool_call>\n")
        bare = [self._tag(function, opening, "</function>") for function in functions]
        grammar = super().text_and_calls_grammar(functions, at_most_one=at_most_one)
        return {**grammar, "tags": [*grammar["tags"], *bare]}


class Glm45(XmlToolCallFormat):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>`: GLM-4.5 and later.

    Tags are in lines of their own up to GLM-4.6, in one line from GLM-4.7 on.
    """

    name = "glm4.5"
    taught_by = ("<tool_call>", "<arg_key>", "<arg_value>")
    triggers = ("<tool_call>",)
    marks = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    first = rf"<tool_call>{BLANKS}{_NAME}"
    key = (
        rf"<arg_key>(?P<key>[^<>\n]{{1,200}})</arg_key>{BLANKS}(?:<arg_value>|(?=[^<\s]))"  # GLM-4.7 may omit the last
    )
    value_close = "</arg_value>"
    close = "</tool_call>"
    style = "glm_xml"
    opening, closing, separator = "<tool_call>%s", "</tool_call>", "\n"

    def adapt_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Replace null content, which these templates would write as `None`."""
        return {**message, "content": message["content"] or ""}


_ATTRIBUTE = r'(?P<key>[^<>"\n]{1,200})'


class MiniMaxM2(SectionToolCallFormat, XmlToolCallFormat):
    """`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">value</parameter></invoke></minimax:tool_call>`.

    Each tag is in a line of its own, with any number of calls between the outer tags: MiniMax-M2 to M2.7.
    """

    name = "minimax-m2"
    begin, end = "<minimax:tool_call>", "</minimax:tool_call>"
    taught_by = (begin, "<invoke name=", "<parameter name=")
    triggers = (begin,)
    marks = (begin, end)
    next = rf'<invoke name="{_NAME}">'
    more = "<invoke name="
    first = rf"{begin}{BLANKS}{next}"
    key = rf'<parameter name="{_ATTRIBUTE}">'
    value_close, close, tail = "</parameter>", "</invoke>", end
    style = "minimax_xml"
    section_lead, opening, closing = r"\n", '<invoke name="%s">\n', "</invoke>\n"


class DeepSeek32(SectionToolCallFormat, XmlToolCallFormat):
    """MiniMax's format with other tags, which also say whether a value is a string: DeepSeek-V3.2.

    https://huggingface.co/deepseek-ai/DeepSeek-V3.2/blob/main/encoding/encoding_dsv32.py
    """

    name = "deepseek3.2"
    begin, end = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
    taught_by = (
        "｜DSML｜",
        "function_calls",
        "invoke name=",
        "parameter name=",
    )  # templates insert the mark in between
    triggers = (begin,)
    marks = ("｜DSML｜",)
    next = rf'<｜DSML｜invoke name="{_NAME}">'
    more = "<｜DSML｜invoke name="
    first = rf"{begin}{BLANKS}{next}"
    key = rf'<｜DSML｜parameter name="{_ATTRIBUTE}" string="(?P<is_text>true|false)">'
    value_close, close, tail = "</｜DSML｜parameter>", "</｜DSML｜invoke>", end
    style = "deepseek_xml"
    section_lead, opening, closing = r"\n", '<｜DSML｜invoke name="%s">\n', "</｜DSML｜invoke>\n"

    def types(self, key: regex.Match[str], allowed: frozenset[str]) -> frozenset[str]:
        """Return the allowed types; if they include strings and others, the model's `string` attribute decides."""
        return (allowed & TEXT if key["is_text"] == "true" else allowed - TEXT) or allowed
