"""Tool calls with a tag for each argument: the definition of a format, and the parser, which converts them to JSON.

        a mark       name, first key                  end, no key             tail, or none
OUTSIDE ──────> HEAD ───────────────> VALUE ──────────────────────────> TAIL ───────────────> OUTSIDE
                 │                      ^ └── end, next key ──┐          ^ └── more ──> HEAD
                 │                      └─────────────────────┘          │
                 ├── name, and no key ───────────────────────────────────┘
                 └── another text, or no such function: it was content ─────────────────────> OUTSIDE

A value may hold what looks like its end: it ends only before another key or the end of the call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum, auto
from functools import cached_property
from typing import Any, ClassVar

import regex

from .argument_values import TEXT, TYPES, argument_names, argument_types, json_of_text, to_json
from .incremental import BLANKS, InlineToolCallParser, Step
from .output_parser import OutputParser, OutputPart
from .tool_call_format import DelimitedToolCallFormat, Functions, FunctionSignature, GrammarSpec


class XmlToolCallFormat(DelimitedToolCallFormat):
    """FIRST, with the name, then KEY value VALUE_CLOSE for each argument, CLOSE [NEXT ... CLOSE ...] TAIL.

    All but the values are patterns here, in which parts that models forget are optional. KEY extends to the value.
    """

    first: ClassVar[str]
    next: ClassVar[str] = "(?!)"  # pattern of the beginning of another call within the same tags
    more: ClassVar[str] = ""  # the text with which NEXT begins
    key: ClassVar[str]
    value_close: ClassVar[str]
    forgotten_close: ClassVar[str] = "(?P<known_key>(?!))"  # the group `known_key` must be an argument of the function
    close: ClassVar[str]
    tail: ClassVar[str] = ""  # optional text
    style: ClassVar[str]  # xgrammar's name of the arguments' format

    def new_parser(self, functions: Functions, *, at_most_one: bool = False) -> OutputParser:
        return XmlToolCallParser(self, functions, at_most_one=at_most_one)

    @cached_property
    def head(self) -> regex.Pattern[str]:
        """Pattern from the mark to the first argument's value, or behind a call without arguments."""
        return regex.compile(rf"{self.first}{BLANKS}(?:{self.key}|{self.close})")

    @cached_property
    def next_head(self) -> regex.Pattern[str]:
        """Pattern of the same from `more` on."""
        return regex.compile(rf"{self.next}{BLANKS}(?:{self.key}|{self.close})")

    @cached_property
    def value_end(self) -> regex.Pattern[str]:
        """Pattern from a value's end to the next one, or behind the call."""
        return regex.compile(rf"{self.value_close}{BLANKS}(?:{self.key}|{self.close})|{self.forgotten_close}")

    @cached_property
    def last_close(self) -> regex.Pattern[str]:
        """Pattern from a value's end to the end of the call, if its tag is the last of the answer."""
        return regex.compile(rf"\n?(?:{self.close})")

    def types(self, key: regex.Match[str], allowed: frozenset[str]) -> frozenset[str]:
        """Return the types of the value behind `key`, of those that the function's schema allows."""
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
    """The `OutputParser` of `XmlToolCallFormat`. It reports text as it arrives, other values once they are complete."""

    OUTSIDE, HEAD, DISCARD = _State.OUTSIDE, _State.HEAD, _State.DISCARD

    def __init__(self, form: XmlToolCallFormat, functions: Functions, *, at_most_one: bool) -> None:
        """With `at_most_one`, anything behind the first call is dropped."""
        super().__init__(_State.OUTSIDE, *form.triggers)
        self._form = form
        self._functions = functions
        self._at_most_one = at_most_one
        self._parameters: Mapping[str, Any] = {}  # of the called function
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
        """The quote around a value that is reported as it arrives."""
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
        """Find the end of the value in the held text, or what may become it."""
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
