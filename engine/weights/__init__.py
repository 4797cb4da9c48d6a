"""Loads checkpoints into parameters, tensor by tensor (`loader`), with a progress bar for long loads.

Importing this package does not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

PATIENCE_S = 2.0


@contextmanager
def loading_bar(description: str = "Loading weights") -> Iterator[Progress]:
    """Yield a `progress` callback for `load_model`. It draws a bar on stderr once loading has taken `PATIENCE_S`."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(description), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Bar(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(description, total=None)
    began = time.monotonic()
    started = False

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal started
        if not started and time.monotonic() - began > PATIENCE_S:
            bar.start()
            started = True
        bar.update(task, completed=done_bytes, total=total_bytes)

    try:
        yield progress
    finally:
        if started:
            bar.stop()
