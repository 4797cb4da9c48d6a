"""Keys that nobody knows are refused, with the nearest one that somebody does."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator


class InvalidSpec(ValueError):
    """The application cannot work as described. The message has one line a problem: where, what, what to change."""


class Strict(BaseModel):
    """Refuses unknown keys and names the nearest valid one; refuses numbers that are none."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls.model_fields:
                    raise ValueError(unknown_key(str(key), list(cls.model_fields)))
        return data

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_truth(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML's `yes` and `on` are true, which pydantic would take for 1."""
        assert info.field_name is not None, "the validator is one of fields"
        kind = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and not {int, float}.isdisjoint((kind, *get_args(kind))):
            raise ValueError(f"is {str(value).lower()}, must be a number")
        return value


def unknown_key(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"unknown key {key!r}; " + (f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}")
