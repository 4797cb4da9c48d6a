r"""Parses JSON strictly, and refuses values that later steps could not process:

"\ud800"        half of a surrogate pair, which no encoding and no tokenizer accepts
1e999           infinity; likewise an integer beyond the range of doubles, which breaks sums and messages
[[[[ ... ]]]]   nested so deeply that a later recursion, further down the stack, would fail
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

from ..errors import bad_request, field_name

MAX_KEYS = 8192  # of one object
MAX_KEY_CHARS = 4096
MAX_DEPTH = 128
MAX_DIGITS = 308  # of an integer: it is then less than the largest double

# In a text without a match, nesting is the only possible fault: an exponent of two digits adds 99 digits at most.
_SUSPECT = re.compile(rb"\\u[dD]|\d{%d}|\d[eE]\+?\d{3}" % (MAX_DIGITS + 1 - 99))

JsonPath = tuple[str | int, ...]  # keys and indices from the top


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object; refuse duplicate keys and everything that `first_json_fault` finds.

    Raises `ApiError` (400) that names the field.
    """
    try:
        # Not `json.loads(body)`, which guesses encodings.
        value = json.loads(body.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise bad_request(None, f"The body is not valid JSON: {error}.", "invalid_json") from None
    except RecursionError:
        raise bad_request(None, "The body's JSON is nested too deeply.", "invalid_json") from None
    except ValueError as error:  # an integer of thousands of digits
        message = f"The body holds a number of more than {MAX_DIGITS} digits, which cannot be read."
        raise bad_request(None, message, "invalid_json", detail=str(error)) from None
    if not isinstance(value, dict):
        raise bad_request(None, "The body must be a JSON object.", "invalid_json")
    if (fault := first_json_fault(body, value)) is not None:
        what = "The body" if fault.name is None else repr(fault.name)
        raise bad_request(fault.name, f"{what} {fault.message}.", "invalid_json")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        message = f"The body holds an object of {len(pairs)} keys, more than {MAX_KEYS}."
        raise bad_request(None, message, "too_many_values")
    result = dict(pairs)
    if max(map(len, result), default=0) > MAX_KEY_CHARS:
        raise bad_request(None, f"The body holds a key of more than {MAX_KEY_CHARS} characters.", "too_many_values")
    if len(result) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise bad_request(twice, f"The key {twice!r} occurs twice in one JSON object.", "invalid_json")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise bad_request(None, f"{name} is not a number in JSON.", "invalid_json")


class JsonFault(NamedTuple):
    place: JsonPath
    message: str  # without a full stop; it is written after the name of the path

    @property
    def name(self) -> str | None:
        """The path as it is written in error messages; None for the whole body."""
        return field_name(self.place)


def first_json_fault(text: bytes, value: Any) -> JsonFault | None:
    """Return the first value that cannot be processed, or None. `value` is the parsed `text`."""
    may_be_deep = text.count(b"[") + text.count(b"{") > MAX_DEPTH
    return _find(value, ()) if may_be_deep or _SUSPECT.search(text) else None


def _find(value: Any, place: JsonPath) -> JsonFault | None:
    match value:
        case str() if not _is_text(value):
            return JsonFault(place, "holds half a surrogate pair, which is not text")
        case int() if abs(value) >= 10**MAX_DIGITS:
            return JsonFault(place, f"is a number of more than {MAX_DIGITS} digits")
        case float() if math.isinf(value):
            return JsonFault(place, "is a number larger than all that can be computed with")
        case dict() | list() if len(place) >= MAX_DEPTH:
            return JsonFault(place[:1], f"is nested more than {MAX_DEPTH} deep")
        case dict() if not all(map(_is_text, value)):
            return JsonFault(place, "has a key with half a surrogate pair, which is not text")
        case dict():
            return _find_among(value.items(), place)
        case list() if not _are_tokens(value):
            return _find_among(enumerate(value), place)
    return None


def _find_among(items: Iterable[tuple[str | int, Any]], place: JsonPath) -> JsonFault | None:
    faults = (_find(value, (*place, key)) for key, value in items)
    return next(filter(None, faults), None)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _are_tokens(values: list[Any]) -> bool:
    """Return whether all values are token ids. There may be millions, so no Python code runs for each of them."""
    return set(map(type, values)) == {int} and max(values) < 2**63 and min(values) >= 0
