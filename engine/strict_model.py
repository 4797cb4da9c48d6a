"""The base of all settings that people write, in files, options or calls, with its error messages.

    class Limits(StrictModel):
        requests: int = Field(1024, gt=0)

    Limits.model_validate({"request": 1})   # request: is unknown; did you mean 'requests'?
    Limits.model_validate({"requests": 0})  # requests: is 0, must be above 0

Settings never change, and are passed between processes as they were given: `model_dump(exclude_unset=True)`.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

_AN_INSTANCE = re.compile(r" or instance of \w+$")
PYDANTIC_PHRASES = {
    "be a valid dictionary": "be a mapping",
    "be a valid list": "be a list",
    "be a valid tuple": "be a list",
    "be a valid string": "be a text",
    "be a valid boolean": "be true or false",
    "be a valid integer": "be a whole number",  # pydantic continues with what the given value is; that is dropped
    "be a valid number": "be a number",
    "be less than or equal to ": "be at most ",
    "be greater than or equal to ": "be at least ",
    "be less than ": "be below ",
    "be greater than ": "be above ",
}
_LARGEST_SHOWN = 10**20  # Python spells no numbers of more than 4300 digits
_OUR_ERROR = "setting"  # pydantic's type for errors with our own messages

# Upper limits of settings. Nobody needs as much; values above are slips, which would fail late or fill the memory.
MOST_BYTES = 10**15  # of any memory or disk
MOST_TOKENS = 10**8  # of one sequence
MOST_REQUESTS = 10**6  # at the same time
MOST_RANKS = 1 << 14  # of one application; each is a process with a device
MOST_CPUS = 1 << 13  # of one machine; Linux knows no more
LONGEST_S = 1e6  # eleven days: as milliseconds, it fits in 32 bits


class StrictModel(BaseModel):
    """Refuses unknown keys, naming the nearest valid one, and numbers that are NaN or infinite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    refused: ClassVar[Mapping[str, str]] = {}
    """Keys that are known and not taken here, each with the reason."""

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            known = [name for name in cls.model_fields if name not in cls.refused]
            unknown = {str(key): f"is unknown; {hint(str(key), known)}" for key in data if key not in known}
            cls.refuse(unknown | {key: reason for key, reason in cls.refused.items() if key in data})
        return data

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false (in YAML also `yes` and `on`) for numbers: pydantic would take them for 1 and 0."""
        assert info.field_name is not None, "the validator is one of fields"
        kind = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and not {int, float}.isdisjoint((kind, *get_args(kind))):
            raise ValueError(f"is {str(value).lower()}, must be a number")
        return value

    @classmethod
    def refuse(cls, problems: Mapping[str, str]) -> None:
        """Raise an error with all `problems`, messages by field; for validators of a model. Without any, do nothing."""
        errors = [
            InitErrorDetails(type=PydanticCustomError(_OUR_ERROR, message), loc=(name,), input=None)
            for name, message in problems.items()
        ]
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)


@dataclass(frozen=True)
class OneOf:
    """Annotates a text that must be one of `allowed`. Like `Literal`, but for values that a table in the code has."""

    allowed: Collection[str]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.literal_schema(list(self.allowed))


def nearest(key: str, known: Collection[str]) -> str:
    """Return `did you mean 'NAME'?` with the nearest known name; empty if none is near."""
    near = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def hint(key: str, known: Collection[str]) -> str:
    """Return a hint for an unknown key: the nearest known one, or all that are known."""
    return nearest(key, known) or f"known are {', '.join(known)}"


def describe(error: ValidationError, secret: str = "") -> str:
    """Return a line for each problem that pydantic has found, worded like our other errors.

    Values of the field `secret` are not printed.
    """
    return "\n".join(f"{where}: {what}" if where else what for where, what in problems_of(error, secret))


def problems_of(error: ValidationError, secret: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each problem, joined by dots, and what is wrong there."""
    for each in error.errors():
        loc, message = each["loc"], each["msg"]
        _, should, allowed = message.partition(" should ")
        if each["type"] == "missing":
            what = "is missing"
        elif each["type"] == "int_parsing_size" or (each["type"] == "float_type" and isinstance(each["input"], int)):
            what = f"is {_shown(each['input'], secret in loc)}, must be a smaller one"
        elif should and each["type"] not in ("value_error", _OUR_ERROR):
            what = f"is {_shown(each['input'], secret in loc)}, must {_reword(allowed)}"
        else:
            what = message.removeprefix("Value error, ")
        yield ".".join(map(str, loc)), what


def _reword(allowed: str) -> str:
    """Turn `be a valid integer, unable to parse string as an integer` into `be a whole number`."""
    allowed = _AN_INSTANCE.sub("", allowed).partition(" after validation")[0]
    for theirs, ours in PYDANTIC_PHRASES.items():
        if allowed.startswith(theirs):
            return ours + allowed.removeprefix(theirs).partition(",")[0]
    return allowed


def _shown(given: Any, is_secret: bool) -> str:
    match given:
        case None:
            return "empty"
        case bool() if not is_secret:
            return str(given).lower()
        case int() if abs(given) > _LARGEST_SHOWN:
            return "a huge number"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case str() if not is_secret:
            return reprlib.repr(given)
    return "something else" if is_secret else str(given)
