"""Tool calls in Python syntax, in a list that is the whole answer.

`[look(at="here"), cut(size=1)]`: Llama 3.2 and 4, if their template asks for it.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from enum import Enum, auto
from typing import Any

import regex

from .argument_values import to_json
from .incremental import BLANKS, BracketTracker, IncrementalParser, Step
from .output_parser import ContentPart, OutputParser, OutputPart
from .tool_call_format import Functions, ToolCallFormat

_NAME = r"(?P<name>[\w.-]{1,64})"
_FIRST = regex.compile(rf"{BLANKS}\[{BLANKS}{_NAME}{BLANKS}\(")
_NEXT = regex.compile(rf"{BLANKS},{BLANKS}{_NAME}{BLANKS}\(")
_END = regex.compile(rf"{BLANKS}\]\s*+")
_QUOTES = "\"'"
_JSON_NAMES = {"true": True, "false": False, "null": None}  # JSON's spellings, which models write as well


class Pythonic(ToolCallFormat):
    """The format. It has no grammar, because a JSON schema cannot be enforced in Python's syntax."""

    name = "pythonic"
    marks = ()

    def is_taught_by(self, template: str) -> bool:
        return "func_name1(params_name1=params_value1" in template

    def new_parser(self, functions: Functions, *, at_most_one: bool = False) -> OutputParser:
        return PythonicParser(functions, at_most_one=at_most_one)


class _State(Enum):
    HEAD = auto()  # head of a call
    ARGUMENTS = auto()
    END = auto()  # end of the list
    TEXT = auto()  # the rest is content
    DISCARD = auto()  # the rest is dropped: no more calls are allowed


class PythonicParser(IncrementalParser):
    """The `OutputParser` of `Pythonic`. It reports only complete calls; anything else is content."""

    DISCARD = _State.DISCARD

    def __init__(self, functions: Collection[str], *, at_most_one: bool) -> None:
        super().__init__(_State.HEAD)
        self._functions = functions
        self._at_most_one = at_most_one
        self._name = ""
        self._arguments_at = 0  # offset in the held text
        self._nesting = BracketTracker(_QUOTES)

    def _other_steps(self) -> Mapping[Enum, Step]:
        return {
            _State.HEAD: self._read_head,
            _State.ARGUMENTS: self._read_arguments,
            _State.END: self._read_end,
            _State.TEXT: self._pass_on,
        }

    def _read_head(self, finished: bool) -> list[OutputPart]:
        found = (_NEXT if self.num_calls else _FIRST).match(self._held, partial=True)
        if found is None:
            self._state = _State.END if self.num_calls else _State.TEXT
        elif found.partial:
            self._state = _State.TEXT if finished else _State.HEAD
        elif found["name"] not in self._functions:
            self._state = _State.TEXT
        else:
            self._state, self._name, self._arguments_at = _State.ARGUMENTS, found["name"], found.end() - 1
            self._nesting = BracketTracker(_QUOTES, begin=self._arguments_at)
        return []

    def _read_arguments(self, finished: bool) -> list[OutputPart]:
        end = self._nesting.end_of(self._held)
        if end is None:
            self._state = _State.TEXT if finished else _State.ARGUMENTS
            return []
        arguments = _as_json(self._held[self._arguments_at : end])
        if arguments is None:
            self._state = _State.TEXT
            return []
        self._held = self._held[end:]
        self._state = _State.DISCARD if self._at_most_one else _State.HEAD
        return self._begin_call(self._name) + self._last_arguments(arguments)

    def _read_end(self, finished: bool) -> list[OutputPart]:
        found = _END.fullmatch(self._held, partial=True)
        if found is None:
            self._state = _State.TEXT
        elif finished:
            self._held = ""
        return []

    def _pass_on(self, finished: bool) -> list[OutputPart]:
        said = self._take(len(self._held))
        return [ContentPart(said)] if said else []


def _as_json(arguments: str) -> str | None:
    """Return `(name=value, ...)` as JSON; None if the text has another form."""
    try:
        call = ast.parse(f"f{arguments}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        given = {keyword.arg: _value(keyword.value) for keyword in call.keywords if keyword.arg is not None}
        if len(given) < len(call.keywords):
            return None
        return to_json(given)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=elements):
            return [_value(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {ast.literal_eval(key): _value(value) for key, value in zip(keys, values, strict=True) if key}
    return ast.literal_eval(node)
