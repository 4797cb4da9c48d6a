"""One request's HTTP response: whole, or a stream of events; or an error, wherever it comes in between."""

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

INLINE_LOGPROBS = 64  # tokens with log probabilities that are written in the event loop
JSON_HEADERS = {"content-type": "application/json"}
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # or nginx collects tokens
}


class ResponseWriter:
    """The HTTP response of one request."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0  # 0: not begun
        self.sequences: Sequence[ServedSequence] = ()  # of its choices
        self._streaming: Renderer | None = None  # of events, once there is one

    @property
    def begun(self) -> bool:
        return self.status > 0

    async def begin(self, headers: dict[str, str], status: int = 200) -> None:
        self.status = status
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def write_events(self, renderer: Renderer, steps: Steps, trail: ResumableStream | None) -> None:
        self._streaming = renderer
        event = renderer.event if trail is None else partial(trail.event, renderer)
        async for step in steps:
            events = await _written(_num_logprobs(step), lambda: b"".join([event(*item) for item in step]))  # noqa: B023
            if not self.begun and (events or trail is None):  # before there is news the answer may still be a 409
                await self.begin(STREAM_HEADERS | _path_header([self.sequences[step[0][0]]]))
            if events:
                await self.write(events)
        if not self.begun:  # the client had it all, but for the end
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
        """Ends the response: with the error's status where none is sent yet, else with a last event and no `[DONE]`.

        A whole answer that is broken off stays shorter than was said, and the server closes the connection.
        """
        if self.begun:
            if self._streaming is not None:
                await self.write(self._streaming.failed(error), more=False)
            return
        body = error.body()
        length = {"content-length": str(len(body))}
        await self.begin(JSON_HEADERS | length | error.headers, error.status)
        await self.write(body, more=False)


def _num_logprobs(step: Iterable[tuple[int, ChoiceDelta]]) -> int:
    """Return how many tokens are told with log probabilities: those take ten times as long to write as text."""
    return sum(len(delta.tokens) + len(delta.prompt_logprobs or ()) for _, delta in step)


async def _written(num_logprobs: int, write: Callable[[], bytes]) -> bytes:
    """Write in a thread what would hold the event loop up: the interpreter's lock passes on every few milliseconds."""
    return write() if num_logprobs <= INLINE_LOGPROBS else await asyncio.to_thread(write)


def _path_header(sequences: Iterable[ServedSequence]) -> dict[str, str]:
    """Choices of one request may go different ways: all are named."""
    return {"x-baton-path": ", ".join(dict.fromkeys(sequence.path for sequence in sequences))}
