"""The parts of the served model that a gateway needs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton.engine.models import load_config
from baton.engine.text import Tokenizer

DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class ServedModel:
    """A model's name, tokenizer and limits, without its weights."""

    model_id: str  # the name that clients send
    tokenizer: Tokenizer
    max_model_len: int  # tokens of prompt and output together
    vocab_size: int  # of the model, whose embedding may be larger than the tokenizer's vocabulary
    eos_token_ids: tuple[int, ...] = ()
    # Sampling parameters of requests that do not set them.
    generation_defaults: Mapping[str, float] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time

    @classmethod
    def from_folder(
        cls, folder: str | Path, *, model_id: str | None = None, max_model_len: int | None = None
    ) -> ServedModel:
        """Read a checkpoint's configuration and tokenizer; its weights may be missing.

        Raises `ModelError` or `TokenizerError` for a folder that is not a checkpoint.
        """
        config = load_config(folder, max_model_len=max_model_len, load_format="dummy")
        defaults = {name: getattr(config.generation, name) for name in DEFAULTED}
        return cls(
            model_id=model_id or Path(folder).name,
            tokenizer=Tokenizer.from_folder(folder),
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            eos_token_ids=tuple(config.eos_token_ids),
            generation_defaults={name: value for name, value in defaults.items() if value is not None},
        )
