"""Tool-call and reasoning parsers: a model's output text becomes reasoning, content and tool calls.

output_parser      the parts of an output, and the protocol of all parsers
parser_config      which parsers the outputs of one request need
reasoning          text between <think> and </think>
tool_call_format   how models write tool calls: json_call_formats, xml_call_formats, pythonic, harmony
json_call_parser, xml_call_parser   parsers of the first two kinds of formats
incremental        base classes of parsers, for text that arrives in pieces
argument_values    arguments as JSON, and their types by a JSON schema
earlier_calls      tool calls of earlier messages, as chat templates expect them
"""

from __future__ import annotations

from .harmony import Harmony
from .json_call_formats import DeepSeek3, DeepSeek31, Hermes, Llama3, MistralList, MistralNamed
from .pythonic import Pythonic
from .tool_call_format import ToolCallFormat
from .xml_call_formats import DeepSeek32, Glm45, MiniMaxM2, Qwen3Coder

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
    """Return the format that a chat template teaches; None where it teaches none that can be parsed."""
    return next((form for form in FORMATS if form.is_taught_by(template)), None)
