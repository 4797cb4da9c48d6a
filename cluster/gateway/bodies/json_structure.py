"""Counts the values of a JSON text in its bytes, before any object is made of it.

    [  {      open a list or an object: each costs a parser, a validator and a template microseconds
    ,         separates values: a million token ids have as many
    "..."     hides them: a prompt may be source code

Nothing here checks that the text is JSON. The counts are right up to the first byte that is not, and a parser gets no
further than that byte.
"""

from __future__ import annotations

from ..errors import ApiError, bad_request

MAX_CONTAINERS = 2**15  # lists and objects in one body
MAX_COMMAS = 2**20 + 2**15  # a million token ids, and some fields
PIECE_BYTES = 64 << 10  # scanned at a time: well under a millisecond

_OTHERS = bytes(set(range(256)) - set(b'"[{,'))


def most_containers(text: bytes) -> int:
    """Return an upper bound: brackets within strings count as well."""
    return text.count(b"[") + text.count(b"{")


def most_commas(text: bytes) -> int:
    """Return an upper bound: commas within strings count as well."""
    return text.count(b",")


class StructureScan:
    """Counts containers and commas outside strings, piece by piece."""

    def __init__(self) -> None:
        self.containers = 0
        self.commas = 0
        self._in_string = 0
        self._carried = b""  # a backslash at a piece's end escapes the next piece's first byte

    def feed(self, piece: bytes) -> None:
        """Count the next piece of the text."""
        piece = self._carried + piece
        is_cut = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        self._carried = piece[-1:] if is_cut else b""
        if is_cut:
            piece = piece[:-1]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.translate(None, _OTHERS).split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= (len(parts) - 1) % 2
        self.containers += most_containers(outside)
        self.commas += most_commas(outside)

    def end(self) -> None:
        """End the text; the next piece begins another one."""
        self._in_string, self._carried = 0, b""


def too_many_values() -> ApiError:
    """Refuse a body with more values than are allowed."""
    message = (
        f"The body holds more than {MAX_CONTAINERS} lists and objects, or more than {MAX_COMMAS} values. "
        "Send less in one request."
    )
    return bad_request(None, message, "too_many_values")
