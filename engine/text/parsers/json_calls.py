"""Tool calls with JSON arguments: the base class of formats, their parser, and the formats.

        begin       its head, "{"               the object ends      close           more
OUTSIDE ─────> HEAD ─────────────> ARGUMENTS ─────────────> TAIL ────────> BETWEEN ──────> HEAD
                 ├── keys in another order ──> OBJECT ──it ends─────────────> ^ └── end, or no mark ──> OUTSIDE
                 └── other text, or an unknown function: it was content ──────────────────────────────────^
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto
from functools import cached_property
from typing import Any, ClassVar

import regex

from .argument_values import to_json
from .incremental import BLANKS, BracketTracker, InlineToolCallParser, Step
from .output_parser import OutputParser, OutputPart
from .tool_call_format import (
    DelimitedToolCallFormat,
    Functions,
    FunctionSignature,
    GrammarSpec,
    SectionToolCallFormat,
    with_short_ids,
)

_TYPE = rf'(?:"type"{BLANKS}:{BLANKS}"function"{BLANKS},{BLANKS})?'  # Llama may write it before the name
_NAMED = regex.compile(rf'{BLANKS}\{{{BLANKS}{_TYPE}"name"{BLANKS}:{BLANKS}"(?P<name>[^"\\]*)(?P<end>"?)')


class JsonToolCallFormat(DelimitedToolCallFormat):
    """BEGIN call [MORE call ...] END, where a call is HEAD, arguments, and CLOSE.

    `head` is a pattern with a group `name`; it ends with the brace that opens the arguments. `lead` is a pattern for
    the text between `begin` and the first head.
    """

    begin: ClassVar[str] = ""  # "": a single call is the whole answer
    lead: ClassVar[str] = ""
    head: ClassVar[str]
    close: ClassVar[str] = ""
    more: ClassVar[str] = ""
    end: ClassVar[str] = ""
    object_key: ClassVar[str] = ""  # if a call is an object with keys in any order: the key of the arguments

    def new_parser(self, functions: Functions, *, at_most_one: bool = False) -> OutputParser:
        return JsonToolCallParser(self, functions, at_most_one=at_most_one or self.takes_one)

    @cached_property
    def first_head(self) -> regex.Pattern[str]:
        """Pattern from `begin` to the arguments of the first call."""
        return regex.compile(regex.escape(self.begin) + self.lead + self.head)

    @cached_property
    def next_head(self) -> regex.Pattern[str]:
        """Pattern from `more` to the arguments of another call."""
        return regex.compile(regex.escape(self.more) + self.head)

    @cached_property
    def first_object(self) -> regex.Pattern[str]:
        """Pattern from `begin` to the opening brace of the first call's object."""
        return regex.compile(regex.escape(self.begin) + self.lead + BLANKS + r"\{")

    @cached_property
    def next_object(self) -> regex.Pattern[str]:
        """Pattern from `more` to the opening brace of another call's object."""
        return regex.compile(regex.escape(self.more) + BLANKS + r"\{")


class _State(Enum):
    OUTSIDE = auto()
    START = auto()  # beginning of an answer that may be one call without marks
    HEAD = auto()
    OBJECT = auto()
    ARGUMENTS = auto()
    TAIL = auto()
    BETWEEN = auto()
    TEXT = auto()  # the rest is content
    DISCARD = auto()  # the rest is dropped: no more calls are allowed


