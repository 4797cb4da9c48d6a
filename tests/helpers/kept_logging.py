"""Restore a test process's logging after a command or process main function has set it up."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from baton.cluster import logs


@contextlib.contextmanager
def kept_logging() -> Iterator[None]:
    """Begin with logging that nobody has set up; restore handlers, levels and the logged request at the end."""
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
