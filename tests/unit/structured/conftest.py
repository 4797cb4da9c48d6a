"""A tiny model with a tokenizer, grammars of it, and engines."""

from ...helpers.structured_fixtures import (
    grammars,
    make_structured_llm,
    structured_checkpoint,
    structured_llm,
    vocabulary,
)

__all__ = ["grammars", "make_structured_llm", "structured_checkpoint", "structured_llm", "vocabulary"]
