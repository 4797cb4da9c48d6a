"""Converts pydantic's errors to a 400 that names the field and describes the value as JSON.

Pydantic's paths have levels that the body lacks: members of unions, and fields that a validator has renamed. A field's
name consists of those parts of the path that the body has.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from baton.cluster.pluralize import pluralize

from ..errors import ApiError, bad_request, excerpt, field_name, shorten
from .validators import FieldError, json_type_name

_JSON_WORDS = {"None": "null", "True": "true", "False": "false"}
_TYPES = {  # pydantic's error -> the required type
    **dict.fromkeys(("string_type",), "a string"),
    **dict.fromkeys(("int_type", "int_from_float"), "an integer"),
    **dict.fromkeys(("float_type", "finite_number"), "a number"),
    **dict.fromkeys(("bool_type",), "true or false"),
    **dict.fromkeys(("list_type",), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
}
_LENGTHS = {  # pydantic's error -> the unit that is too few or too many
    "too_short": "item",
    "too_long": "item",
    "string_too_short": "character",
    "string_too_long": "character",
}
_BOUNDS = {  # pydantic's error -> the message behind the field's name
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}


def first_error(kind: type[BaseModel], error: ValidationError, body: dict[str, Any]) -> ApiError:
    """Return the refusal of `body`, which is not a valid `kind`."""
    first = error.errors(include_url=False)[0]
    place = list(_known(first, body))
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        place += cause.place
    path = field_name(place)
    match first["type"]:
        case "extra_forbidden":
            return bad_request(path, _unknown(kind, place), "unknown_parameter")
        case "missing":
            return bad_request(path, f"{path!r} is required.", "missing_required_parameter")
        case "value_error":
            return bad_request(path, f"{path!r} {cause}.")
        case "literal_error" | "none_required":
            return bad_request(path, f"{path!r} must be {_allowed(first)}.")
        case name if name in _TYPES:
            return bad_request(path, f"{path!r} must be {_TYPES[name]}, not {json_type_name(first['input'])}.")
        case name if name in _LENGTHS:
            return bad_request(path, f"{path!r} must have {_length(first)}.")
        case name if name in _BOUNDS:
            return bad_request(path, f"{path!r} {_BOUNDS[name].format(**first['ctx'])}.")
    return bad_request(path, f"{path!r} is not valid.")


def _known(error: ErrorDetails, body: Any) -> Iterator[str | int]:
    """Yield the parts of an error's path that `body` has, and the name of a missing field."""
    *_, last = error["loc"]
    for part in error["loc"]:
        match body:
            case dict() if (key := str(part)) in body:
                body = body[key]
                yield key
            case list() if isinstance(part, int):
                body = body[part]
                yield part
            case dict() if part is last and error["type"] == "missing":
                yield str(part)


def _allowed(error: ErrorDetails) -> str:
    """Describe the allowed values of an enumeration, and the given one."""
    allowed = error.get("ctx", {}).get("expected", "None")
    for ours, name in _JSON_WORDS.items():
        allowed = allowed.replace(ours, name)
    given = error["input"]
    return allowed if not isinstance(given, str) else f"{allowed}, not {excerpt(given)}"


def _length(error: ErrorDetails) -> str:
    noun, limits = _LENGTHS[error["type"]], error["ctx"]
    if "min_length" in limits:
        return f"at least {pluralize(limits['min_length'], noun)}"
    return f"at most {pluralize(limits['max_length'], noun)}"


def _unknown(kind: type[BaseModel], place: list[str | int]) -> str:
    name = shorten(str(place[-1]))
    nearest = difflib.get_close_matches(name, kind.model_fields, n=1) if len(place) == 1 else []
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"Unrecognized request argument: {name!r}.{hint}"
