"""Measure the CPU time that a gateway needs for each streamed token, with an engine that is faster than the gateway.

python -m tests.sockets.gateway.stream_cost [STREAMS [SECONDS [STEP_MS]]]

An engine without a model emits a token for each stream every STEP_MS; the gateway and this client need not keep up.
Prints tokens and events a second, and the gateway's CPU time for each, over SECONDS.
"""

from __future__ import annotations

import asyncio
import sys
import time

import aiohttp

from .attacked_gateway import attacked_gateway
from .page_cost import cpu_s

TOKENS = 400  # in an answer
SETTLE_S = 3.0


class Reader:
    """A client that reads streams one after the other, and counts tokens and events."""

    def __init__(self) -> None:
        self.num_events = self.num_answers = 0

    async def read(self, session: aiohttp.ClientSession, url: str) -> None:
        body = {"model": "tiny", "prompt": [5] * 20, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        while True:
            async with session.post(f"{url}/v1/completions", json=body) as response:
                response.raise_for_status()
                async for part in response.content.iter_any():
                    self.num_events += part.count(b"\n\n")
            self.num_answers += 1


async def main(streams: int = 64, seconds: float = 20.0, step_ms: float = 1.0) -> None:
    with attacked_gateway(step_s=step_ms / 1000) as gateway:
        pid, reader = gateway.process.pid, Reader()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            reading = [asyncio.create_task(reader.read(session, gateway.url)) for _ in range(streams)]
            await asyncio.sleep(SETTLE_S)
            begun_s, cpu, answers, events = time.monotonic(), cpu_s(pid), reader.num_answers, reader.num_events
            await asyncio.sleep(seconds)
            took_s, cpu = time.monotonic() - begun_s, cpu_s(pid) - cpu
            tokens, events = (reader.num_answers - answers) * TOKENS, reader.num_events - events
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
    print(
        f"{tokens / took_s:.0f} tokens a second in {events / took_s:.0f} events, {100 * cpu / took_s:.0f} % of a core"
    )
    print(f"{1e6 * cpu / tokens:.1f} us a token, {1e6 * cpu / events:.1f} us an event")


if __name__ == "__main__":
    asyncio.run(main(*(kind(word) for kind, word in zip((int, float, float), sys.argv[1:], strict=False))))
