"""A counter of Triton compilations, so that a server can prove that nothing compiles while it serves.

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
    """All compilations of this process, and those that came after `mark_ready`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ready = False
        self.total = self.late = 0
        self.made: list[str] = []  # since `mark_starting`

    def add(self) -> bool:
        """Count one compilation; return true if it came after `mark_ready`."""
        with self.lock:
            self.total += 1
            self.late += self.ready
            return self.ready


_counter = _Counter()


def mark_starting() -> None:
    """Allow compilations from here on. Raises `ImportError` where Triton is not installed."""
    _watch()
    _counter.ready = False
    _counter.made.clear()


def mark_ready() -> None:
    """Declare that every kernel that will be launched has been launched once."""
    _counter.ready = True
    made = _counter.made
    logger.info("this process itself made %d kernels and launchers: %s", len(made), ", ".join(made) or "none")


def compilations() -> int:
    """Return the number of kernel variants compiled since the first `mark_starting`."""
    return _counter.total


def compilations_after_ready() -> int:
    """Return how many of them came between `mark_ready` and the next `mark_starting`: variants that warm-up missed."""
    return _counter.late


@functools.cache
def _watch() -> None:
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    knobs.runtime.jit_post_compile_hook = _also(knobs.runtime.jit_post_compile_hook)
    knobs.cache.manager_class = _noting(knobs.cache.manager_class or FileCacheManager)


def _also(previous: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a hook that counts, then calls the hook that was installed before."""

    def on_compiled(**event: Any) -> Any:
        if _counter.add():
            logger.warning("Triton compiled a kernel while serving: %s", event["repr"])
        return previous(**event) if previous else None

    return on_compiled


def _noting(manager: Any) -> Any:
    """Return a subclass of a cache manager that notes the kernels and launchers which this process puts
    into the cache.
    """

    class NotingCacheManager(manager):
        def put(self, data: Any, filename: str, binary: bool = True) -> Any:
            name, _, kind = filename.partition(".")
            if kind == "cubin" or kind.endswith("so"):
                _counter.made.append(name)
            return super().put(data, filename, binary)

    return NotingCacheManager
