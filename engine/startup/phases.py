"""The time of each phase of a start-up. It is logged, so that a slower phase is noticed.

    phases = Phases()
    with phases("kv_cache"):
        with phases("compiling"):      counts as "compiling" only
            ...

So the phases add up to the whole, however they are nested.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}  # in the order in which phases began
        self._clock = clock
        self._open: list[str] = []
        self._since = clock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time in the context as `name`, without nested phases. A phase that is entered again adds up."""
        self._count()
        self._open.append(name)
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())

    def _count(self) -> None:
        """Add the time since the last change of phase to the phase that was open meanwhile."""
        now = self._clock()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now
