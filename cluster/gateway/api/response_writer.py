"""Writes one HTTP response: whole or as a stream of events, or an error at any point."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial

from starlette.types import Send

from ..errors import ApiError
from ..serving.sequence import ServedSequence
from .detokenize import ChoiceDelta
from .renderer import Renderer
from .resume import ResumableStream

Steps = AsyncGenerator[list[tuple[int, ChoiceDelta]], None]

INLINE_LOGPROBS = 64  # responses with more tokens with log probabilities are written in a thread
JSON_HEADERS = {"content-type": "application/json"}
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # otherwise nginx buffers tokens
}


class ResponseWriter:
    """The HTTP response of one request."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0  # 0: not begun
        self.sequences: Sequence[ServedSequence] = ()  # one for each choice
        self._streaming: Renderer | None = None  # set once events are streamed

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
            events = await _written(_num_logprobs(step), lambda: b"".join([event(*item) for item in step]))  # noqa: B023
            if not self.has_begun and (events or resumable is None):  # until then it may still become a 409
                await self.begin(STREAM_HEADERS | _path_header([self.sequences[step[0][0]]]))
            if events:
                await self.write(events)
        if not self.has_begun:  # the client has all events but the end
            await self.begin(STREAM_HEADERS | _path_header(self.sequences))
        await self.write(renderer.end(), more=False)

    async def write_whole(self, renderer: Renderer, steps: Steps) -> None:
        choices: list[list[ChoiceDelta]] = [[] for _ in self.sequences]
        async for step in steps:
            for index, delta in step:
                choices[index].append(delta)
        num_logprobs = sum(_num_logprobs(enumerate(deltas)) for deltas in choices)
        body = await _written(num_logprobs, partial(renderer.whole, choices))
        length = {"content-length": str(len(body))}
        await self.begin(JSON_HEADERS | length | _path_header(self.sequences))
        await self.write(body, more=False)

    async def fail(self, error: ApiError) -> None:
        """End the response with an error: as its status if nothing is sent yet, else as a last event without `[DONE]`.

        A whole response that breaks off stays shorter than its `content-length`, and the server closes the connection.
        """
        if self.has_begun:
            if self._streaming is not None:
                await self.write(self._streaming.failed(error), more=False)
            return
        body = error.body()
        length = {"content-length": str(len(body))}
        await self.begin(JSON_HEADERS | length | error.headers, error.status)
        await self.write(body, more=False)


def _num_logprobs(step: Iterable[tuple[int, ChoiceDelta]]) -> int:
    """Return the number of tokens with log probabilities: they take ten times as long to write as text."""
    return sum(len(delta.tokens) + len(delta.prompt_logprobs or ()) for _, delta in step)


async def _written(num_logprobs: int, write: Callable[[], bytes]) -> bytes:
    """Write long pieces in a thread, which passes the interpreter's lock on every few milliseconds."""
    return write() if num_logprobs <= INLINE_LOGPROBS else await asyncio.to_thread(write)


def _path_header(sequences: Iterable[ServedSequence]) -> dict[str, str]:
    """Return the header that names the engines of all choices."""
    return {"x-baton-path": ", ".join(dict.fromkeys(sequence.path for sequence in sequences))}
