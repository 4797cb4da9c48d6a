"""Errors of a library in a call of which nobody waits for the result: it may well work the next time."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Stumbles:
    """Of one agent. What it cannot do any more shows in its reads, which fail or come too late: the engine goes on."""

    def __init__(self, library: str, errors: tuple[type[Exception], ...]) -> None:
        self._library, self._errors = library, errors
        self._is_down = False

    def survive(self, call: Callable[[], object]) -> bool:
        """Whether the call brought something. Of several errors in a row the first is logged."""
        try:
            brought = bool(call())
        except self._errors as error:
            if not self._is_down:
                logger.error("%s fails, and hand-offs may until it works again: %s", self._library, error)
            self._is_down = True
            return False
        if self._is_down:
            logger.info("%s works again", self._library)
        self._is_down = False
        return brought
