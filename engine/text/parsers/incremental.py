"""Base classes of parsers, and helpers to find marks and brackets, for text that arrives in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import Enum
from typing import ClassVar

from .output_parser import ContentPart, OutputPart, ToolCallArguments, ToolCallStart

# Blanks between the parts of a mark. Their number is bounded, since a possible mark is matched again with each piece.
BLANKS = r"\s{0,99}+"
Step = Callable[[bool], list[OutputPart]]


class IncrementalParser(ABC):
    """An `OutputParser` that is a state machine with one step method for each state.

    A step consumes the held text whose meaning is certain, and may change the state; then the new state's step runs.
    Its argument is true if no text follows.
    """

    DISCARD: ClassVar[Enum]  # the state in which all further text is dropped

    def __init__(self, first: Enum) -> None:
        self.num_calls = 0
        self.is_in_call = False
        self._state = first
        self._held = ""
        self._steps: Mapping[Enum, Step] = {self.DISCARD: self._leave_out, **self._other_steps()}

    def push(self, text: str, *, finished: bool = False) -> list[OutputPart]:
        """Implement `OutputParser.push`."""
        self._held += text
        parts: list[OutputPart] = []
        while True:
            before = self._state
            parts += self._steps[before](finished)
            if self._state is before:
                return parts

    @abstractmethod
    def _other_steps(self) -> Mapping[Enum, Step]:
        """Return the steps of all states but `DISCARD`."""

    def _begin_call(self, name: str) -> list[OutputPart]:
        self.num_calls += 1
        self.is_in_call = True
        return [ToolCallStart(self.num_calls - 1, name)]

    def _arguments(self, text: str) -> list[OutputPart]:
        """Report a piece of the newest call's arguments."""
        return [ToolCallArguments(self.num_calls - 1, text)] if text else []

    def _last_arguments(self, text: str) -> list[OutputPart]:
        """Report the last piece of the newest call's arguments, which completes the call."""
        self.is_in_call = False
        return self._arguments(text)

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _leave_out(self, finished: bool) -> list[OutputPart]:
        self._held = ""
        return []


class BracketTracker:
    """Finds the end of a bracket in JSON-like text."""

    def __init__(self, quotes: str = '"', *, begin: int = 0) -> None:
        """`quotes` are the characters that enclose strings; `begin` is the offset where `end_of` begins."""
        self._quotes = quotes
        self._depth = 0
        self._quote = ""  # the quote of the open string
        self._escaped = False
        self._seen = begin  # characters that `end_of` has seen

    def end_in(self, text: str) -> int | None:
        """Return the offset after the closing bracket in the next piece of text; None if it has not arrived yet."""
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
        """Return the same for the whole text so far. Text that earlier calls have seen is not searched again."""
        end = self.end_in(text[self._seen :])
        if end is None:
            self._seen = len(text)
            return None
        return self._seen + end


def first_mark(text: str, *marks: str) -> tuple[int, str] | None:
    """Return the offset of the mark that comes first, and the mark."""
    return min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=None)


def undecided_suffix(text: str, *marks: str) -> int:
    """Count the characters at the end of `text` that may belong to a mark: blanks, and the mark's beginning."""
    return len(text) - len(text[: len(text) - partial_mark(text, *marks)].rstrip())


def partial_mark(text: str, *marks: str) -> int:
    """Count the characters at the end of `text` that are the beginning of one of the `marks`."""
    return max(_begun(text, mark) for mark in marks)


def _begun(text: str, mark: str) -> int:
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return len(text) - at if at >= 0 else 0


class InlineToolCallParser(IncrementalParser):
    """Base class of parsers of tool calls within text.

    A call begins with a mark. In state HEAD, the held text begins with the mark, perhaps after blanks.
    """

    OUTSIDE: ClassVar[Enum]
    HEAD: ClassVar[Enum]

    def __init__(self, first: Enum, *marks: str) -> None:
        """Begin in state `first`. Without `marks`, there is no state OUTSIDE."""
        super().__init__(first)
        self._marks = marks
        self._mark = marks[0] if marks else ""  # the mark that began the current head
        self._is_behind_call = False  # true after a call, until content follows

    def _look_for_call(self, finished: bool) -> list[OutputPart]:
        found = first_mark(self._held, *self._marks)
        if found is not None:
            at, self._mark = found
            self._state = self.HEAD
            return self._emit_text(len(self._held[:at].rstrip()))  # blanks before a call belong to the format
        if not finished:
            return self._emit_text(len(self._held) - undecided_suffix(self._held, *self._marks))
        is_forms = self._is_behind_call and not self._held.strip()  # blanks after a call are dropped
        return self._emit_text(0 if is_forms else len(self._held))

    def _behind_blanks(self) -> int:
        """Return the offset in the held text of the mark before a call."""
        return len(self._held) - len(self._held.lstrip())

    def _take_for_text(self) -> list[OutputPart]:
        """Treat the mark in HEAD as content: no call follows it."""
        self._state = self.OUTSIDE
        return self._emit_text(self._behind_blanks() + len(self._mark))

    def _begin_call(self, name: str) -> list[OutputPart]:
        self._is_behind_call = True
        return super()._begin_call(name)

    def _emit_text(self, length: int) -> list[OutputPart]:
        said = self._take(length)
        if not said:
            return []
        self._is_behind_call = False
        return [ContentPart(said)]
