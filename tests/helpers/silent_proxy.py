"""A TCP proxy that can fall silent: connections stay open, and nothing comes through any more."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Self


class SilentProxy:
    """A context that forwards connections at `address` to the TCP endpoint `target` (`tcp://host:port`), and back.

    While it is silent, neither end receives anything, not even that the other one closed: as over an unplugged cable.
    Data sent meanwhile arrives when the silence ends, as with TCP.
    """

    def __init__(self, target: str, port: int = 0) -> None:
        """Prepare the proxy. `port` is its own; 0 chooses a free one."""
        self._own_port = port
        self._host, _, target_port = target.removeprefix("tcp://").rpartition(":")
        self._port = int(target_port)
        self._loop = asyncio.new_event_loop()
        self._speaks = asyncio.Event()
        self._pumps: set[asyncio.Task[None]] = set()
        self._pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []  # pairs: to the client, to the target
        self._left_open: list[asyncio.StreamWriter] = []
        self._waiting: set[asyncio.StreamWriter] = set()  # connections to clients that connected in the silence
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self.address = ""

    def silence(self) -> None:
        self._loop.call_soon_threadsafe(self._speaks.clear)

    def speak(self) -> None:
        self._loop.call_soon_threadsafe(self._speaks.set)

    def cut(self) -> None:
        """End the connections of clients, and drop what is on its way; the target notices nothing."""
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for near, far in self._pairs:
            self._left_open.append(far)
            near.transport.abort()
        self._pairs.clear()

    def __enter__(self) -> Self:
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        self.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> asyncio.Server:
        self._speaks.set()
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self._own_port)
        return self._server

    async def _end(self) -> None:
        self._server.close()
        for writer in (*self._left_open, *self._waiting):
            writer.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._waiting.add(writer)
        await self._speaks.wait()
        self._waiting.discard(writer)
        there, back = await asyncio.open_connection(self._host, self._port)
        self._pairs.append((writer, back))
        for source, sink in ((reader, back), (there, writer)):
            pump = self._loop.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while True:
                data = await source.read(2**16)
                await self._speaks.wait()
                if not data:
                    return
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            return  # the other end is gone: this one ends, too
        finally:
            if sink not in self._left_open:
                sink.close()
