"""Messages between processes of this package: msgpack, and one error for all that is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from .errors import MalformedMessage

encode = msgspec.msgpack.Encoder().encode


def decoder(kind: Any, what: str) -> Callable[[bytes], Any]:
    """Decodes a type, or one of a union of tagged types; `what`: they are called in errors.

    It raises `MalformedMessage`, and nothing else, whatever the bytes are.
    """
    decode = msgspec.msgpack.Decoder(kind).decode

    def decode_or_say(data: bytes) -> Any:
        try:
            return decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedMessage(f"{len(data)} bytes are no {what}: {error}") from error

    return decode_or_say
