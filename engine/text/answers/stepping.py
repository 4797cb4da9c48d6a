"""Readers that are state machines over the text that they hold back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import Enum
from typing import ClassVar

from .parts import AnswerPart, CallArguments, CallBegins

Step = Callable[[bool], list[AnswerPart]]


class SteppingReader(ABC):
    """An `AnswerReader` that does its state's step, and the next one's where the state has changed.

    A step takes all that is certain from what is held. It is told whether nothing follows.
    """

    SILENT: ClassVar[Enum]  # the state in which all that follows is left out

    def __init__(self, first: Enum) -> None:
        self.num_calls = 0
        self.is_in_call = False
        self._state = first
        self._held = ""
        self._steps: Mapping[Enum, Step] = {self.SILENT: self._leave_out, **self._other_steps()}

    def push(self, text: str, *, finished: bool = False) -> list[AnswerPart]:
        self._held += text
        parts: list[AnswerPart] = []
        while True:
            before = self._state
            parts += self._steps[before](finished)
            if self._state is before:
                return parts

    @abstractmethod
    def _other_steps(self) -> Mapping[Enum, Step]:
        """Of the states that are not `SILENT`."""

    def _begin_call(self, name: str) -> list[AnswerPart]:
        self.num_calls += 1
        self.is_in_call = True
        return [CallBegins(self.num_calls - 1, name)]

    def _arguments(self, text: str) -> list[AnswerPart]:
        """Of the newest call."""
        return [CallArguments(self.num_calls - 1, text)] if text else []

    def _last_arguments(self, text: str) -> list[AnswerPart]:
        """With which the newest call is whole."""
        self.is_in_call = False
        return self._arguments(text)

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _leave_out(self, finished: bool) -> list[AnswerPart]:
        self._held = ""
        return []
