"""Tool calls of earlier messages, converted to what chat templates expect."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SHORT_ID_CHARS = 9


class ReadableArguments(dict[str, Any]):
    """The arguments of a call, as an object that turns into JSON when a template adds it to text.

    DeepSeek's templates join strings; all others look into the object or write it with `tojson`.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def with_readable_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message whose calls have `ReadableArguments`."""
    calls = [_with_arguments(call) for call in message.get("tool_calls") or ()]
    return {**message, "tool_calls": calls} if calls else dict(message)


def with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a message whose call ids have nine letters and digits, as Mistral's templates demand.

    Other ids become digests of them, the same in a call and in its result.
    """
    short = dict(message)
    if short.get("tool_call_id"):
        short["tool_call_id"] = _short_id(short["tool_call_id"])
    if short.get("tool_calls"):
        short["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in short["tool_calls"]]
    return short


def _short_id(call_id: str | None) -> str | None:
    if call_id is None or (len(call_id) == SHORT_ID_CHARS and call_id.isalnum()):
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=SHORT_ID_CHARS).hexdigest()[:SHORT_ID_CHARS]


def _with_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": ReadableArguments(function["arguments"])}}
