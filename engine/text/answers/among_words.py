"""What readers of calls among words have in common: where one may begin, and what stands before it."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

from .marks import first_of, undecided
from .parts import AnswerPart, Words
from .stepping import SteppingReader


class AmongWords(SteppingReader):
    """A call begins with a mark. In the state HEAD it is at the beginning of what is held, behind blanks."""

    OUTSIDE: ClassVar[Enum]
    HEAD: ClassVar[Enum]

    def __init__(self, first: Enum, *marks: str) -> None:
        """Without `marks` there is no OUTSIDE."""
        super().__init__(first)
        self._marks = marks
        self._mark = marks[0] if marks else ""  # that the head follows
        self._is_behind_call = False  # and there have been no words since

    def _look_for_call(self, finished: bool) -> list[AnswerPart]:
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

    def _take_for_text(self) -> list[AnswerPart]:
        """The mark in HEAD begins no call."""
        self._state = self.OUTSIDE
        return self._say(self._behind_blanks() + len(self._mark))

    def _begin_call(self, name: str) -> list[AnswerPart]:
        self._is_behind_call = True
        return super()._begin_call(name)

    def _say(self, length: int) -> list[AnswerPart]:
        said = self._take(length)
        if not said:
            return []
        self._is_behind_call = False
        return [Words(said)]
