"""The forms of calls that are read, and which of them a chat template teaches."""

from __future__ import annotations

from .calls import CallFormat
from .harmony import Harmony
from .marked_calls import DeepSeek3, DeepSeek31, Hermes, Llama3, MistralList, MistralNamed
from .pythonic import Pythonic
from .tagged_calls import DeepSeek32, Glm45, MiniMaxM2, Qwen3Coder

FORMATS: tuple[CallFormat, ...] = (
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


def call_format(template: str) -> CallFormat | None:
    """The form that a chat template teaches; None where it teaches none that is read."""
    return next((form for form in FORMATS if form.is_taught_by(template)), None)
