"""Helpers for the streams of one request: merging them, and cancelling them when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client closed its connection before the response was complete."""


async def merge_streams(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[list[tuple[int, T]], None]:
    """Yield items of all streams, each with its stream's index. All available items come together, to be written at
    once.

    The first stream that raises ends all of them, and so does closing this generator.
    """
    if len(streams) == 1:  # the usual case, without a task or a queue
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield [(0, item)]
        return
    queue: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait((index, item))

    tasks: list[asyncio.Task[None]] = []
    running = len(streams)
    try:
        for index, stream in enumerate(streams):
            tasks.append(asyncio.create_task(pump(index, stream)))
            tasks[-1].add_done_callback(lambda _: queue.put_nowait(None))
            await asyncio.sleep(0)  # the stream's first step may send a long prompt: let other clients run in between
        while running:
            entries = [await queue.get()]
            while not queue.empty():
                entries.append(queue.get_nowait())
            if items := [entry for entry in entries if entry is not None]:
                yield items
            if ended := len(entries) - len(items):
                running -= ended
                for task in tasks:
                    if task.done():
                        task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams[len(tasks) :]:
            await stream.aclose()


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; if the client disconnects, cancel it and raise `ClientDisconnected`.

    The request's body must have been read before.
    """
    task = asyncio.ensure_future(work)
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        return await task  # cancelling this call cancels `task`, too, and waits for its end
    except asyncio.CancelledError:
        if gone:
            raise ClientDisconnected from None
        raise
    finally:
        watcher.cancel()
