"""Reads JSON strictly: a request's text becomes Python data, or a refusal that says what is wrong with it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from ..errors import bad_request
from .json_faults import first_fault

MAX_KEYS = 8192  # of one object
MAX_KEY_CHARS = 4096


def parse_object(body: bytes) -> dict[str, Any]:
    """Strict JSON: an object without duplicate keys or what `json_faults` finds. Raises `ApiError` (400) that names the
    field.
    """
    try:
        # Not `json.loads(body)`: that guesses encodings.
        value = json.loads(body.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise bad_request(None, f"The body is not valid JSON: {error}.", "invalid_json") from None
    except RecursionError:
        raise bad_request(None, "The body's JSON is nested too deeply.", "invalid_json") from None
    except ValueError as error:  # an integer of thousands of digits
        raise bad_request(None, f"The body holds a number that cannot be read: {error}.", "invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request(None, "The body must be a JSON object.", "invalid_json")
    if (fault := first_fault(body, value)) is not None:
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
