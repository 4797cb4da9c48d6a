"""What every part of a request has in common: types are strict, and unknown fields are refused."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Strict(BaseModel):
    """`"1"` and `true` are not numbers; a field that is not here is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Kept(Strict):
    """A part of a conversation that clients keep and send again: what is null in it says nothing, whatever its name."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return without_nulls(value)


def without_nulls(value: Any) -> Any:
    """An object's fields that say something; anything else as it is."""
    return {key: field for key, field in value.items() if field is not None} if isinstance(value, dict) else value
