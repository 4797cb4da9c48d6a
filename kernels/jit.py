"""Counts what Triton compiles, so that a server can prove that nothing compiles while it serves.

    jit.mark_starting()    before the first kernel, and again before a further engine of the process starts
    ...                    every variant is launched once
    jit.mark_ready()       from here on, a compilation is a fault: it is logged by name and counted

What a process loads from Triton's cache on disk counts as well: a request would wait for that too.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

logger = logging.getLogger(__name__)


class _Counter:
    """All compilations of this process, and those that came while it was ready."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ready = False
        self.total = self.late = 0

    def add(self) -> bool:
        """Counts one; whether it was late."""
        with self.lock:
            self.total += 1
            self.late += self.ready
            return self.ready


_counter = _Counter()


def mark_starting() -> None:
    """Kernels may be compiled from here on. Raises `ImportError` where Triton is not installed."""
    _watch()
    _counter.ready = False


def mark_ready() -> None:
    """Everything that will be launched has been launched once."""
    _counter.ready = True


def compilations() -> int:
    """How many kernel variants were compiled since the first `mark_starting`."""
    return _counter.total


def compilations_after_ready() -> int:
    """How many of them came between `mark_ready` and the next `mark_starting`: variants that were forgotten."""
    return _counter.late


def warm(tasks: Iterable[Callable[[], object]], device: torch.device, threads: int = 8) -> None:
    """Runs each task once, side by side, so that the kernels that they launch compile at the same time.

    Triton's compiler leaves the interpreter to others most of the time. Tasks run in inference mode, on the default
    stream of `device`; those that need the same variant should be one task, or it is compiled twice. Returns when the
    device is done; raises what the first failing task raised.
    """

    def prepare_thread() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def run(task: Callable[[], object]) -> None:
        with torch.inference_mode():
            task()

    with ThreadPoolExecutor(threads, "warm", prepare_thread) as pool:
        for done in [pool.submit(run, task) for task in tasks]:
            done.result()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@functools.cache
def _watch() -> None:
    from triton import knobs

    knobs.runtime.jit_post_compile_hook = _also(knobs.runtime.jit_post_compile_hook)


def _also(previous: Callable[..., Any] | None) -> Callable[..., Any]:
    """A hook that counts, then does what was hooked before."""

    def on_compiled(**event: Any) -> Any:
        if _counter.add():
            logger.warning("Triton compiled a kernel while serving: %s", event["repr"])
        return previous(**event) if previous else None

    return on_compiled
