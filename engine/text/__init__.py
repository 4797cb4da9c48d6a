"""Converts between text and token ids. Does not import torch, so that gateways stay small."""

from .chat import RESERVED_VARIABLES, Chat, ChatTemplate
from .control_tokens import ChatPrompt
from .detokenizer import IncrementalDetokenizer
from .errors import ChatTemplateError, InvalidMessages, TextError, TokenizerError
from .parsers import ParserConfig
from .parsers.output_parser import (
    ContentPart,
    OutputParser,
    OutputPart,
    ReasoningPart,
    ToolCallArguments,
    ToolCallStart,
)
from .parsers.reasoning import ReasoningStart, after_reasoning
from .parsers.tool_call_format import FunctionSignature, GrammarSpec, GrammarToolCallFormat, ToolCallFormat
from .stream import StopResult, StopStrings, TextDelta, TextStream
from .tokenizer import Tokenizer, bad_word_token_ids

__all__ = [
    "RESERVED_VARIABLES",
    "Chat",
    "ChatPrompt",
    "ChatTemplate",
    "ChatTemplateError",
    "ContentPart",
    "FunctionSignature",
    "GrammarSpec",
    "GrammarToolCallFormat",
    "IncrementalDetokenizer",
    "InvalidMessages",
    "OutputParser",
    "OutputPart",
    "ParserConfig",
    "ReasoningPart",
    "ReasoningStart",
    "StopResult",
    "StopStrings",
    "TextDelta",
    "TextError",
    "TextStream",
    "Tokenizer",
    "TokenizerError",
    "ToolCallArguments",
    "ToolCallFormat",
    "ToolCallStart",
    "after_reasoning",
    "bad_word_token_ids",
]
