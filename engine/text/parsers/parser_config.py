"""How the answers to one prompt are read."""

from __future__ import annotations

from dataclasses import dataclass, field

from .output_parser import OutputParser, OutputPart, PlainTextParser, ReasoningPart
from .reasoning import BEGIN, END, ReasoningParser, ReasoningStart
from .tool_call_format import Functions, ToolCallFormat


@dataclass(frozen=True)
class ParserConfig:
    """The default: all of a text is words."""

    form: ToolCallFormat | None = None
    functions: Functions = field(default_factory=dict)
    at_most_one: bool = False  # call
    reasoning: ReasoningStart = ReasoningStart.NONE  # between marks of their own, whatever the form

    def new_parser(self) -> OutputParser:
        """For one choice."""
        form = self.form
        reader = PlainTextParser() if form is None else form.new_parser(self.functions, at_most_one=self.at_most_one)
        return (
            reader
            if self.reasoning is ReasoningStart.NONE
            else _ReasoningFirstParser(ReasoningParser(self.reasoning), reader)
        )

    @property
    def marks(self) -> tuple[str, ...]:
        """What tells the parts of an answer apart, and must be in the text that is read."""
        marks = () if self.form is None else self.form.marks
        return marks if self.reasoning is ReasoningStart.NONE else (*marks, BEGIN, END)


class _ReasoningFirstParser:
    """What comes behind the thoughts is another reader's."""

    def __init__(self, thoughts: ReasoningParser, answer: OutputParser) -> None:
        self._thoughts = thoughts
        self._answer = answer

    @property
    def num_calls(self) -> int:
        return self._answer.num_calls

    @property
    def is_in_call(self) -> bool:
        return self._answer.is_in_call

    def push(self, text: str, *, finished: bool = False) -> list[OutputPart]:
        thought, answer = self._thoughts.push(text, finished=finished)
        before: list[OutputPart] = [ReasoningPart(thought)] if thought else []
        return before + self._answer.push(answer, finished=finished)
