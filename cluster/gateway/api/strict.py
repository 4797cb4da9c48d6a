"""What every part of a request has in common: types are strict, and unknown fields are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from .json_faults import Place

# In the words of JSON; `bool` before `int`, which it is to Python.
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "an integer", float: "a number"}


class FieldError(ValueError):
    """A field within the value that a validator looks at is wrong. The message goes on behind the field's name."""

    def __init__(self, place: Place, message: str) -> None:
        super().__init__(message)
        self.place = place


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
    """Return an object's fields that say something; anything else as it is."""
    return {key: field for key, field in value.items() if field is not None} if isinstance(value, dict) else value


def _by_value(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_by_value)]  # JSON may write 16 as 16.0


def described(value: Any) -> str:
    """Name the JSON type of a value."""
    return next((name for kind, name in _KINDS.items() if isinstance(value, kind)), "null")


def spelled(names: Sequence[str]) -> str:
    """Write `'a', 'b' or 'c'`."""
    *first, last = map(repr, names)
    return f"{', '.join(first)} or {last}" if first else last
