"""Forms that write calls among words, each between an opening and a closing: what grammars say of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from .calls import Grammar, GrammaticalFormat, Signature


class WrittenCalls(GrammaticalFormat):
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

    def calls(self, functions: Sequence[Signature], *, at_most_one: bool = False) -> Grammar:
        tags = {"tags": self._tags(functions), "stop_after_first": at_most_one or self.takes_one}
        return {"type": "tags_with_separator", "separator": self.separator, "at_least_one": True, **tags}

    def words_and_calls(self, functions: Sequence[Signature], *, at_most_one: bool = False) -> Grammar:
        tags = {"tags": self._tags(functions), "stop_after_first": at_most_one or self.takes_one}
        return {"type": "triggered_tags", "triggers": list(self.triggers), **tags}

    def _tags(self, functions: Sequence[Signature]) -> list[Grammar]:
        return [self._tag(function, self.opening, self.closing) for function in functions]

    def _tag(self, function: Signature, opening: str, closing: str) -> Grammar:
        return {"type": "tag", "begin": opening % function.name, "content": self._arguments(function), "end": closing}

    def _arguments(self, function: Signature) -> Grammar:
        return function.grammar


class Sectioned(WrittenCalls):
    """All calls of an answer stand in one section, from `begin` to `end`."""

    begin: ClassVar[str]
    end: ClassVar[str]
    section_lead: ClassVar[str] = ""  # a pattern of what is written between `begin` and the first call

    def calls(self, functions: Sequence[Signature], *, at_most_one: bool = False) -> Grammar:
        content = super().calls(functions, at_most_one=at_most_one)
        if self.section_lead:
            content = {"type": "sequence", "elements": [{"type": "regex", "pattern": self.section_lead}, content]}
        return {"type": "tag", "begin": self.begin, "content": content, "end": self.end}

    def words_and_calls(self, functions: Sequence[Signature], *, at_most_one: bool = False) -> Grammar:
        section = self.calls(functions, at_most_one=at_most_one)
        return {
            "type": "triggered_tags",
            "triggers": [self.begin],
            "tags": [section],
            "stop_after_first": at_most_one,
        }
