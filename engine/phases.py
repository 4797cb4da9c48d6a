"""How long each phase of a start-up takes. Start-up is a feature: whoever makes a phase slower sees it in the log.

    phases = Phases()
    with phases("kv_cache"):
        with phases("compiling"):      counts for "compiling" only
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
        """Time within belongs to `name`, but for that of phases within it. A phase may come again, and adds up."""
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
        """Gives the time since the last border to the phase that it was spent in."""
        now = self._clock()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now
