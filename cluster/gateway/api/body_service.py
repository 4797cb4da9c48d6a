"""Reads a gateway's request bodies: small ones in the event loop, others in the pool of body processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import msgspec

from ..bodies.body import PIECE_BYTES, Body
from ..bodies.budget import MemoryBudget, Reservation
from ..bodies.process_messages import (
    PACKED_TOKEN_BYTES,
    AnswerReply,
    PreparedReply,
    ReadOrder,
    read_file,
    unpack_tokens,
)
from ..bodies.process_pool import BodyProcessPool
from ..errors import ApiError
from ..metrics import GatewayMetrics
from ..model import ServedModel
from ..settings import GatewaySettings
from .body_reader import BodyReader, RequestKind
from .job import PreparedRequest
from .prepare import TooLargeForEventLoop

PROCESS_MODULE = "baton.cluster.gateway.api.body_process"
TOKENS_AT_ONCE = 64 << 10  # that are unpacked before other tasks of the loop run
_decode = msgspec.json.Decoder(PreparedRequest).decode  # not msgpack, which has no integers of more than 64 bits


class BodyService:
    """Reads bodies for the endpoints, within the memory budget. All methods raise `ApiError`."""

    def __init__(self, model: ServedModel, settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        self.budget = MemoryBudget(settings.request_memory_bytes)
        self.processes = BodyProcessPool(PROCESS_MODULE, model, settings.body_processes, metrics)
        self._settings = settings
        self._reader = BodyReader(model, settings)
        metrics.watch_memory(lambda: self.budget.held_bytes)

    def reconfigure(self, settings: GatewaySettings) -> None:
        """Use other settings from the next body on. Memory in use is kept, even if it exceeds a smaller budget."""
        self._settings = settings
        self.budget.limit_bytes = settings.request_memory_bytes
        self._reader.reconfigure(settings)

    async def prepare(self, kind: RequestKind, body: Body, key_salt: str, held: Reservation) -> PreparedRequest:
        """Prepare a generation. `held` then counts the prompts in place of the body. `key_salt`: see `BodyReader`."""
        prepared = await self._prepare(kind, body, key_salt)
        body.close()
        held.hold_prompts(prepared.num_held_tokens)
        return prepared

    async def answer(self, kind: RequestKind, body: Body, held: Reservation) -> TextAnswer:
        """Return the whole response to a request that generates nothing; `held` then counts it in place of the body."""
        text = body.small_text()
        if text is not None:
            with contextlib.suppress(TooLargeForEventLoop):
                return self._held(TextAnswer(await self._reader.answer(kind, text)), held)
        reply, file = await self.processes.read(self._order(kind), body.file())
        assert isinstance(reply, AnswerReply)
        return self._held(TextAnswer(size=reply.num_bytes, file=file), held)

    def _held(self, answer: TextAnswer, held: Reservation) -> TextAnswer:
        try:
            held.hold_answer(answer.size)
        except ApiError:
            answer.close()
            raise
        return answer

    def _order(self, kind: RequestKind, key_salt: str = "") -> ReadOrder:
        settings = self._settings
        return ReadOrder(kind, key_salt, settings.max_choices, settings.special_tokens_in_messages)

    async def _prepare(self, kind: RequestKind, body: Body, key_salt: str) -> PreparedRequest:
        text = body.small_text()
        if text is not None:
            with contextlib.suppress(TooLargeForEventLoop):
                return await self._reader.prepare(kind, text, key_salt)
        reply, file = await self.processes.read(self._order(kind, key_salt), body.file())
        try:
            assert isinstance(reply, PreparedReply)
            return await _read_prepared(reply, file)
        finally:
            os.close(file)


class TextAnswer:
    """A JSON response, in this process or in a memory file. As a context manager, it frees the response at the end."""

    def __init__(self, text: bytes = b"", *, size: int = 0, file: int | None = None) -> None:
        self._text, self._file = text, file
        self.size = len(text) if file is None else size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def pieces(self) -> Iterator[bytes]:
        """Yield the response in pieces."""
        for start in range(0, self.size, PIECE_BYTES):
            if self._file is None:
                yield self._text[start : start + PIECE_BYTES]
            else:
                yield read_file(self._file, min(PIECE_BYTES, self.size - start), start)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file, self.size = None, 0


async def _read_prepared(reply: PreparedReply, file: int) -> PreparedRequest:
    """Read a prepared request in pieces: unpacking a million tokens at once would block the loop for tens of ms."""
    prepared = _decode(read_file(file, reply.num_bytes))
    at = reply.num_bytes
    lengths = unpack_tokens(read_file(file, reply.num_texts * PACKED_TOKEN_BYTES, at))
    at += reply.num_texts * PACKED_TOKEN_BYTES
    texts: list[list[int]] = []
    for length in lengths:
        tokens: list[int] = []
        for start in range(0, length, TOKENS_AT_ONCE):
            count = min(TOKENS_AT_ONCE, length - start)
            tokens += unpack_tokens(read_file(file, count * PACKED_TOKEN_BYTES, at))
            at += count * PACKED_TOKEN_BYTES
            if length > TOKENS_AT_ONCE:
                await asyncio.sleep(0)
        texts.append(tokens)
    if prepared.prediction is not None:
        prepared.prediction = texts.pop()
    prepared.prompts = texts
    return prepared
