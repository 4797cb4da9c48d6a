"""Profiles of an engine: torch's profiler starts and stops between steps, and writes a file."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from baton.cluster.engines import profiler as profiler_module
from baton.cluster.engines.profiler import EngineProfiler


class StepThread:
    """A thread that runs the given functions; a step adds two tensors."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    async def run(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def step(self) -> None:
        def work() -> None:
            torch.ones(8).cumsum(0)

        await self.run(work)

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture
async def thread() -> AsyncIterator[StepThread]:
    thread = StepThread()
    yield thread
    thread.close()


def names(path: str) -> set[str]:
    with gzip.open(path, "rt") as file:
        return {str(event.get("name")) for event in json.load(file)["traceEvents"]}


async def test_steps_are_recorded_in_a_file_that_perfetto_reads(thread: StepThread, tmp_path: Path) -> None:
    profiler = EngineProfiler("engine-1", "192.0.2.1", thread.run, tmp_path / "traces")
    assert await profiler.stop() is None
    begun = await profiler.start()
    assert await profiler.start() == begun, "a second start must not begin another recording"
    await thread.step()
    trace = await profiler.stop()
    assert trace is not None
    assert (trace.engine_id, trace.node_ip, trace.path) == ("engine-1", "192.0.2.1", begun.path)
    assert trace.path.endswith(".json.gz")
    assert trace.size_bytes == Path(trace.path).stat().st_size > 0
    assert trace.seconds > 0
    assert "aten::cumsum" in names(trace.path)
    assert await profiler.stop() is None


async def test_recordings_that_begin_within_the_same_second_have_files_of_their_own(
    thread: StepThread, tmp_path: Path
) -> None:
    profiler = EngineProfiler("engine-1", "192.0.2.1", thread.run, tmp_path)
    paths = []
    for _ in range(8):  # some of them within the same second
        paths.append((await profiler.start()).path)
        await profiler.stop()
    assert len(set(paths)) == 8
    assert {str(file) for file in tmp_path.iterdir()} == set(paths)


async def test_a_recording_that_is_not_stopped_ends_by_itself(
    thread: StepThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler_module, "LONGEST_S", 0.2)
    profiler = EngineProfiler("engine-1", "192.0.2.1", thread.run, tmp_path)
    begun = await profiler.start()
    await thread.step()
    async with asyncio.timeout(20):
        while not Path(begun.path).exists():
            await asyncio.sleep(0.05)
    async with asyncio.timeout(20):
        while await profiler.stop() is not None:
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_the_time_limit_of_a_recording_and_its_file_are_no_others(
    thread: StepThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = EngineProfiler("engine-1", "192.0.2.1", thread.run, tmp_path)
    monkeypatch.setattr(profiler_module, "LONGEST_S", 0.4)
    await profiler.start()
    await profiler.stop()
    monkeypatch.setattr(profiler_module, "LONGEST_S", 60.0)
    await profiler.start()
    await asyncio.sleep(0.8)
    trace = await profiler.stop()
    assert trace is not None
    assert trace.seconds > 0.7, "the limit of the first recording must not end the second one"

    profiler = EngineProfiler("engine-2", "192.0.2.1", thread.run, tmp_path)
    monkeypatch.setattr(profiler_module, "LONGEST_S", 0.0)
    begun = await profiler.start()
    async with asyncio.timeout(20):
        while not Path(begun.path).exists():
            await asyncio.sleep(0.05)
    monkeypatch.setattr(profiler_module, "LONGEST_S", 60.0)
    await profiler.start()
    assert await profiler.stop() is not None
    assert await profiler.stop() is None, "a recording that nobody asked for is not told in the place of a later one"


async def test_a_recording_that_is_just_ending_by_itself_is_returned_and_not_ended_twice(
    thread: StepThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler_module, "LONGEST_S", 0.0)
    ending, go_on = asyncio.Event(), asyncio.Event()
    begun: list[Callable[[], None]] = []

    async def in_step_thread(work: Callable[[], None]) -> None:
        begun.append(work)
        if len(begun) > 1:
            ending.set()
            await go_on.wait()  # for the end of a step
        await thread.run(work)

    profiler = EngineProfiler("engine-1", "192.0.2.1", in_step_thread, tmp_path)
    trace = await profiler.start()
    async with asyncio.timeout(20):
        await ending.wait()
        stopping = asyncio.create_task(profiler.stop())
        await asyncio.sleep(0)
        go_on.set()
        ended = await stopping
    assert ended is not None
    assert ended.path == trace.path
    assert names(trace.path)
    assert len(begun) == 2
    assert await profiler.stop() is None


async def test_after_a_recording_that_cannot_begin_the_next_one_can(tmp_path: Path) -> None:
    async def fail(work: Callable[[], None]) -> None:
        raise RuntimeError("the engine has ended")

    profiler = EngineProfiler("engine-1", "192.0.2.1", fail, tmp_path)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has ended"):
            await profiler.start()
    assert await profiler.stop() is None


FRESH_PROCESS = """
import asyncio, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from baton.cluster.engines.profiler import EngineProfiler

imported = set()
step_thread = ThreadPoolExecutor(1)

async def in_step_thread(work):
    before = set(sys.modules)
    await asyncio.get_running_loop().run_in_executor(step_thread, work)
    imported.update(set(sys.modules) - before)

async def record():
    profiler = EngineProfiler("engine-1", "192.0.2.1", in_step_thread, Path(sys.argv[1]))
    await profiler.start()
    await profiler.stop()

import torch
asyncio.run(record())
print(len(imported))
"""


@pytest.mark.slow
def test_the_first_recording_of_a_process_imports_nothing_between_steps(tmp_path: Path) -> None:
    """Importing several hundred modules from a cold disk once took so long that the step was taken for hanging."""
    done = subprocess.run([sys.executable, "-c", FRESH_PROCESS, tmp_path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["0"]), done.stderr
