"""Recordings of an engine by torch's profiler: operations of its step thread, and their kernels on the device.

worker ── start, stop ──> step thread (between two steps) ──> file, which Perfetto can open
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from baton.cluster.contracts import EngineTrace

if TYPE_CHECKING:
    from torch.profiler import profile

FOLDER = Path(tempfile.gettempdir()) / "baton-traces"
LONGEST_S = 60.0  # longer recordings are ended: they take memory and slow the engine down

RunBetweenSteps = Callable[[Callable[[], None]], Awaitable[None]]


class EngineProfiler:
    """Records one engine; at most one recording at a time.

    `between_steps` runs a function in the step thread. It must always be the same thread: if another thread ends a
    recording than the one that began it, torch's profiler writes to freed memory.
    """

    def __init__(self, engine_id: str, node_ip: str, between_steps: RunBetweenSteps, folder: Path = FOLDER) -> None:
        self._engine_id, self._node_ip = engine_id, node_ip
        self._between_steps = between_steps
        self._folder = folder
        self._changing = asyncio.Lock()
        self._profile: profile | None = None
        self._trace = EngineTrace(engine_id, node_ip, "")
        self._num_begun = 0
        self._began_s = 0.0
        self._limit: asyncio.Task[None] | None = None
        self._ended: EngineTrace | None = None  # a recording that has ended by itself

    async def start(self) -> EngineTrace:
        """Begin a recording, and return where its file will be. A recording that is under way continues."""
        async with self._changing:
            if self._profile is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._trace = EngineTrace(self._engine_id, self._node_ip, str(self._folder / self._next_name()))
                await asyncio.to_thread(_record_nothing)
                await self._between_steps(self._begin)
                self._began_s, self._ended = time.monotonic(), None
                self._limit = asyncio.create_task(self._stop_late())
            return self._trace

    async def stop(self) -> EngineTrace | None:
        """End the recording, write its file, and return it; None if there is no recording.

        The first call after a recording has ended by itself returns that one.
        """
        async with self._changing:
            if self._profile is None:
                ended, self._ended = self._ended, None
                return ended
            if self._limit is not None:
                self._limit.cancel()
            return await self._end(self._profile)

    def _next_name(self) -> str:
        """Return the name of the next file; with a number, since several recordings can begin within one second."""
        self._num_begun += 1
        began = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        return f"{self._engine_id}-{began}-{self._num_begun}.json.gz"

    async def _end(self, recorded: profile) -> EngineTrace:
        seconds = time.monotonic() - self._began_s
        await self._between_steps(recorded.stop)
        self._profile = None
        await asyncio.to_thread(recorded.export_chrome_trace, self._trace.path)
        size_bytes = Path(self._trace.path).stat().st_size
        return EngineTrace(self._engine_id, self._node_ip, self._trace.path, seconds, size_bytes)

    def _begin(self) -> None:
        recording = _recording()
        recording.start()
        self._profile = recording

    async def _stop_late(self) -> None:
        await asyncio.sleep(LONGEST_S)
        async with self._changing:
            assert self._profile is not None, "what ends it cancels this task"
            self._ended = await self._end(self._profile)


def _recording() -> profile:
    import torch
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])])


def _record_nothing() -> None:
    """Warm the profiler up, so that the next recording begins at once: the first one in a process imports 900 modules.

    That takes seconds. In the step thread it would delay the next token of every request, and look like a hang.
    """
    with _recording():
        pass
