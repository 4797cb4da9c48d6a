"""Writes one HTTP response: whole, as a stream of events, or as an error, at any point.

Long texts, such as those with many log probabilities, are written in pieces; other tasks run in between.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from itertools import chain

from starlette.types import Send

from ..bodies.body import PIECE_BYTES
from ..bodies.budget import TOKEN_ID_BYTES, Reservation
from ..errors import ApiError
from ..serving.sequence import ServedSequence
from .detokenize import ChoiceDelta
from .renderer import VALUES_AT_ONCE, Pieces, Renderer, Text, join
from .resume import ResumableStream

Step = list[tuple[int, ChoiceDelta]]
Steps = AsyncGenerator[Step, None]

LAST_SEND_S = 5.0  # for which an error waits for a client that does not read, which counts as a running request so long
JOINED_AT_ONCE = 64  # deltas of a whole response that are joined into one
# Estimated memory of a whole response until it is sent:
DELTA_BYTES = 300  # for each delta that is not joined with others
LOGPROB_TOKEN_BYTES = 300  # for each token with log probabilities, beside those
LOGPROB_BYTES = 100  # for each log probability: packed, and the text that is made from it at the end
JSON_HEADERS = {"content-type": "application/json"}
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # otherwise nginx holds tokens back
}


class WritingTurns:
    """Writes the long texts of a gateway so that there is only one piece of one text in each turn of the event loop.

    However many long texts there are, other tasks wait for one piece only.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def write(self, text: Text) -> list[bytes]:
        """Write a text, and return it as blocks to be sent."""
        if isinstance(text, bytes):
            return [text] if text else []
        blocks: list[bytes] = []
        pieces: list[bytes] = []
        num_bytes = 0
        while (piece := await self._take(text)) is not None:
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes >= PIECE_BYTES:
                blocks.append(b"".join(pieces))
                pieces, num_bytes = [], 0
        return [*blocks, b"".join(pieces)] if num_bytes else blocks

    async def _take(self, text: Pieces) -> bytes | None:
        async with self._lock:
            piece = next(text, None)
            await asyncio.sleep(0)  # inside the lock: the next piece, of whichever text, belongs to another turn
            return piece


