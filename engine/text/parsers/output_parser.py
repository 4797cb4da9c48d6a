"""What an answer is made of, and who tells it from the model's text: one reader a choice.

text in pieces ──> OutputParser ──> ReasoningPart, ContentPart, ToolCallStart, ToolCallArguments ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentPart:
    """Text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The `index`-th call of the answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's arguments, which are JSON together; as the model wrote it."""

    index: int
    text: str


OutputPart = ReasoningPart | ContentPart | ToolCallStart | ToolCallArguments


class OutputParser(Protocol):
    """Takes one answer's text in any pieces, and tells each part as soon as it is certain.

    What the parts are does not depend on where the text was cut. A call is whole where the model has written the end
    of its arguments, and no reader writes one for it: whatever ended the answer before, a call that has begun keeps the
    arguments that came.
    """

    @property
    def num_calls(self) -> int:
        """So far."""
        ...

    @property
    def is_in_call(self) -> bool:
        """The newest call has begun, and is not whole; those before it are."""
        ...

    def push(self, text: str, *, finished: bool = False) -> list[OutputPart]:
        """`finished`: the model has said all, and what was held back is words where no call has begun. Of an answer
        that was cut off, what is still held back may be the beginning of a call, and is nobody's.
        """
        ...


class PlainTextParser:
    """For answers that hold no calls."""

    num_calls = 0
    is_in_call = False

    def push(self, text: str, *, finished: bool = False) -> list[OutputPart]:
        return [ContentPart(text)] if text else []
