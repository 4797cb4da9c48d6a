"""Text and token ids. Imports no torch: a gateway stays light."""

from .chat import ChatTemplate
from .detokenizer import IncrementalDetokenizer
from .errors import ChatTemplateError, InvalidMessages, TextError, TokenizerError
from .stop import StopResult, StopStrings
from .stream import TextDelta, TextStream
from .tokenizer import Tokenizer
from .words import bad_word_token_ids

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "IncrementalDetokenizer",
    "InvalidMessages",
    "StopResult",
    "StopStrings",
    "TextDelta",
    "TextError",
    "TextStream",
    "Tokenizer",
    "TokenizerError",
    "bad_word_token_ids",
]
