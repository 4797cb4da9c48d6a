"""The engine without its model: requests in, steps through a runner, outputs out.

One thread owns an `EngineCore`. The loop around it is

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

from .block_log import BlockLog
from .config import EngineCoreConfig
from .lockstep import EMPTY_STEP, Lockstep
from .messages import EngineOutput, EngineRequest, EngineStats
from .scheduling.scheduler import Scheduler
from .speculation.drafter import Drafter
from .step import PendingStep, Runner
from .yielding import Yielding


class EngineFailed(Exception):
    """The engine cannot continue; `__cause__` is the reason. `outputs` has an answer for every request still open."""

    def __init__(self, message: str, outputs: list[EngineOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs


class EngineCore:
    """One engine. Others may read its parts `scheduler` and `runner`, but not change them."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        lockstep: Lockstep | None = None,
        yielding: Yielding | None = None,
        add_runner_stats: Callable[[EngineStats], EngineStats] | None = None,
    ) -> None:
        """Create an engine. With a `lockstep`, it is one of several that run their steps together.

        `yielding` tells when steps wait for other engines on the device. `add_runner_stats` returns the `stats` with
        what only the runner's side knows.
        """
        self.scheduler = scheduler
        self.runner = runner
        self._lockstep = lockstep
        self._yielding = yielding
        self._add_runner_stats = add_runner_stats
        self._pending: deque[PendingStep] = deque()
        self._failure: Exception | None = None

    @property
    def config(self) -> EngineCoreConfig:
        return self.scheduler.config

    def add(self, request: EngineRequest, received_s: float | None = None) -> None:
        """Add a request. Never raises: if it cannot be served, the next step returns an output with ERROR.

        `received_s` is the time when the request arrived in this process, by the scheduler's clock; default: now.
        """
        self.scheduler.add(request, received_s)

    def abort(self, request_id: str, generation: int | None = None) -> None:
        """End a request with ABORT, and withdraw its offers. Unknown ids are ignored.

        With a `generation`, newer generations of the request go on.
        """
        self.scheduler.abort(request_id, generation)

    def begin(self, request_id: str, generation: int, token_id: int) -> None:
        """Give a request that `awaits_first_token` its first token. Other requests ignore it."""
        self.scheduler.begin(request_id, generation, token_id)

    def when_woken(self, call: Callable[[], None]) -> None:
        """Register `call`: another thread calls it when the other ranks wait for this one to step (lockstep)."""
        if self._lockstep is not None:
            self._lockstep.when_woken(call)

    def block_log(self) -> BlockLog:
        """Return the log of changes of the prefix cache and the tiers. The first call starts the log."""
        return self.scheduler.tier_copies.block_log()

    def draft_with(self, drafter: Drafter) -> None:
        """Replace the drafter that the config names. Call it before the first request.

        Raises `ValueError` if the engine runs without speculation.
        """
        if self.scheduler.drafting is None:
            raise ValueError("the engine drafts no tokens: give it a speculative_config")
        self.scheduler.drafting.drafter = drafter

    def has_work(self) -> bool:
        """Return False if `step` has nothing to do until the next request, abort, connector event or wake-up call."""
        in_wave = self._lockstep is not None and self._lockstep.is_running and self._failure is None
        return in_wave or bool(self._pending) or self.scheduler.has_work()

    def wait_s(self) -> float:
        """Return the seconds for which `step` will launch nothing, since the next step yields; mostly 0."""
        if self._yielding is None or self.scheduler.has_prompts:
            return 0.0
        return self._yielding.wait_s(self.scheduler.decode_s())

    def stats(self) -> EngineStats:
        stats = self.scheduler.stats()
        if self._yielding is not None:
            stats = msgspec.structs.replace(stats, yielded_s=self._yielding.waited_s)
        return stats if self._add_runner_stats is None else self._add_runner_stats(stats)

    def step(self) -> list[EngineOutput]:
        """Launch the next step. Returns the outputs of the oldest one, if `depth` steps are in flight.

        While the next step yields (`wait_s`), only the oldest one in flight is waited for, if there is one.

        Raises `EngineFailed`, now and on every later call, if the runner raised or the state is inconsistent.
        """
        outputs: list[EngineOutput] = []
        try:
            if self._failure is not None:
                raise self._failure
            outputs += self._advance()
            self.scheduler.check_idle()
        except Exception as error:
            self._failure = error
            self._pending.clear()
            self.scheduler.fail(f"the engine failed: {error!r}")
            raise EngineFailed(f"the engine failed: {error!r}", outputs + self.scheduler.take_outputs()) from error
        return outputs

    def _advance(self) -> list[EngineOutput]:
        self.scheduler.poll_transfers()
        plan = None if self.wait_s() else self.scheduler.plan_step()
        if self._lockstep is not None:
            plan = self._lockstep.join(plan, has_pending=bool(self._pending))
        if plan is not None:
            self._pending.append(self.runner.launch(plan))
        if self._yielding is not None:
            if plan is not None:
                self._yielding.launched()
            self._yielding.publish(self.scheduler.backlog_s())
        if self._pending and (plan is None or len(self._pending) >= self.config.depth):
            result = self._pending.popleft().result()
            if self._yielding is not None and not self._pending:
                self._yielding.ended()
            if result.step != EMPTY_STEP:
                return self.scheduler.settle(result)
        return self.scheduler.take_outputs()
