"""Sampling defaults and stop tokens of a checkpoint: generation_config.json, and config.json behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import InvalidModelConfig
from .keys import Keys


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Sampling values that the checkpoint's authors suggest; None where generation_config.json says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


def read_generation(generation: Mapping[str, Any]) -> GenerationDefaults:
    keys = Keys("generation_config.json", generation)
    return GenerationDefaults(
        temperature=keys.optional_number("temperature"),
        top_p=keys.optional_number("top_p"),
        top_k=keys.optional_integer("top_k"),
        min_p=keys.optional_number("min_p"),
        repetition_penalty=keys.optional_number("repetition_penalty"),
        max_new_tokens=keys.optional_integer("max_new_tokens"),
    )


def read_eos_token_ids(generation: Mapping[str, Any], raw: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return the stop tokens. generation_config.json wins: chat models end their turns by tokens that only it names.

    Ids outside the vocabulary (-1 for "none", tokens that a cut vocabulary lacks) are left out: none is ever drawn.
    """
    for file, values in (("generation_config.json", generation), ("config.json", raw)):
        value = values.get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
                raise InvalidModelConfig(f"{file}: 'eos_token_id' must be an integer or a list of them, not {value!r}")
            return tuple(token for token in dict.fromkeys(ids) if 0 <= token < vocab_size)
    return ()
