"""Tool-call and reasoning parsers: a model's output text becomes reasoning, content and tool calls.

This module lists all formats, and makes the parsers that the outputs of a request need.

output_parser      the parts of an output, and the protocol of all parsers
reasoning          text between <think> and </think>
tool_call_format   base classes of formats: how models write tool calls, and how templates expect earlier calls
json_calls, xml_calls, pythonic, harmony   formats of each kind, and the parser of that kind
incremental        base classes of parsers, for text that arrives in pieces
argument_values    arguments as JSON, and their types by a JSON schema
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .harmony import Harmony
from .json_calls import DeepSeek3, DeepSeek31, Hermes, Llama3, MistralList, MistralNamed
from .output_parser import OutputParser, OutputPart, PlainTextParser, ReasoningPart
from .pythonic import Pythonic
from .reasoning import BEGIN, END, ReasoningParser, ReasoningStart
from .tool_call_format import Functions, ToolCallFormat
from .xml_calls import DeepSeek32, Glm45, MiniMaxM2, Qwen3Coder

FORMATS: tuple[ToolCallFormat, ...] = (
    Harmony(),
    MistralNamed(),
    MistralList(),
    DeepSeek3(),
    DeepSeek31(),
    DeepSeek32(),
    Hermes(),
    Qwen3Coder(),
    Glm45(),
    MiniMaxM2(),
    Llama3(),
    Pythonic(),
)


def tool_call_format(template: str) -> ToolCallFormat | None:
    """Return the tool-call format that a chat template teaches; None if it teaches none that Baton can parse."""
    return next((form for form in FORMATS if form.is_taught_by(template)), None)


@dataclass(frozen=True)
class ParserConfig:
    """The tool-call format and the reasoning of a request's outputs. By default all text is content."""

    form: ToolCallFormat | None = None
    functions: Functions = field(default_factory=dict)
    at_most_one: bool = False  # whether an answer may have at most one call
    reasoning: ReasoningStart = ReasoningStart.NONE  # reasoning has its own marks, whatever the tool-call format

    def new_parser(self) -> OutputParser:
        """Return a parser for one choice."""
        form = self.form
        reader = PlainTextParser() if form is None else form.new_parser(self.functions, at_most_one=self.at_most_one)
        return (
            reader
            if self.reasoning is ReasoningStart.NONE
            else _ReasoningFirstParser(ReasoningParser(self.reasoning), reader)
        )

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that delimit the parts of an answer. Detokenizing must keep them, even if they are special tokens."""
        marks = () if self.form is None else self.form.marks
        return marks if self.reasoning is ReasoningStart.NONE else (*marks, BEGIN, END)


class _ReasoningFirstParser:
    """A parser of reasoning, followed by another parser for the rest."""

    def __init__(self, reasoning: ReasoningParser, answer: OutputParser) -> None:
        self._reasoning = reasoning
        self._answer = answer

    @property
    def num_calls(self) -> int:
        return self._answer.num_calls

    @property
    def is_in_call(self) -> bool:
        return self._answer.is_in_call

    def push(self, text: str, *, finished: bool = False) -> list[OutputPart]:
        reasoning, answer = self._reasoning.push(text, finished=finished)
        before: list[OutputPart] = [ReasoningPart(reasoning)] if reasoning else []
        return before + self._answer.push(answer, finished=finished)
