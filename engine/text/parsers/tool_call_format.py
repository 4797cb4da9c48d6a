"""Tool-call formats: how models write calls, as taught by their chat templates.

A format also converts the calls in earlier messages to the form that these templates expect.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .output_parser import OutputParser

# A format of xgrammar's structural tags: https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
GrammarSpec = dict[str, Any]
Functions = Mapping[str, Mapping[str, Any]]  # callable functions, each with the JSON schema of its arguments
SHORT_ID_CHARS = 9


@dataclass(frozen=True)
class FunctionSignature:
    """A function that may be called, and the JSON schema of its arguments."""

    name: str
    arguments: dict[str, Any]

    @property
    def grammar(self) -> GrammarSpec:
        """The grammar of its arguments."""
        # Models write one blank between parts; without a limit, small models sometimes write blanks without end.
        return {"type": "json_schema", "json_schema": self.arguments, "max_whitespace_cnt": 1}


class ToolCallFormat(ABC):
    """A format of tool calls. `at_most_one` limits an answer to one call; some formats (`takes_one`) allow only one."""

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]  # texts of the format; detokenizing keeps those that are special tokens
    takes_one: ClassVar[bool] = False  # an answer or an earlier message can have only one call
    frames_answers: ClassVar[bool] = False  # answers without calls have the format's marks, too
    introduction: ClassVar[str] = ""  # explains the format in the system message if a template does not list tools

    @abstractmethod
    def is_taught_by(self, template: str) -> bool:
        """Return whether a chat template teaches this format."""

    @abstractmethod
    def new_parser(self, functions: Functions, *, at_most_one: bool = False) -> OutputParser:
        """Return a parser for one answer. Calls of unknown functions are content."""

    def answer_grammar(self, content: GrammarSpec) -> GrammarSpec:
        """Return the grammar of an answer that is `content`, without calls."""
        return content

    def describe_tools(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the description of tools for the system message, if a template does not list them."""
        parts = ["## Tools"]
        for function in (tool["function"] for tool in tools):
            parts.append(f"### {function['name']}")
            parts.append(f"Description: {function.get('description', '')}")
            parts.append(f"Parameters: {json.dumps(function.get('parameters', {}), ensure_ascii=False)}")
        return "\n\n".join([*parts, self.introduction])

    def adapt_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message in the form that templates of this format expect. Raises `InvalidMessages`."""
        return message


class GrammarToolCallFormat(ToolCallFormat):
    """A format that a grammar can describe."""

    @abstractmethod
    def calls_grammar(self, functions: Sequence[FunctionSignature], *, at_most_one: bool = False) -> GrammarSpec:
        """Return the grammar of an answer that consists of one or more calls."""

    @abstractmethod
    def text_and_calls_grammar(
        self, functions: Sequence[FunctionSignature], *, at_most_one: bool = False
    ) -> GrammarSpec:
        """Return the grammar of an answer of free text, in which all calls must be valid."""


class DelimitedToolCallFormat(GrammarToolCallFormat):
    """A format with calls between `opening`, in which `%s` stands for the name, and `closing`.

    Grammars allow exactly this form; parsers accept variations.
    """

    taught_by: ClassVar[
        tuple[str, ...]
    ]  # a template teaches the format if it contains all of these texts, and none of `taught_not_by`
    taught_not_by: ClassVar[tuple[str, ...]] = ()
    triggers: ClassVar[tuple[str, ...]]  # every call begins with one of these, and ordinary text does not
    opening: ClassVar[str]
    closing: ClassVar[str]
    separator: ClassVar[str] = ""

    def is_taught_by(self, template: str) -> bool:
        unlike = any(words in template for words in self.taught_not_by)
        return not unlike and all(words in template for words in self.taught_by)

    def calls_grammar(self, functions: Sequence[FunctionSignature], *, at_most_one: bool = False) -> GrammarSpec:
        tags = {"tags": self._tags(functions), "stop_after_first": at_most_one or self.takes_one}
        return {"type": "tags_with_separator", "separator": self.separator, "at_least_one": True, **tags}

    def text_and_calls_grammar(
        self, functions: Sequence[FunctionSignature], *, at_most_one: bool = False
    ) -> GrammarSpec:
        tags = {"tags": self._tags(functions), "stop_after_first": at_most_one or self.takes_one}
        return {"type": "triggered_tags", "triggers": list(self.triggers), **tags}

    def _tags(self, functions: Sequence[FunctionSignature]) -> list[GrammarSpec]:
        return [self._tag(function, self.opening, self.closing) for function in functions]

    def _tag(self, function: FunctionSignature, opening: str, closing: str) -> GrammarSpec:
        return {"type": "tag", "begin": opening % function.name, "content": self._arguments(function), "end": closing}

    def _arguments(self, function: FunctionSignature) -> GrammarSpec:
        return function.grammar


class SectionToolCallFormat(DelimitedToolCallFormat):
    """A format that puts all calls of an answer into one section, from `begin` to `end`."""

    begin: ClassVar[str]
    end: ClassVar[str]
    section_lead: ClassVar[str] = ""  # pattern of the text between `begin` and the first call

    def calls_grammar(self, functions: Sequence[FunctionSignature], *, at_most_one: bool = False) -> GrammarSpec:
        content = super().calls_grammar(functions, at_most_one=at_most_one)
        if self.section_lead:
            content = {"type": "sequence", "elements": [{"type": "regex", "pattern": self.section_lead}, content]}
        return {"type": "tag", "begin": self.begin, "content": content, "end": self.end}

    def text_and_calls_grammar(
        self, functions: Sequence[FunctionSignature], *, at_most_one: bool = False
    ) -> GrammarSpec:
        section = self.calls_grammar(functions, at_most_one=at_most_one)
        return {
            "type": "triggered_tags",
            "triggers": [self.begin],
            "tags": [section],
            "stop_after_first": at_most_one,
        }


class ReadableArguments(dict[str, Any]):
    """The arguments of a call: a dict that turns into JSON when a template adds it to a string.

    DeepSeek's templates concatenate strings; all others read the dict or write it with `tojson`.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def with_readable_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message whose calls have `ReadableArguments`."""
    calls = [_with_arguments(call) for call in message.get("tool_calls") or ()]
    return {**message, "tool_calls": calls} if calls else dict(message)


def with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a message whose call ids have nine letters and digits, as Mistral's templates demand.

    Other ids are replaced by digests, the same for a call and its result.
    """
    short = dict(message)
    if short.get("tool_call_id"):
        short["tool_call_id"] = _short_id(short["tool_call_id"])
    if short.get("tool_calls"):
        short["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in short["tool_calls"]]
    return short


def _short_id(call_id: str | None) -> str | None:
    if call_id is None or (len(call_id) == SHORT_ID_CHARS and call_id.isalnum()):
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=SHORT_ID_CHARS).hexdigest()[:SHORT_ID_CHARS]


def _with_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": ReadableArguments(function["arguments"])}}
