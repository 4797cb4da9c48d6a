"""How models write calls of functions into their text: what the forms that chat templates teach have in common."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .output_parser import OutputParser

# A format of xgrammar's structural tags: https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
GrammarSpec = dict[str, Any]
Functions = Mapping[str, Mapping[str, Any]]  # that may be called, each with the JSON schema of its arguments


@dataclass(frozen=True)
class FunctionSignature:
    """A function that may be called, and the JSON schema that its arguments must fit."""

    name: str
    arguments: dict[str, Any]

    @property
    def grammar(self) -> GrammarSpec:
        """Of its arguments."""
        # One blank between its parts is what models write; without a limit, small ones sometimes write nothing else.
        return {"type": "json_schema", "json_schema": self.arguments, "max_whitespace_cnt": 1}


class ToolCallFormat(ABC):
    """One form. Where a method has `at_most_one`, it says that the answer may hold one call; some forms hold no more
    in any case.
    """

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]  # what it is written with: those that are special tokens are text all the same
    takes_one: ClassVar[bool] = False  # one call an answer, and in a message that is sent back
    frames_answers: ClassVar[bool] = False  # answers without calls are written in it, too
    introduction: ClassVar[str] = ""  # teaches it behind a list of functions, where a template does not tell of them

    @abstractmethod
    def is_taught_by(self, template: str) -> bool:
        """By the words of a chat template."""

    @abstractmethod
    def new_parser(self, functions: Functions, *, at_most_one: bool = False) -> OutputParser:
        """For one answer. A call of another function is text."""

    def answer_grammar(self, content: GrammarSpec) -> GrammarSpec:
        """What an answer fits that is `content`, and calls nothing."""
        return content

    def describe_tools(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """What is put into the system's message where a template does not tell of functions."""
        told = ["## Tools"]
        for function in (tool["function"] for tool in tools):
            told.append(f"### {function['name']}")
            told.append(f"Description: {function.get('description', '')}")
            told.append(f"Parameters: {json.dumps(function.get('parameters', {}), ensure_ascii=False)}")
        return "\n\n".join([*told, self.introduction])

    def adapt_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as the templates that teach this form take it. Raises `InvalidMessages`."""
        return message


class GrammarToolCallFormat(ToolCallFormat):
    """One of which a grammar can say what it allows."""

    @abstractmethod
    def calls_grammar(self, functions: Sequence[FunctionSignature], *, at_most_one: bool = False) -> GrammarSpec:
        """What an answer fits that is a call or several, and nothing else."""

    @abstractmethod
    def text_and_calls_grammar(
        self, functions: Sequence[FunctionSignature], *, at_most_one: bool = False
    ) -> GrammarSpec:
        """What an answer fits that may hold anything, but calls as they should be."""


class DelimitedToolCallFormat(GrammarToolCallFormat):
    """What is read is more than what is written: `opening` (with `%s` for the name) and `closing` are put around
    arguments where a grammar says what the model writes.
    """

    taught_by: ClassVar[tuple[str, ...]]  # a template that teaches it holds all of these, and none of `taught_not_by`
    taught_not_by: ClassVar[tuple[str, ...]] = ()
    triggers: ClassVar[tuple[str, ...]]  # whatever is read as a call begins with one, and ordinary text does not
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
    """All calls of an answer stand in one section, from `begin` to `end`."""

    begin: ClassVar[str]
    end: ClassVar[str]
    section_lead: ClassVar[str] = ""  # a pattern of what is written between `begin` and the first call

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
