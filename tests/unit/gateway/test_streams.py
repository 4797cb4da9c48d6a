"""Streams that are merged into one, and work that ends with its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from baton.cluster.gateway.api.streams import ClientDisconnected, merge_streams, run_until_disconnect


class Source:
    """A stream that yields what a test feeds it, and records when it is closed."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        self.closed = False

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True


async def test_available_items_come_together_with_their_index() -> None:
    sources = [Source() for _ in range(3)]
    merged = merge_streams([source.items() for source in sources])
    for index, source in enumerate(sources):
        source.queue.put_nowait(index * 10)
    await asyncio.sleep(0)
    assert sorted(await anext(merged)) == [(0, 0), (1, 10), (2, 20)]
    for source in sources:
        source.queue.put_nowait(None)
    assert [item async for item in merged] == []


@pytest.mark.parametrize("count", [1, 3])
async def test_an_error_of_one_stream_closes_all(count: int) -> None:
    sources = [Source() for _ in range(count)]
    merged = merge_streams([source.items() for source in sources])
    sources[0].queue.put_nowait(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await anext(merged)
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_closing_the_merged_stream_closes_all(count: int) -> None:
    sources = [Source() for _ in range(count)]
    merged = merge_streams([source.items() for source in sources])
    sources[0].queue.put_nowait(1)
    await anext(merged)
    await merged.aclose()
    assert all(source.closed for source in sources)


async def test_work_is_cancelled_and_cleaned_up_when_the_client_leaves() -> None:
    cleaned = asyncio.Event()
    left = asyncio.Event()

    async def receive() -> dict[str, str]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            left.set()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    with pytest.raises(ClientDisconnected):
        await run_until_disconnect(receive, work())
    assert cleaned.is_set()


async def test_a_timeout_is_not_mistaken_for_a_disconnect() -> None:
    async def receive() -> dict[str, str]:
        await asyncio.sleep(60)
        return {}

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await run_until_disconnect(receive, asyncio.sleep(60))
