"""A sequence waits for an engine that takes it: so long, and only if further attempts are not too many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..errors import ApiError, engines_full, no_capacity, no_retries_left
from ..metrics import GatewayMetrics
from .attempt import Attempt
from .engine_selector import EngineSelector
from .retry_path import RetryPath
from .retry_policy import AttemptHistory, Failure, RetryBudget

POLL_S = 0.02  # between looks for an engine that can take a request, while there is none


class AdmissionWait:
    """Of one sequence. What attempts cost is taken from a budget that the gateway's requests share."""

    def __init__(
        self,
        path: RetryPath,
        selector: EngineSelector,
        history: AttemptHistory,
        retries: RetryBudget,
        metrics: GatewayMetrics,
        capacity_timeout_s: float,
        retry_after_s: Callable[[], float],
    ) -> None:
        self._path = path
        self._selector = selector
        self._history = history
        self._retries = retries
        self._metrics = metrics
        self._capacity_timeout_s = capacity_timeout_s
        self.retry_after_s = retry_after_s
        self._owes = False  # the next attempt is to be taken from the retry budget

    def failed(self) -> None:
        """The newest attempt, after which another one is to come."""
        self._owes = self._history.must_pay

    async def attempt(self, failure: Failure | None) -> Attempt:
        """The next one. Raises `ApiError` (503) when no engine can take the sequence in time."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._capacity_timeout_s
        with self._metrics.unplaced.track_inprogress():
            while (attempt := self._path.next_attempt(failure) if self._may_try else None) is None:
                if self._are_full(failure) or loop.time() >= give_up_s:
                    raise self._nobody(failure)
                await asyncio.sleep(POLL_S)
        if self._owes:
            self._owes = False
            self._retries.spend()
        return attempt

    @property
    def _may_try(self) -> bool:
        return not self._owes or self._retries.left > 0

    def _are_full(self, failure: Failure | None) -> bool:
        """It was refused for lack of room, and nobody is left to ask: to wait is the client's part."""
        return failure is Failure.OVERLOADED and (self._may_try or self._selector.are_full)

    def _nobody(self, failure: Failure | None) -> ApiError:
        retry_after_s = self.retry_after_s()
        last = self._history.last_error
        detail = "" if last is None else f" The last attempt: {last.message}"
        if not self._may_try and not self._are_full(failure):
            return no_retries_left(f"Too many attempts of other requests fail, too.{detail}", retry_after_s)
        if self._history.full:
            return engines_full(retry_after_s, detail)
        return no_capacity(f"No engine can take the request now.{detail}", retry_after_s)
