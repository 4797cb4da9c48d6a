"""How models write calls of functions into their text: what the forms that chat templates teach have in common."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .parts import AnswerReader

# A format of xgrammar's structural tags: https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
Grammar = dict[str, Any]
Functions = Mapping[str, Mapping[str, Any]]  # that may be called, each with the JSON schema of its arguments


@dataclass(frozen=True)
class Signature:
    """A function that may be called, and the JSON schema that its arguments must fit."""

    name: str
    arguments: dict[str, Any]

    @property
    def grammar(self) -> Grammar:
        """Of its arguments."""
        # One blank between its parts is what models write; without a limit, small ones sometimes write nothing else.
        return {"type": "json_schema", "json_schema": self.arguments, "max_whitespace_cnt": 1}


class CallFormat(ABC):
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
    def reader(self, functions: Functions, *, at_most_one: bool = False) -> AnswerReader:
        """For one answer. A call of another function is text."""

    def answer(self, content: Grammar) -> Grammar:
        """What an answer fits that is `content`, and calls nothing."""
        return content

    def introduce(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """What is put into the system's message where a template does not tell of functions."""
        told = ["## Tools"]
        for function in (tool["function"] for tool in tools):
            told.append(f"### {function['name']}")
            told.append(f"Description: {function.get('description', '')}")
            told.append(f"Parameters: {json.dumps(function.get('parameters', {}), ensure_ascii=False)}")
        return "\n\n".join([*told, self.introduction])

    def turn(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as the templates that teach this form take it. Raises `InvalidMessages`."""
        return message


class GrammaticalFormat(CallFormat):
    """One of which a grammar can say what it allows."""

    @abstractmethod
    def calls(self, functions: Sequence[Signature], *, at_most_one: bool = False) -> Grammar:
        """What an answer fits that is a call or several, and nothing else."""

    @abstractmethod
    def words_and_calls(self, functions: Sequence[Signature], *, at_most_one: bool = False) -> Grammar:
        """What an answer fits that may hold anything, but calls as they should be."""
