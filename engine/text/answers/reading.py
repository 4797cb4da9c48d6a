"""How the answers to one prompt are read."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import thoughts
from .calls import CallFormat, Functions
from .parts import AnswerPart, AnswerReader, PlainReader, Thought
from .thoughts import ThoughtReader, Thoughts


@dataclass(frozen=True)
class Reading:
    """The default: all of a text is words."""

    form: CallFormat | None = None
    functions: Functions = field(default_factory=dict)
    at_most_one: bool = False  # call
    thoughts: Thoughts = Thoughts.NONE  # between marks of their own, whatever the form

    def reader(self) -> AnswerReader:
        """For one choice."""
        form = self.form
        reader = PlainReader() if form is None else form.reader(self.functions, at_most_one=self.at_most_one)
        return reader if self.thoughts is Thoughts.NONE else _ThinkingReader(ThoughtReader(self.thoughts), reader)

    @property
    def marks(self) -> tuple[str, ...]:
        """What tells the parts of an answer apart, and must be in the text that is read."""
        marks = () if self.form is None else self.form.marks
        return marks if self.thoughts is Thoughts.NONE else (*marks, thoughts.BEGIN, thoughts.END)


class _ThinkingReader:
    """What comes behind the thoughts is another reader's."""

    def __init__(self, thoughts: ThoughtReader, answer: AnswerReader) -> None:
        self._thoughts = thoughts
        self._answer = answer

    @property
    def num_calls(self) -> int:
        return self._answer.num_calls

    @property
    def is_in_call(self) -> bool:
        return self._answer.is_in_call

    def push(self, text: str, *, finished: bool = False) -> list[AnswerPart]:
        thought, answer = self._thoughts.push(text, finished=finished)
        before: list[AnswerPart] = [Thought(thought)] if thought else []
        return before + self._answer.push(answer, finished=finished)