class JsonToolCallParser(InlineToolCallParser):
    """The `OutputParser` of `JsonToolCallFormat`."""

    OUTSIDE, HEAD, DISCARD = _State.OUTSIDE, _State.HEAD, _State.DISCARD

    def __init__(self, form: JsonToolCallFormat, functions: Collection[str], *, at_most_one: bool) -> None:
        """`at_most_one`: drop everything after the first call."""
        marks = (form.begin,) if form.begin else ()
        super().__init__(_State.OUTSIDE if marks else _State.START, *marks)
        self._form = form
        self._functions = functions
        self._at_most_one = at_most_one
        self._nesting = BracketTracker()
        self._object_at = 0  # offset in the held text

    def _other_steps(self) -> Mapping[Enum, Step]:
        return {
            _State.OUTSIDE: self._look_for_call,
            _State.START: self._look_at_start,
            _State.HEAD: self._read_head,
            _State.OBJECT: self._read_object,
            _State.ARGUMENTS: self._read_arguments,
            _State.TAIL: self._skip_tail,
            _State.BETWEEN: self._look_between,
            _State.TEXT: self._pass_on,
        }

    def _look_at_start(self, finished: bool) -> list[OutputPart]:
        rest = self._held.lstrip()
        if rest:
            self._state = _State.HEAD if rest.startswith("{") else _State.TEXT
        return self._emit_text(len(self._held)) if finished and not rest else []

    def _read_head(self, finished: bool) -> list[OutputPart]:
        at = self._behind_blanks()
        is_first = self._mark == self._form.begin
        found = (self._form.first_head if is_first else self._form.next_head).match(self._held, at, partial=True)
        if found is None:
            pattern = self._form.first_object if is_first else self._form.next_object
            begun = pattern.match(self._held, at) if self._form.object_key else None
            if begun is None:
                return self._take_for_text()
            self._state, self._object_at = _State.OBJECT, begun.end() - 1
            self._nesting = BracketTracker(begin=self._object_at)
            return []
        if found.partial:
            return [] if not finished and self._may_be_call(at) else self._take_for_text()
        name = _plain(found["name"])
        if name is None or name not in self._functions:
            return self._take_for_text()
        self._held = self._held[found.end() - 1 :]
        self._state, self._nesting = _State.ARGUMENTS, BracketTracker()
        return self._begin_call(name)

    def _may_be_call(self, at: int) -> bool:
        """Return whether an incomplete head may become a call. A plain JSON object may also be an ordinary answer."""
        named = None if self._form.begin else _NAMED.match(self._held, at)
        if named is None:
            return True
        if named["end"]:
            return named["name"] in self._functions
        return any(function.startswith(named["name"]) for function in self._functions)

    def _read_object(self, finished: bool) -> list[OutputPart]:
        end = self._nesting.end_of(self._held)
        if end is None:
            return self._take_for_text() if finished else []
        call = _object_in(self._held[self._object_at : end], self._form.object_key)
        if call is None or call[0] not in self._functions:
            return self._take_for_text()
        name, arguments = call
        self._held = self._held[end:]
        if self._form.close == "}":  # the object's own closing brace, which has been consumed
            self._end_call()
        else:
            self._state = _State.TAIL
        return self._begin_call(name) + self._last_arguments(arguments)

    def _take_for_text(self) -> list[OutputPart]:
        if not self._form.begin:
            self._state = _State.TEXT
            return []
        return super()._take_for_text()

    def _read_arguments(self, finished: bool) -> list[OutputPart]:
        end = self._nesting.end_in(self._held)
        if end is None:
            return self._arguments(self._take(len(self._held)))
        self._state = _State.TAIL
        return self._last_arguments(self._take(end))

    def _skip_tail(self, finished: bool) -> list[OutputPart]:
        close = self._form.close
        at = self._held.find(close)
        if at >= 0:
            self._held = self._held[at + len(close) :]
            self._end_call()
        else:
            self._held = self._held[max(0, len(self._held) - len(close) + 1) :]
        return []

    def _end_call(self) -> None:
        self._state = _State.DISCARD if self._at_most_one else _State.BETWEEN

    def _look_between(self, finished: bool) -> list[OutputPart]:
        more, end = self._form.more, self._form.end
        rest = self._held.lstrip()
        if more and rest.startswith(more):
            self._state, self._mark = _State.HEAD, more
        elif end and rest.startswith(end):
            self._state, self._held = _State.OUTSIDE, rest[len(end) :]
        elif finished or not any(mark.startswith(rest) for mark in (more, end) if mark):
            self._state = _State.OUTSIDE
        return []

    def _pass_on(self, finished: bool) -> list[OutputPart]:
        return self._emit_text(len(self._held))


def _plain(name: str) -> str | None:
    """Return a function's name without quotes; None if it is not a JSON string."""
    if not name.startswith('"'):
        return name
    try:
        return str(json.loads(name, strict=False))
    except ValueError:
        return None


def _object_in(text: str, key: str) -> tuple[str, str] | None:
    """Return the function's name and its arguments as JSON; None if the object is no call."""
    try:
        call = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    name, arguments = call.get("name"), call.get(key)
    if not (isinstance(name, str) and isinstance(arguments, dict)):
        return None
    return name, to_json(arguments)


_QUOTED = r'(?P<name>"(?:[^"\\]|\\.){0,400}")'
_BARE = r"(?P<name>[\w.-]{1,64})"


def _object_head(key: str, first: str = "") -> str:
    r"""Return a pattern for `{"name": NAME, KEY: {`; `first` is a pattern for what may come before the name."""
    return rf'{BLANKS}\{{{BLANKS}{first}"name"{BLANKS}:{BLANKS}{_QUOTED}{BLANKS},{BLANKS}"{key}"{BLANKS}:{BLANKS}\{{'


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
    """`{"name": NAME, "parameters": {...}}`, which is the whole answer: Llama 3.1 to 3.3.

    Meta's examples of answers begin with `"type": "function"`, which its templates do not ask for.
    """

    name = "llama3"
    taught_by = ('{"name": function name, "parameters":',)
    marks = ()
    takes_one = True
    head, close = _object_head("parameters", _TYPE), "}"
    triggers = ('{"name": ', '{"type": "function", "name": ')
    opening, closing = '{"name": "%s", "parameters": ', "}"

    def text_and_calls_grammar(
        self, functions: Sequence[FunctionSignature], *, at_most_one: bool = False
    ) -> GrammarSpec:
        """Return the grammar; it also constrains calls that begin with their type, which the parser accepts."""
        opening = self.opening.replace("{", '{"type": "function", ')
        typed = [self._tag(function, opening, self.closing) for function in functions]
        grammar = super().text_and_calls_grammar(functions, at_most_one=at_most_one)
        return {**grammar, "tags": [*grammar["tags"], *typed]}


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
    """DeepSeek's formats. DeepSeek's own templates show earlier calls, but do not list tools."""

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
