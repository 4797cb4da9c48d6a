"""Measure how attacks by bodies delay other clients: gaps between tokens and latency of /live, with each and without.

python -m tests.sockets.gateway.attack_latency [SECONDS [NAME]]

Each attack, or those with NAME in their name, is repeated by two senders for SECONDS, against one gateway with four
streams over an engine of 10 ms a step in a process of its own. Prints a table in Markdown, in milliseconds. The machine
should have nothing else to do.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field

from .attack_bodies import attacks
from .attacked_gateway import attacked_gateway

NUM_STREAMS = 4
NUM_SENDERS = 2
LIVE_PAUSE_S = 0.02
STREAM = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 20_000, "stream": True, "ignore_eos": True})


@dataclass
class Measured:
    gaps_s: list[float] = field(default_factory=list)
    live_s: list[float] = field(default_factory=list)
    num_attacks: int = 0

    def row(self, name: str) -> str:
        figures = [share_of(self.gaps_s, 0.5), share_of(self.gaps_s, 0.99), max(self.gaps_s)]
        figures += [share_of(self.live_s, 0.5), max(self.live_s)]
        return " | ".join(["", name, *(f"{figure * 1e3:.0f}" for figure in figures), str(self.num_attacks), ""]).strip()


def share_of(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]


class Clients:
    """All clients of one measurement."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ended = asyncio.Event()
        self.measured = Measured()

    async def measure(self, seconds: float, attack: tuple[str, bytes] | None) -> Measured:
        tasks = [asyncio.create_task(self._stream()) for _ in range(NUM_STREAMS)]
        tasks.append(asyncio.create_task(self._ask_live()))
        await asyncio.sleep(0.5)
        if attack is not None:
            tasks += [asyncio.create_task(self._attack(*attack)) for _ in range(NUM_SENDERS)]
        await asyncio.sleep(seconds)
        self._ended.set()
        await asyncio.wait(tasks, timeout=60)
        for task in tasks:
            task.cancel()
        return self.measured

    async def _send(
        self, route: str, body: bytes, method: bytes = b"POST"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = b"%b %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        writer.write(head % (method, route.encode()) + b"content-length: %d\r\n\r\n" % len(body))
        writer.write(body)
        return reader, writer

    async def _stream(self) -> None:
        reader, writer = await self._send("/v1/completions", STREAM.encode())
        last_s = 0.0
        while not self._ended.is_set() and (line := await reader.readline()):
            if line.startswith(b"data:"):
                now_s = time.monotonic()
                if last_s:
                    self.measured.gaps_s.append(now_s - last_s)
                last_s = now_s
        writer.close()

    async def _ask_live(self) -> None:
        while not self._ended.is_set():
            began_s = time.monotonic()
            reader, writer = await self._send("/live", b"", b"GET")
            await reader.read()
            writer.close()
            self.measured.live_s.append(time.monotonic() - began_s)
            await asyncio.sleep(LIVE_PAUSE_S)

    async def _attack(self, route: str, body: bytes) -> None:
        while not self._ended.is_set():
            reader, writer = await self._send(route, body)
            try:
                await writer.drain()
                await reader.read()
            except ConnectionError:  # the gateway refused the body before its end
                pass
            finally:
                self.measured.num_attacks += 1
                writer.close()


async def main(seconds: float, wanted: str) -> None:
    print("| attack | gap p50 | gap p99 | longest gap | /live p50 | longest /live | attacks |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    with attacked_gateway() as gateway:
        chosen = [(name, attack) for name, attack in attacks().items() if wanted in name]
        for name, attack in [("none", None), *chosen, ("none, at the end", None)]:
            measured = await Clients(gateway.port).measure(seconds, attack)
            print(measured.row(name), flush=True)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    asyncio.run(main(float(arguments[0]) if arguments else 4.0, arguments[1] if len(arguments) > 1 else ""))