class ResponseWriter:
    """The HTTP response of one request."""

    def __init__(self, send: Send, turns: WritingTurns, error_body: Callable[[ApiError], bytes]) -> None:
        """`error_body` encodes an error as the route's API requires."""
        self._send = send
        self._error_body = error_body
        self._turns = turns
        self.status = 0  # 0: the response has not begun
        self.sequences: Sequence[ServedSequence] = ()  # one for each choice
        self._streaming: Renderer | None = None  # set once a stream has begun
        self._is_within_text = False

    @property
    def has_begun(self) -> bool:
        return self.status > 0

    async def begin(self, headers: dict[str, str], status: int = 200) -> None:
        self.status = status
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def write_events(self, renderer: Renderer, steps: Steps, resumable: ResumableStream | None) -> None:
        self._streaming = renderer
        event = renderer.event if resumable is None else partial(resumable.event, renderer)
        async for step in steps:
            events = await self._turns.write(_events(event, step))
            if not self.has_begun and (events or resumable is None):  # a replay without events may still become a 409
                await self.begin(STREAM_HEADERS | _path_header([self.sequences[step[0][0]]]))
            if events:
                await self._write_blocks(events)
        if not self.has_begun:  # a resumed stream whose client already has all events but the last
            await self.begin(STREAM_HEADERS | _path_header(self.sequences))
        await self._write_blocks(await self._turns.write(renderer.end()), more=False)

    async def write_whole(self, renderer: Renderer, steps: Steps, held: Reservation) -> None:
        """Send the response when it is complete; hold its bytes until then. Raises `ApiError` if they are too many."""
        choices = [_CollectedChoice(joins=not renderer.needs_each_delta) for _ in self.sequences]
        async for step in steps:
            for index, delta in step:
                held.add_answer(choices[index].add(delta))
        blocks = await self._turns.write(renderer.whole([choice.deltas() for choice in choices]))
        length = {"content-length": str(sum(map(len, blocks)))}
        await self.begin(JSON_HEADERS | length | _path_header(self.sequences))
        await self._write_blocks(blocks, more=False)

    async def _write_blocks(self, blocks: Sequence[bytes], *, more: bool = True) -> None:
        *before, last = blocks
        for block in before:
            self._is_within_text = True
            await self.write(block)
            await asyncio.sleep(0)  # sending to a fast client never waits, so let other tasks run
        await self.write(last, more=more)
        self._is_within_text = False

    async def fail(self, error: ApiError) -> None:
        """End the response with an error: with its status if nothing has been sent, else as a last event without
        `[DONE]`.

        A whole response that breaks off stays shorter than its `content-length`, and a stream that breaks off inside an
        event lacks its end. In both cases the server closes the connection. So it is if the client does not read: then
        the error is not sent.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_SEND_S):
                await self._send_error(error)

    async def _send_error(self, error: ApiError) -> None:
        if self.has_begun:
            if self._streaming is not None and not self._is_within_text:
                await self._write_blocks(await self._turns.write(self._streaming.failed(error)), more=False)
            return
        body = self._error_body(error)
        length = {"content-length": str(len(body))}
        await self.begin(JSON_HEADERS | length | error.headers, error.status)
        await self.write(body, more=False)


class _CollectedChoice:
    """The deltas of a choice, which are joined as they come, since there may be one for each token.

    If `joins` is false, only deltas with log probabilities are joined: without these, the offsets of tokens are not
    known, and the tokens of the reasoning are estimated from each delta.
    """

    def __init__(self, *, joins: bool) -> None:
        self._joins = joins
        self._joined: list[ChoiceDelta] = []
        self._newest: list[ChoiceDelta] = []

    def add(self, delta: ChoiceDelta) -> int:
        """Add a delta. Return about how many bytes it takes until the response is sent."""
        self._newest.append(delta)
        joins = self._joins or bool(delta.tokens)
        if len(self._newest) == JOINED_AT_ONCE:
            joins = joins or any(each.tokens for each in self._newest)
            self._joined += [join(self._newest)] if joins else self._newest
            self._newest = []
        logprobs = len(delta.tokens) * LOGPROB_TOKEN_BYTES + delta.num_logprobs * LOGPROB_BYTES
        text = len(delta.text) + len(delta.token_ids) * TOKEN_ID_BYTES
        return logprobs + text + (0 if joins else DELTA_BYTES)

    def deltas(self) -> list[ChoiceDelta]:
        return self._joined + self._newest


def _events(event: Callable[[int, ChoiceDelta], Text], step: Step) -> Text:
    """Return the events of a step: as bytes, or in pieces if they take much work."""
    if sum(delta.num_logprobs for _, delta in step) > VALUES_AT_ONCE:
        return _in_pieces(event, step)
    texts = [event(*item) for item in step]
    short = [text for text in texts if isinstance(text, bytes)]
    if len(short) == len(texts):
        return b"".join(short)
    return chain.from_iterable([text] if isinstance(text, bytes) else text for text in texts)


def _in_pieces(event: Callable[[int, ChoiceDelta], Text], step: Iterable[tuple[int, ChoiceDelta]]) -> Pieces:
    """Write events as their pieces are requested: long ones piece by piece, short ones joined."""
    short: list[bytes] = []
    num_values = 0
    for index, delta in step:
        if num_values + delta.num_logprobs > VALUES_AT_ONCE:
            yield b"".join(short)
            short, num_values = [], 0
        text = event(index, delta)
        if isinstance(text, bytes):
            short.append(text)
            num_values += delta.num_logprobs
        else:
            yield from text
    yield b"".join(short)


def _path_header(sequences: Iterable[ServedSequence]) -> dict[str, str]:
    """Return the header that names the engines of all choices."""
    return {"x-baton-path": ", ".join(dict.fromkeys(sequence.path for sequence in sequences))}
