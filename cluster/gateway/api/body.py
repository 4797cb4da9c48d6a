"""A request body becomes Python data, or a refusal that says what is wrong with it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from starlette.datastructures import Headers
from starlette.requests import Request

from ..errors import ApiError, bad_request
from .json_faults import first_fault

JSON = "application/json"


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body. Raises 415 for what is declared to be anything but plain JSON; 413 before reading what is
    declared to be too large, and as soon as a chunked one is.
    """
    _check_media(request.headers)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _check_media(headers: Headers) -> None:
    """A foreign page may make browsers send texts and forms unasked, but JSON only where its origin is allowed."""
    kind = headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if kind != JSON and not kind.endswith("+json"):
        raise _unsupported(f"The body must be JSON, with the header 'Content-Type: {JSON}'. This one is {kind!r}.")
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise _unsupported(f"The body must come as it is, without the header 'Content-Encoding: {encoding}'.")


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
    result = dict(pairs)
    if len(result) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise bad_request(twice, f"The key {twice!r} occurs twice in one JSON object.", "invalid_json")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise bad_request(None, f"{name} is not a number in JSON.", "invalid_json")


def _unsupported(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type", headers={"accept-encoding": "identity"})


def _too_large(limit_bytes: int) -> ApiError:
    message = f"The body is larger than this server's limit of {limit_bytes} bytes."
    return ApiError(413, message, code="body_too_large")
