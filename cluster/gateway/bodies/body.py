"""One request's body as it arrives: a small one in this process, a larger one in a memory file (memfd).

A memory file does not fragment this process's heap, and another process can read it by its descriptor.

The values in a body are counted from its bytes, before any object is made from it:

    [  {      begin a list or an object: each costs a parser, a validator and a template microseconds
    ,         separates values: a million token ids have as many commas
    "..."     strings, inside which nothing counts: a prompt may be source code

The count does not check that the text is JSON. It is right up to the first byte that is not JSON, and a parser stops
there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from starlette.datastructures import Headers
from starlette.requests import Request

from ..errors import ApiError, bad_request
from .budget import Reservation

MAX_CONTAINERS = 2**15  # lists and objects in one body
MAX_COMMAS = 2**20 + 2**15  # enough for a million token ids and some fields
PIECE_BYTES = 64 << 10  # scanned at once, which takes well under a millisecond

_OTHERS = bytes(set(range(256)) - set(b'"[{,'))
JSON = "application/json"
INLINE_BYTES = 32 << 10  # larger bodies are read in a body process,
INLINE_CONTAINERS = 1024  # as are bodies with more lists and objects, each of which costs up to 10 us,
VALUES_OF_CONTAINER = 8  # as much as this number of values, each of which costs up to 1 us


def most_containers(text: bytes) -> int:
    """Return an upper bound for the number of lists and objects: brackets inside strings count, too."""
    return text.count(b"[") + text.count(b"{")


def most_commas(text: bytes) -> int:
    """Return an upper bound for the number of commas: those inside strings count, too."""
    return text.count(b",")


class StructureScan:
    """Counts containers and commas outside strings, piece by piece."""

    def __init__(self) -> None:
        self.containers = 0
        self.commas = 0
        self._in_string = 0
        self._carried = b""  # a backslash at the end of a piece, which escapes the first byte of the next one

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
        """End the text; the next piece begins another text."""
        self._in_string, self._carried = 0, b""


def too_many_values() -> ApiError:
    """Return the refusal of a body with more values than are allowed."""
    message = (
        f"The body holds more than {MAX_CONTAINERS} lists and objects, or more than {MAX_COMMAS} values. "
        "Send less in one request."
    )
    return bad_request(None, message, "too_many_values")


class Body:
    """The bytes that have arrived. As a context manager, it frees them at the end."""

    def __init__(self) -> None:
        self.size = 0
        self._chunks: list[bytes] = []  # while the body is small
        self._file: int | None = None
        self._scan = StructureScan()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    async def add(self, chunk: bytes) -> None:
        """Append a chunk. Raises `ApiError` (400) as soon as the body has too many values."""
        self.size += len(chunk)
        if self.size <= INLINE_BYTES:
            self._chunks.append(chunk)
            return
        if self._file is None:
            self._file = os.memfd_create("body")
            chunk = b"".join([*self._chunks, chunk])
            self._chunks.clear()
        for piece in _pieces(chunk):
            _write(self._file, piece)
            self._scan.feed(piece)
            if self._scan.containers > MAX_CONTAINERS or self._scan.commas > MAX_COMMAS:
                raise too_many_values()
            if len(piece) == PIECE_BYTES:
                await asyncio.sleep(0)  # let other clients run

    def small_text(self) -> bytes | None:
        """Return the whole body if the event loop may read it, else None."""
        if self._file is not None:
            return None
        text = b"".join(self._chunks)
        if _is_costly(most_containers(text), most_commas(text)):
            scan = StructureScan()
            scan.feed(text)
            if _is_costly(scan.containers, scan.commas):
                return None
        return text

    def file(self) -> int:
        """Return the descriptor of a file that holds the body, valid until `close`."""
        if self._file is None:
            self._file = os.memfd_create("body")
            _write(self._file, b"".join(self._chunks))
            self._chunks.clear()
        return self._file

    def close(self) -> None:
        self._chunks.clear()
        if self._file is not None:
            os.close(self._file)
            self._file = None


async def read_body(request: Request, limit_bytes: int, held: Reservation) -> Body:
    """Read and return the whole body.

    Raises `ApiError`: 415 for a media type or encoding other than plain JSON; 413 for a declared size above the limit,
    or above what `held` could ever hold, or as soon as a chunked body exceeds it; 400 for too many values; 503 if there
    is no memory left.
    """
    _check_media(request.headers)
    limit_bytes = min(limit_bytes, held.largest_body_bytes)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    body = Body()
    try:
        async for chunk in request.stream():
            size = body.size + len(chunk)
            if size > limit_bytes:
                raise _too_large(limit_bytes)
            held.hold_body(size)
            await body.add(chunk)
    except BaseException:
        body.close()
        raise
    return body


def _is_costly(containers: int, commas: int) -> bool:
    return containers + commas / VALUES_OF_CONTAINER > INLINE_CONTAINERS


def _pieces(chunk: bytes) -> Iterator[bytes]:
    for start in range(0, len(chunk), PIECE_BYTES):
        yield chunk[start : start + PIECE_BYTES]


def _write(file: int, piece: bytes) -> None:
    """Write a piece to a memory file. Raises `OSError` if there is no memory for all of it."""
    if os.write(file, piece) < len(piece):
        raise OSError("a file in memory took a part of a write")


def _check_media(headers: Headers) -> None:
    """Accept JSON only: foreign pages can make browsers send forms, but JSON only from allowed origins."""
    kind = headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if kind != JSON and not kind.endswith("+json"):
        raise _unsupported(f"The body must be JSON, with the header 'Content-Type: {JSON}'. This one is {kind!r}.")
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise _unsupported(f"The body must come as it is, without the header 'Content-Encoding: {encoding}'.")


def _unsupported(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type", headers={"accept-encoding": "identity"})


def _too_large(limit_bytes: int) -> ApiError:
    message = f"The body is larger than this server's limit of {limit_bytes} bytes."
    return ApiError(413, message, code="body_too_large")
