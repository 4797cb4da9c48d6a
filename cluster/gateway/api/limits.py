"""Size limits of a request's lists and objects, checked before validation and rendering.

`bodies/json_structure.py` limits the number of values in a body; the parts limited here cost more than others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..bodies.json_structure import StructureScan
from ..errors import bad_request, field_name, prompt_too_long

MAX_FIELDS = 256  # of one request
MAX_METADATA = 16  # OpenAI's limits
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_CHARS = 512
MAX_VARIABLES_CHARS = 2**17  # of `chat_template_kwargs`, as JSON
MAX_TOOLS_CHARS = 2**20  # of `tools`, as JSON
MAX_CALL_CONTAINERS = 2**14  # lists and objects in all `arguments`
MAX_CALL_COMMAS = 2**17

TURNS = ("messages", "input")


def check_sizes(data: dict[str, Any], max_model_len: int) -> None:
    """Check all limits. Raises `ApiError` (400) that names the field."""
    if len(data) > MAX_FIELDS:
        raise bad_request(None, f"The body has {len(data)} fields, more than {MAX_FIELDS}.", "too_many_values")
    _check_metadata(data.get("metadata"))
    _check_chars(data, "chat_template_kwargs", MAX_VARIABLES_CHARS)
    _check_chars(data, "tools", MAX_TOOLS_CHARS)
    for field in TURNS:
        turns = data.get(field)
        if not isinstance(turns, list):
            continue
        if len(turns) > max_model_len:  # each is a token at least
            raise prompt_too_long(field, max_model_len, len(turns))
        _check_arguments(field, turns)


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict):
        return
    values = [value for value in metadata.values() if isinstance(value, str)]
    longest_key = max(map(len, metadata), default=0)
    longest = max(map(len, values), default=0)
    if len(metadata) > MAX_METADATA or longest_key > MAX_METADATA_KEY_CHARS or longest > MAX_METADATA_CHARS:
        message = (
            f"'metadata' may have {MAX_METADATA} keys of {MAX_METADATA_KEY_CHARS} characters, with values of "
            f"{MAX_METADATA_CHARS}."
        )
        raise bad_request("metadata", message)


def _check_chars(data: dict[str, Any], field: str, most: int) -> None:
    value = data.get(field)
    if value and (length := len(json.dumps(value, ensure_ascii=False))) > most:
        raise bad_request(field, f"{field!r} has {length} characters as JSON, more than the {most} that are allowed.")


def _check_arguments(field: str, turns: list[Any]) -> None:
    """Limit the arguments of all tool calls together: each is parsed, and most templates write each as JSON."""
    scan = StructureScan()
    for place, arguments in _arguments(field, turns):
        scan.feed(arguments.encode(errors="replace"))
        scan.end()
        if scan.containers > MAX_CALL_CONTAINERS or scan.commas > MAX_CALL_COMMAS:
            name = field_name(place)
            message = (
                f"{name!r} and the calls before it hold more than {MAX_CALL_CONTAINERS} lists and objects, or "
                f"{MAX_CALL_COMMAS} values."
            )
            raise bad_request(name, message, "too_many_values")


def _arguments(field: str, turns: list[Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the path and the text of the arguments of each tool call."""
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict):
            continue
        if isinstance(turn.get("arguments"), str):
            yield (field, index, "arguments"), turn["arguments"]
        calls = turn.get("tool_calls")
        for at, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                yield (field, index, "tool_calls", at, "function", "arguments"), function["arguments"]
