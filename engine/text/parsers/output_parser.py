"""The parts of an output, and the protocol of parsers that find them. Each choice has its own parser.

text in pieces ──> OutputParser ──> ReasoningPart, ContentPart, ToolCallStart, ToolCallArguments ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of the answer's call number `index`."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's arguments as the model wrote it; all pieces together are JSON."""

    index: int
    text: str


OutputPart = ReasoningPart | ContentPart | ToolCallStart | ToolCallArguments


class OutputParser(Protocol):
    """Takes one answer's text in pieces, and reports each part as soon as it is certain.

    Parts do not depend on how the text was cut into pieces. A call is complete once the model has written the end of
    its arguments. No parser adds that end: if an answer was cut off, its last call has incomplete arguments.
    """

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        ...

    @property
    def is_in_call(self) -> bool:
        """True if the newest call is incomplete; all calls before it are complete."""
        ...

    def push(self, text: str, *, finished: bool = False) -> list[OutputPart]:
        """Return the parts that more text completes.

        `finished` means that the model has ended its answer: held text that is no call becomes content. If an answer is
        cut off instead, held text is dropped, since it may be the beginning of a call.
        """
        ...


class PlainTextParser:
    """The parser of answers without calls: all text is content."""

    num_calls = 0
    is_in_call = False

    def push(self, text: str, *, finished: bool = False) -> list[OutputPart]:
        return [ContentPart(text)] if text else []
