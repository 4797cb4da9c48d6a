"""What every part of a request has in common: types are strict, and unknown fields are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Tag, model_validator

from ..errors import excerpt
from .json_body import JsonPath

# In the words of JSON; `bool` before `int`, which it is to Python.
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "an integer", float: "a number"}


class FieldError(ValueError):
    """A field within the value that a validator looks at is wrong. The message goes on behind the field's name."""

    def __init__(self, place: JsonPath, message: str) -> None:
        super().__init__(message)
        self.place = place


class StrictModel(BaseModel):
    """`"1"` and `true` are not numbers; a field that is not here is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class ReplayedModel(StrictModel):
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


def json_type_name(value: Any) -> str:
    """Name the JSON type of a value."""
    return next((name for kind, name in _KINDS.items() if isinstance(value, kind)), "null")


def one_of(names: Sequence[str]) -> str:
    """Write `'a', 'b' or 'c'`."""
    *first, last = map(repr, names)
    return f"{', '.join(first)} or {last}" if first else last


def kind(value: Any) -> Any:
    """Return an object's `type`; None where it has none, or is no object."""
    return value.get("type") if isinstance(value, dict) else None


def tag(name: str) -> Tag:
    """Mark a member of a union. Clients know no such level, so errors do not show it."""
    return Tag(f"<{name}>")


def tag_of(value: Any) -> str:
    """Return the tag of an object by its `type`, and `<word>` for anything else."""
    return f"<{kind(value)}>" if isinstance(value, dict) else "<word>"


def object_of_type(kinds: Sequence[str], advice: str = "", type_of: Callable[[Any], Any] = kind) -> BeforeValidator:
    """Take objects of these types, without their null fields, and refuse another type by name."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"must be an object, not {json_type_name(value)}")
        said = without_nulls(value)
        given = type_of(said)
        if given not in kinds:
            but = f", not {excerpt(given)}" if isinstance(given, str) else ""
            raise FieldError(("type",), f"must be {one_of(kinds)}{but}{advice}")
        return said

    return BeforeValidator(check)


def string_or_object(kinds: Sequence[str]) -> BeforeValidator:
    """The same for a value that may also be a word, which another validator checks."""
    check: Callable[[Any], Any] = object_of_type(kinds).func  # type: ignore[assignment]
    return BeforeValidator(lambda value: check(value) if isinstance(value, dict) else value)
