"""An executor that works on the caller's thread, in place of the threads that make grammar masks.

For tests whose steps must not depend on when a mask is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from baton.engine.core.engine import EngineCore


class AtOnce(Executor):
    """An executor that runs work as soon as it is submitted."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def make_masks_at_once(core: EngineCore) -> None:
    """Open grammars and make masks on the engine's own thread from now on."""
    core.scheduler.constraints.openers = core.scheduler.constraints.maskers = AtOnce()
