"""Commands and processes set up the log of their own process: in a test, that is put back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from baton.cluster import logs


@contextlib.contextmanager
def kept_logging() -> Iterator[None]:
    """Begin with a log that nobody has set up, and put back handlers, levels and the request in the end."""
    kept = [(each, each.handlers[:], each.level, each.propagate) for each in map(logging.getLogger, logs.OURS)]
    for each, *_ in kept:
        each.handlers[:], each.propagate = [], True
    request = logs.request_id.set("")
    try:
        yield
    finally:
        logs.request_id.reset(request)
        for each, handlers, level, propagate in kept:
            each.handlers[:], each.propagate = handlers, propagate
            each.setLevel(level)
