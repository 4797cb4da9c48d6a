"""Readers that are state machines over the text that they hold back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import Enum
from typing import ClassVar

from .output_parser import ContentPart, OutputPart, ToolCallArguments, ToolCallStart

Step = Callable[[bool], list[OutputPart]]


class IncrementalParser(ABC):
    """An `OutputParser` that does its state's step, and the next one's where the state has changed.

    A step takes all that is certain from what is held. It is told whether nothing follows.
    """

    SILENT: ClassVar[Enum]  # the state in which all that follows is left out

    def __init__(self, first: Enum) -> None:
        self.num_calls = 0
        self.is_in_call = False
        self._state = first
        self._held = ""
        self._steps: Mapping[Enum, Step] = {self.SILENT: self._leave_out, **self._other_steps()}

    def push(self, text: str, *, finished: bool = False) -> list[OutputPart]:
        self._held += text
        parts: list[OutputPart] = []
        while True:
            before = self._state
            parts += self._steps[before](finished)
            if self._state is before:
                return parts

    @abstractmethod
    def _other_steps(self) -> Mapping[Enum, Step]:
        """Of the states that are not `SILENT`."""

    def _begin_call(self, name: str) -> list[OutputPart]:
        self.num_calls += 1
        self.is_in_call = True
        return [ToolCallStart(self.num_calls - 1, name)]

    def _arguments(self, text: str) -> list[OutputPart]:
        """Of the newest call."""
        return [ToolCallArguments(self.num_calls - 1, text)] if text else []

    def _last_arguments(self, text: str) -> list[OutputPart]:
        """With which the newest call is whole."""
        self.is_in_call = False
        return self._arguments(text)

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _leave_out(self, finished: bool) -> list[OutputPart]:
        self._held = ""
        return []


class BracketTracker:
    """Follows JSON, or what is like it: one bracket, and what is in it."""

    def __init__(self, quotes: str = '"', *, begin: int = 0) -> None:
        """`quotes` are what strings stand in; `begin` is where `end_of` begins."""
        self._quotes = quotes
        self._depth = 0
        self._quote = ""  # that has been opened
        self._escaped = False
        self._seen = begin  # characters that `end_of` need not look at

    def end_in(self, text: str) -> int | None:
        """Behind the last bracket; None where that is still to come."""
        for at, character in enumerate(text):
            if self._quote:
                if character == self._quote and not self._escaped:
                    self._quote = ""
                self._escaped = not self._escaped and character == "\\"
            elif character in self._quotes:
                self._quote = character
            elif character in "{[(":
                self._depth += 1
            elif character in "}])":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None

    def end_of(self, text: str) -> int | None:
        """The same for text that is all there is: it begins with what it was the last time."""
        end = self.end_in(text[self._seen :])
        if end is None:
            self._seen = len(text)
            return None
        return self._seen + end


# Between the parts of a mark. What may be one is looked at again with each piece of text, so all its parts have an end.
BLANKS = r"\s{0,99}+"


def first_of(text: str, *marks: str) -> tuple[int, str] | None:
    """The mark that comes first, and where."""
    return min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=None)


def undecided(text: str, *marks: str) -> int:
    """How many characters at the end of `text` may belong to a mark that follows: blanks, and its beginning."""
    return len(text) - len(text[: len(text) - begun(text, *marks)].rstrip())


def begun(text: str, *marks: str) -> int:
    """How many characters at the end of `text` are the beginning of one of the `marks`."""
    return max(_begun(text, mark) for mark in marks)


def _begun(text: str, mark: str) -> int:
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return len(text) - at if at >= 0 else 0


class InlineToolCallParser(IncrementalParser):
    """A call begins with a mark. In the state HEAD it is at the beginning of what is held, behind blanks."""

    OUTSIDE: ClassVar[Enum]
    HEAD: ClassVar[Enum]

    def __init__(self, first: Enum, *marks: str) -> None:
        """Without `marks` there is no OUTSIDE."""
        super().__init__(first)
        self._marks = marks
        self._mark = marks[0] if marks else ""  # that the head follows
        self._is_behind_call = False  # and there have been no words since

    def _look_for_call(self, finished: bool) -> list[OutputPart]:
        found = first_of(self._held, *self._marks)
        if found is not None:
            at, self._mark = found
            self._state = self.HEAD
            return self._say(len(self._held[:at].rstrip()))  # blanks before a call are the form's
        if not finished:
            return self._say(len(self._held) - undecided(self._held, *self._marks))
        is_forms = self._is_behind_call and not self._held.strip()  # blanks there belong to nobody
        return self._say(0 if is_forms else len(self._held))

    def _behind_blanks(self) -> int:
        """Where in what is held the mark before a call begins."""
        return len(self._held) - len(self._held.lstrip())

    def _take_for_text(self) -> list[OutputPart]:
        """The mark in HEAD begins no call."""
        self._state = self.OUTSIDE
        return self._say(self._behind_blanks() + len(self._mark))

    def _begin_call(self, name: str) -> list[OutputPart]:
        self._is_behind_call = True
        return super()._begin_call(name)

    def _say(self, length: int) -> list[OutputPart]:
        said = self._take(length)
        if not said:
            return []
        self._is_behind_call = False
        return [ContentPart(said)]
