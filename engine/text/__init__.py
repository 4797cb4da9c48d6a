"""Text and token ids. Imports no torch: a gateway stays light."""

from .answers.calls import CallFormat, Grammar, GrammaticalFormat, Signature
from .answers.parts import AnswerPart, AnswerReader, CallArguments, CallBegins, Thought, Words
from .answers.reading import Reading
from .answers.thoughts import Thoughts, behind_thoughts
from .chat import ChatTemplate
from .control_tokens import ChatPrompt
from .detokenizer import IncrementalDetokenizer
from .errors import ChatTemplateError, InvalidMessages, TextError, TokenizerError
from .stop import StopResult, StopStrings
from .stream import TextDelta, TextStream
from .tokenizer import Tokenizer
from .words import bad_word_token_ids

__all__ = [
    "AnswerPart",
    "AnswerReader",
    "CallArguments",
    "CallBegins",
    "CallFormat",
    "ChatPrompt",
    "ChatTemplate",
    "ChatTemplateError",
    "Grammar",
    "GrammaticalFormat",
    "IncrementalDetokenizer",
    "InvalidMessages",
    "Reading",
    "Signature",
    "StopResult",
    "StopStrings",
    "TextDelta",
    "TextError",
    "TextStream",
    "Thought",
    "Thoughts",
    "Tokenizer",
    "TokenizerError",
    "Words",
    "bad_word_token_ids",
    "behind_thoughts",
]
