"""The engine without its model: requests in, steps through a runner, outputs out.

One thread owns an `EngineCore`. A loop around it needs no more than

    while True:
        if not core.has_work():
            wait for a request, an abort, or an event of the connector
        try:
            publish(core.step())
        except EngineFailed as failure:
            publish(failure.outputs)  # every request is answered before the process goes down
            raise
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from .config import EngineCoreConfig, InvalidEngineCoreConfig
from .connector import KVConnector
from .messages import EngineOutput, EngineRequest, EngineStats
from .scheduler import Scheduler
from .step import PendingStep, Runner

__all__ = ["EngineCore", "EngineCoreConfig", "EngineFailed", "InvalidEngineCoreConfig"]


class EngineFailed(Exception):
    """The engine cannot go on; `__cause__` says why. `outputs` answers every request that was still open."""

    def __init__(self, message: str, outputs: list[EngineOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs


class EngineCore:
    def __init__(
        self,
        config: EngineCoreConfig,
        runner: Runner,
        connector: KVConnector | None = None,
        *,
        late_compilations: Callable[[], int] | None = None,
    ) -> None:
        """`late_compilations` counts for the statistics what was compiled since the runner was ready."""
        self.config = config
        self._runner = runner
        self._late_compilations = late_compilations
        self._scheduler = Scheduler(config, connector)
        self._pending: deque[PendingStep] = deque()
        self._failure: Exception | None = None

    def add(self, request: EngineRequest) -> None:
        """Never raises: a request that cannot be served is answered by an ERROR output of the next step."""
        self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request, which is answered with ABORT, or withdraws its offer. Unknown ids are ignored."""
        self._scheduler.abort(request_id)

    def has_work(self) -> bool:
        """False: `step` would do nothing until a request, an abort or an event of the connector comes."""
        return self._scheduler.has_work()

    def stats(self) -> EngineStats:
        stats = self._scheduler.stats()
        if self._late_compilations is None:
            return stats
        return msgspec.structs.replace(stats, num_late_compilations=self._late_compilations())

    def step(self) -> list[EngineOutput]:
        """Starts the next step and returns what the oldest one brought, once `depth` of them are under way.

        Raises `EngineFailed` when the runner raised or the books do not add up, then and ever after.
        """
        outputs: list[EngineOutput] = []
        try:
            if self._failure is not None:
                raise self._failure
            outputs += self._advance()
            self._scheduler.check_idle()
        except Exception as error:
            self._failure = error
            self._pending.clear()
            self._scheduler.fail(f"the engine failed: {error!r}")
            raise EngineFailed(f"the engine failed: {error!r}", outputs + self._scheduler.take_outputs()) from error
        return outputs

    def _advance(self) -> list[EngineOutput]:
        self._scheduler.poll_transfers()
        plan = self._scheduler.plan_step()
        if plan is not None:
            self._pending.append(self._runner.launch(plan))
        if self._pending and (plan is None or len(self._pending) >= self.config.depth):
            return self._scheduler.settle(self._pending.popleft().result())
        return self._scheduler.take_outputs()
