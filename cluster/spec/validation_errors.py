"""Errors of settings: where, what was given, what is allowed; and the base model that refuses unknown keys."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Mapping
from typing import Any, get_args

import pydantic
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

SECRET = "api_keys"  # its values are never printed
_AN_INSTANCE = re.compile(r" or instance of \w+$")
PYDANTIC_PHRASES = {
    "be a valid dictionary": "be a mapping",
    "be a valid list": "be a list",
    "be a valid string": "be a text",
    "be a valid integer": "be a whole number",  # and what the given one is instead
    "be a valid number": "be a number",
    "be less than or equal to ": "be at most ",
    "be greater than or equal to ": "be at least ",
    "be less than ": "be below ",
    "be greater than ": "be above ",
}


class InvalidSpec(ValueError):
    """The application cannot work as described. The message has one line a problem: where, what, what to change."""


class StrictModel(BaseModel):
    """Refuses unknown keys, naming the nearest valid one, and numbers that are NaN or infinite."""

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
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false (in YAML also `yes` and `on`) for a number: pydantic would take them for 1 and 0."""
        assert info.field_name is not None, "the validator is one of fields"
        kind = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and not {int, float}.isdisjoint((kind, *get_args(kind))):
            raise ValueError(f"is {str(value).lower()}, must be a number")
        return value


def unknown_key(key: str, known: list[str]) -> str:
    """Say that a key is unknown, and name the nearest one that is known."""
    near = difflib.get_close_matches(key, known, n=1)
    return f"unknown key {key!r}; " + (f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}")


def describe(error: pydantic.ValidationError) -> str:
    """Return a line for each problem that pydantic has found, in the words of our other errors."""
    return "\n".join(_line(each["loc"], each["type"], each["msg"], each["input"]) for each in error.errors())


def _line(loc: tuple[int | str, ...], kind: str, message: str, given: Any) -> str:
    _, should, allowed = message.partition(" should ")
    if kind == "missing":
        what = "is missing"
    elif kind == "extra_forbidden":
        loc, what = loc[:-1], f"unknown key {loc[-1]!r}"
    elif should and kind != "value_error":
        what = f"is {_shown(given, SECRET in loc)}, must {_reword(allowed)}"
    else:
        what = message.removeprefix("Value error, ")
    where = ".".join(str(part) for part in loc)
    return f"{where}: {what}" if where else what


def _reword(allowed: str) -> str:
    """Turn `be a valid integer, unable to parse string as an integer` into `be a whole number`."""
    allowed = _AN_INSTANCE.sub("", allowed)
    for theirs, ours in PYDANTIC_PHRASES.items():
        if allowed.startswith(theirs):
            return ours + allowed.removeprefix(theirs).partition(",")[0]
    return allowed


def _shown(given: Any, is_secret: bool) -> str:
    match given:
        case None:
            return "empty"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case str() if not is_secret:
            return reprlib.repr(given)
    return "something else" if is_secret else str(given)
