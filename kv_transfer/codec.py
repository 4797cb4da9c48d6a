"""Encode and decode messages between processes: msgpack, bounded field types, and one error for malformed bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .errors import MalformedMessage

MAX_REASON_CHARS = 4096

Name = Annotated[str, Meta(min_length=1, max_length=4096)]
Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]
BlockNumber = Annotated[int, Meta(ge=0, lt=2**40)]  # times the bytes of a block it fits into 64 bits
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]

encode = msgspec.msgpack.Encoder().encode


def decoder(kind: Any, description: str) -> Callable[[bytes], Any]:
    """Return a function that decodes `kind`: a type, or a union of tagged types.

    For invalid bytes the function raises `MalformedMessage` and nothing else. `description` names the type in errors.
    """
    decode = msgspec.msgpack.Decoder(kind).decode

    def decode_or_raise(data: bytes) -> Any:
        try:
            return decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedMessage(f"{len(data)} bytes cannot be read as {description}: {error}") from error

    return decode_or_raise
