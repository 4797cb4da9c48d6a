"""How a data-parallel rank that gets work wakes the others: over links between the ranks that schedule.

    dp 0 ── wave 7 ──> dp 1, dp 2, ...

When one goes, the groups are closed, so that nobody waits for it. What a GPU has computed from then on means nothing,
and is not handed out (`WatchedRunner`).
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
from collections.abc import Callable

from ..core.step import PendingStep, Runner, StepPlan, StepResult
from .errors import GroupFailed
from .groups import ParallelGroups
from .links import Links
from .member import Member
from .rendezvous import Meeting

logger = logging.getLogger(__name__)

_WAVE = struct.Struct("<q")


class Waves:
    """One rank's end. `wake_others` is for one thread; wakes arrive on a thread of its own."""

    def __init__(self, member: Member, meeting: Meeting, groups: ParallelGroups) -> None:
        """Returns when all ranks are connected. Raises `GroupFailed`."""
        others = [rank for rank in member.dp_ranks if rank != member.rank]
        self._links = Links("waves", member, meeting, groups, others)
        self._thread: threading.Thread | None = None

    def listen(self, on_wake: Callable[[int], None]) -> None:
        """From now on, `on_wake` is called with the waves that others begin."""
        self._thread = threading.Thread(target=self._run, args=(on_wake,), name="baton-waves", daemon=True)
        self._thread.start()

    def wake_others(self, wave: int) -> None:
        """Returns at once. Raises `GroupFailed` where a rank has gone."""
        self._links.send(_WAVE.pack(wave))

    def check(self) -> None:
        """Raises `GroupFailed` where a rank has gone."""
        self._links.check()

    def close(self, *, well: bool = True) -> None:
        """Tells the others that this rank ends, or, where it does not end well, nothing: they see it. Once will do."""
        self._links.close(well=well, receiver=self._thread)

    def _run(self, on_wake: Callable[[int], None]) -> None:
        with contextlib.suppress(GroupFailed):  # which the next step tells
            while (message := self._links.receive()) is not None:
                if len(message) == _WAVE.size:
                    on_wake(*_WAVE.unpack(message))
                else:
                    logger.warning("%d bytes that are no wave were dropped", len(message))


class WatchedRunner:
    """A runner that gives no results once another data-parallel rank has gone. Implements `core.step.Runner`.

    A step that waited for that rank has come back all the same, when the groups were closed.
    """

    def __init__(self, runner: Runner, waves: Waves) -> None:
        self._runner = runner
        self._waves = waves

    def launch(self, plan: StepPlan) -> PendingStep:
        return _WatchedStep(self._runner.launch(plan), self._waves)


class _WatchedStep:
    def __init__(self, step: PendingStep, waves: Waves) -> None:
        self._step = step
        self._waves = waves

    def result(self) -> StepResult:
        """Raises `GroupFailed` where a rank went during the step."""
        result = self._step.result()
        self._waves.check()
        return result
