"""Harmony, the output format of gpt-oss: an answer consists of messages, and each has a channel.

    <|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>final<|message|>CONTENT<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The channel `analysis` has reasoning, the others content. A message with a recipient is a call: the recipient may be
before or after the channel, and models write calls into `analysis` as well. A call ends the answer.
https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto
from typing import Any

import regex

from ..errors import InvalidMessages
from .incremental import BLANKS, BracketTracker, IncrementalParser, Step, first_mark, partial_mark
from .output_parser import ContentPart, OutputParser, OutputPart, ReasoningPart
from .tool_call_format import Functions, FunctionSignature, GrammarSpec, GrammarToolCallFormat

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_BEHIND_BODY = (*_ENDS, _START)  # `_START`, too, because models may omit an end mark
_NAMESPACE = "functions."
_HEADER = regex.compile(
    rf"{BLANKS}(?:(?:{regex.escape(_START)})?{BLANKS}assistant)?{BLANKS}(?:to=(?P<role_to>[^\s<]{{1,99}}){BLANKS})?"
    rf"{regex.escape(_CHANNEL)}{BLANKS}(?P<channel>\w{{1,32}})(?:\s{{1,99}}+to=(?P<to>[^\s<]{{1,99}}))?"
    rf"{BLANKS}(?:{regex.escape(_CONSTRAIN)})?{BLANKS}\w{{0,32}}{BLANKS}{regex.escape(_MESSAGE)}"
)
_BETWEEN_MESSAGES = "\n\n"  # separates messages of one kind, whose texts are joined in one field


class Harmony(GrammarToolCallFormat):
    """The format of gpt-oss."""

    name = "harmony"
    marks = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
    takes_one = True
    frames_answers = True

    def is_taught_by(self, template: str) -> bool:
        return all(words in template for words in (_CHANNEL, _MESSAGE, "<|call|>"))

    def new_parser(self, functions: Functions, *, at_most_one: bool = False) -> OutputParser:
        return HarmonyParser(functions)

    def calls_grammar(self, functions: Sequence[FunctionSignature], *, at_most_one: bool = False) -> GrammarSpec:
        return _behind(["analysis"], _any_of([_call(function) for function in functions]))

    def text_and_calls_grammar(
        self, functions: Sequence[FunctionSignature], *, at_most_one: bool = False
    ) -> GrammarSpec:
        final = _sequence(_text(f"{_CHANNEL}final{_MESSAGE}"), _any_words(*_ENDS))
        return _behind(["analysis", "commentary"], _any_of([final, *[_call(function) for function in functions]]))

    def answer_grammar(self, content: GrammarSpec) -> GrammarSpec:
        return _behind(["analysis"], _sequence(_text(f"{_CHANNEL}final{_MESSAGE}"), content))

    def adapt_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Move reasoning to `thinking`, its name in the templates. They show one call per message.

        The content of a message with a call becomes reasoning, too.
        """
        calls = message.get("tool_calls") or ()
        if len(calls) > 1:
            raise InvalidMessages(f"a message has {len(calls)} tool_calls, and this model's take one: send one in each")
        thoughts = [message.get("reasoning_content"), message["content"] if calls else None]
        thinking = _BETWEEN_MESSAGES.join(filter(None, thoughts))
        turn = {**message, "content": "" if calls else message["content"] or ""}  # a string: templates search it
        return {**turn, "thinking": thinking} if thinking else turn


class _State(Enum):
    HEADER = auto()
    BODY = auto()
    CALL = auto()  # after the header of a call
    ARGUMENTS = auto()
    RAW = auto()  # text outside of messages
    DISCARD = auto()  # after a call: the rest is dropped


