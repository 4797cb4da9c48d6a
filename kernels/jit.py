"""Counts what Triton compiles, so that a server can prove that nothing compiles while it serves.

    jit.mark_starting()    before the first kernel, and again before a further engine of the process starts
    ...                    every variant is launched once
    jit.mark_ready()       from here on, a compilation is a fault: it is logged by name and counted

What a process loads from Triton's cache on disk counts as well: a request would wait for that too. What it puts there,
because no other process had (see `compiler`), is named when it is ready: that is what a start waited for.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class _Counter:
    """All compilations of this process, and those that came while it was ready."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ready = False
        self.total = self.late = 0
        self.made: list[str] = []  # since `mark_starting`

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
    _counter.made.clear()


def mark_ready() -> None:
    """Everything that will be launched has been launched once."""
    _counter.ready = True
    made = _counter.made
    logger.info("this process itself made %d kernels and launchers: %s", len(made), ", ".join(made) or "none")


def compilations() -> int:
    """How many kernel variants were compiled since the first `mark_starting`."""
    return _counter.total


def compilations_after_ready() -> int:
    """How many of them came between `mark_ready` and the next `mark_starting`: variants that were forgotten."""
    return _counter.late


@functools.cache
def _watch() -> None:
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    knobs.runtime.jit_post_compile_hook = _also(knobs.runtime.jit_post_compile_hook)
    knobs.cache.manager_class = _noting(knobs.cache.manager_class or FileCacheManager)


def _also(previous: Callable[..., Any] | None) -> Callable[..., Any]:
    """A hook that counts, then does what was hooked before."""

    def on_compiled(**event: Any) -> Any:
        if _counter.add():
            logger.warning("Triton compiled a kernel while serving: %s", event["repr"])
        return previous(**event) if previous else None

    return on_compiled


def _noting(manager: Any) -> Any:
    """A cache like the one given that notes what this process puts into it: kernels, and C that was built."""

    class NotingCacheManager(manager):
        def put(self, data: Any, filename: str, binary: bool = True) -> Any:
            name, _, kind = filename.partition(".")
            if kind == "cubin" or kind.endswith("so"):
                _counter.made.append(name)
            return super().put(data, filename, binary)

    return NotingCacheManager
