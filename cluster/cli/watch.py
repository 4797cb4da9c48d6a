"""Output that is drawn again and again: in place in a terminal, one below the other in a pipe or a file."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import RenderableType
from rich.live import Live

from .cli_common import stdout_console


@dataclass(frozen=True)
class Pace:
    interval_s: float
    iterations: int = 0  # 0: until Ctrl-C


def watch(pace: Pace, draw: Callable[[], RenderableType], *, is_first_drawn: bool = False) -> None:
    """Show what `draw` returns every `interval_s`, until Ctrl-C or as often as `iterations` says.

    With `is_first_drawn` the first time counts, and is left out.
    """
    console = stdout_console()
    with contextlib.suppress(KeyboardInterrupt):
        if not console.is_terminal:
            for _ in _times(pace, is_first_drawn):
                console.print(draw(), soft_wrap=True)
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for _ in _times(pace, is_first_drawn):
                live.update(draw(), refresh=True)


def _times(pace: Pace, is_first_drawn: bool) -> Iterator[int]:
    for index in itertools.count() if not pace.iterations else range(pace.iterations):
        if index:
            time.sleep(pace.interval_s)
        if index or not is_first_drawn:
            yield index