class HarmonyParser(IncrementalParser):
    """The `OutputParser` of Harmony. Text outside of messages, or in messages to unknown recipients, is content."""

    DISCARD = _State.DISCARD

    def __init__(self, functions: Collection[str]) -> None:
        super().__init__(_State.HEADER)
        self._functions = functions
        self._kind: type[ReasoningPart] | type[ContentPart] = ContentPart  # kind of the current message
        self._told: set[type[ReasoningPart] | type[ContentPart]] = set()  # kinds of earlier messages
        self._is_fresh = False  # nothing of the current message has been reported yet
        self._header_length = 0
        self._called = ""  # the function of the current call
        self._nesting = BracketTracker()

    def _other_steps(self) -> Mapping[Enum, Step]:
        return {
            _State.HEADER: self._read_header,
            _State.BODY: self._read_body,
            _State.CALL: self._read_begin,
            _State.ARGUMENTS: self._read_arguments,
            _State.RAW: self._look_for_header,
        }

    def _read_header(self, finished: bool) -> list[OutputPart]:
        found = _HEADER.match(self._held, partial=True)
        if found is None or (found.partial and finished):
            return self._take_for_text()
        if found.partial:
            return []
        recipient = found["role_to"] or found["to"]
        if recipient is None:
            self._state, self._held = _State.BODY, self._held[found.end() :]
            self._kind, self._is_fresh = ReasoningPart if found["channel"] == "analysis" else ContentPart, True
            return []
        called = recipient.removeprefix(_NAMESPACE)
        if called not in self._functions:
            return self._take_for_text()
        self._state, self._called, self._header_length = _State.CALL, called, found.end()
        return []

    def _read_body(self, finished: bool) -> list[OutputPart]:
        found = first_mark(self._held, *_BEHIND_BODY)
        if found is None:
            return self._emit_text(len(self._held) - (0 if finished else partial_mark(self._held, *_BEHIND_BODY)))
        at, mark = found
        said = self._emit_text(at)
        self._state = _State.HEADER
        if mark != _START:  # `_START` belongs to the next header
            self._held = self._held.removeprefix(mark)
        return said

    def _read_begin(self, finished: bool) -> list[OutputPart]:
        """Read the beginning of a call's arguments, which are an object or missing."""
        content = self._held[self._header_length :].lstrip()
        if content.startswith("{"):
            self._state, self._held = _State.ARGUMENTS, content
            return self._begin_call(self._called)
        if content.startswith(_ENDS) or (finished and not content):
            self._state = _State.DISCARD
            return self._begin_call(self._called) + self._last_arguments("{}")
        if finished or (content and not any(end.startswith(content) for end in _ENDS)):
            return self._take_for_text()
        return []

    def _read_arguments(self, finished: bool) -> list[OutputPart]:
        end = self._nesting.end_in(self._held)
        if end is None:
            return self._arguments(self._take(len(self._held)))
        self._state = _State.DISCARD
        return self._last_arguments(self._take(end))

    def _take_for_text(self) -> list[OutputPart]:
        """Treat the held text as content, up to the next message."""
        self._state, self._kind, self._is_fresh = _State.RAW, ContentPart, False
        return self._emit_text(1)  # emit a character, so that the text is not taken for a header again

    def _look_for_header(self, finished: bool) -> list[OutputPart]:
        at = self._held.find(_START)
        if at < 0:
            return self._emit_text(len(self._held) - (0 if finished else partial_mark(self._held, _START)))
        self._state = _State.HEADER
        return self._emit_text(at)

    def _emit_text(self, length: int) -> list[OutputPart]:
        said = self._take(length)
        if not said:
            return []
        if self._is_fresh and self._kind in self._told:
            said = _BETWEEN_MESSAGES + said
        self._is_fresh = False
        self._told.add(self._kind)
        return [self._kind(said)]


def _text(value: str) -> GrammarSpec:
    return {"type": "const_string", "value": value}


def _sequence(*elements: GrammarSpec) -> GrammarSpec:
    return {"type": "sequence", "elements": list(elements)}


def _any_of(choices: Sequence[GrammarSpec]) -> GrammarSpec:
    return choices[0] if len(choices) == 1 else {"type": "or", "elements": list(choices)}


def _any_words(*ends: str) -> GrammarSpec:
    """Return the grammar of any text within a message."""
    return {"type": "any_text", "excludes": [_START, _CHANNEL, _MESSAGE, *ends]}


def _behind(channels: Sequence[str], last: GrammarSpec) -> GrammarSpec:
    """Return the grammar of a last message, and of messages in these channels that may precede it."""
    tags = [
        {"type": "tag", "begin": f"{_CHANNEL}{channel}{_MESSAGE}", "content": _any_words(), "end": "<|end|>"}
        for channel in channels
    ]
    before = _sequence(_any_of(tags), _text(f"{_START}assistant"))
    return _sequence({"type": "star", "content": before}, last)


def _call(function: FunctionSignature) -> GrammarSpec:
    to = f"to={_NAMESPACE}{function.name}"
    headers = [  # in the order of the specification, and in that of templates for earlier calls
        f"{_CHANNEL}commentary {to} {_CONSTRAIN}json{_MESSAGE}",
        f" {to}{_CHANNEL}commentary json{_MESSAGE}",
    ]
    return _sequence(_any_of([_text(header) for header in headers]), function.grammar)
