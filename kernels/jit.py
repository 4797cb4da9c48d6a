"""Counts Triton compilations, so that a server can prove that nothing is compiled while it serves.

    jit.mark_starting()    before the first kernel, and again before another engine of the process starts
    ...                    every variant is launched once
    jit.mark_ready()       from here on, a compilation is an error: it is logged by name and counted

Loading a kernel from Triton's cache on disk counts, too, since a request would wait for it. Kernels that this process
itself had to compile and put into that cache (see `compiler`) are logged by `mark_ready`: they delayed the start.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class CompilationWatch:
    """Counts the compilations of this process, in all and after `mark_ready`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_installed = self._is_ready = False
        self._total = self._late = 0
        self._made: list[str] = []  # kernels that this process has put into the disk cache since `mark_starting`

    def mark_starting(self) -> None:
        """Allow compilations from here on. Raises `ImportError` if Triton is not installed."""
        if not self._is_installed:
            self._install()
            self._is_installed = True
        self._is_ready = False
        self._made.clear()

    def mark_ready(self) -> int:
        """Declare that every kernel that will be launched has been launched once.

        Return the number of kernels and launchers that this process had to make itself since `mark_starting`.
        """
        self._is_ready = True
        made = self._made
        logger.info("this process itself made %d kernels and launchers: %s", len(made), ", ".join(made) or "none")
        return len(made)

    def compilations(self) -> int:
        """Return the number of kernel variants compiled since the first `mark_starting`."""
        return self._total

    def compilations_after_ready(self) -> int:
        """Return the number of compilations between `mark_ready` and the next `mark_starting`: warm-up missed them."""
        return self._late

    def _install(self) -> None:
        from triton import knobs
        from triton.runtime.cache import FileCacheManager

        knobs.runtime.jit_post_compile_hook = self._counting(knobs.runtime.jit_post_compile_hook)
        knobs.cache.manager_class = _noting(knobs.cache.manager_class or FileCacheManager, self._made)

    def _counting(self, previous: Callable[..., Any] | None) -> Callable[..., Any]:
        """Return a hook that counts, and then calls the previously installed hook."""

        def on_compiled(**event: Any) -> Any:
            with self._lock:
                self._total += 1
                self._late += self._is_ready
            if self._is_ready:
                logger.warning("Triton compiled a kernel while serving: %s", event["repr"])
            return previous(**event) if previous else None

        return on_compiled


def _noting(manager: Any, made: list[str]) -> Any:
    """Return a subclass of a cache manager that records kernels and launchers that this process adds to the cache."""

    class NotingCacheManager(manager):
        def put(self, data: Any, filename: str, binary: bool = True) -> Any:
            name, _, kind = filename.partition(".")
            if kind == "cubin" or kind.endswith("so"):
                made.append(name)
            return super().put(data, filename, binary)

    return NotingCacheManager


_watch = CompilationWatch()
mark_starting, mark_ready = _watch.mark_starting, _watch.mark_ready
compilations, compilations_after_ready = _watch.compilations, _watch.compilations_after_ready
