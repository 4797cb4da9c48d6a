"""Functions that wait for messages between a gateway and an engine over ZMQ."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from baton.engine.net.curve import ClusterKey

KEY = ClusterKey.generate()


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


async def tokens_of(stream: object) -> list[int]:
    return [token async for output in stream for token in output.token_ids]  # type: ignore[attr-defined]
