"""Wakes of data-parallel ranks: one that gets work wakes the others, over a mesh of the ranks that schedule.

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
from .groups import GroupFailed, ParallelGroups
from .member import Member
from .mesh import Mesh
from .rendezvous import RendezvousClient

logger = logging.getLogger(__name__)

_WAVE = struct.Struct("<q")


class DPWake:
    """One rank's end. `wake_others` is for one thread; wakes arrive on a thread of its own."""

    def __init__(self, member: Member, rendezvous: RendezvousClient, groups: ParallelGroups) -> None:
        """Connect to all other ranks. Raises `GroupFailed`."""
        others = [rank for rank in member.dp_ranks if rank != member.rank]
        self._mesh = Mesh("waves", member, rendezvous, groups, others)
        self._thread: threading.Thread | None = None

    def listen(self, on_wake: Callable[[int], None]) -> None:
        """Have `on_wake` called with the number of each wave that another rank begins, from now on."""
        self._thread = threading.Thread(target=self._run, args=(on_wake,), name="baton-dp-wake", daemon=True)
        self._thread.start()

    def wake_others(self, wave: int) -> None:
        """Send a wake and return at once. Raises `GroupFailed` if a rank has gone."""
        self._mesh.send(_WAVE.pack(wave))

    def check(self) -> None:
        """Raise `GroupFailed` if a rank has gone."""
        self._mesh.check()

    def close(self, *, well: bool = True) -> None:
        """Tell the other ranks that this one ends; not after a failure: they notice that. Later calls do nothing."""
        self._mesh.close(well=well, receiver=self._thread)

    def _run(self, on_wake: Callable[[int], None]) -> None:
        with contextlib.suppress(GroupFailed):  # the next step raises it
            while (message := self._mesh.receive()) is not None:
                if len(message) == _WAVE.size:
                    on_wake(*_WAVE.unpack(message))
                else:
                    logger.warning("%d bytes that are no wave were dropped", len(message))


class WatchedRunner:
    """A runner whose results raise once another data-parallel rank has gone. Implements `core.step.Runner`.

    Closing the groups ends a step that waited for that rank, but its result means nothing.
    """

    def __init__(self, runner: Runner, dp_wake: DPWake) -> None:
        self._runner = runner
        self._dp_wake = dp_wake

    def launch(self, plan: StepPlan) -> PendingStep:
        return _WatchedStep(self._runner.launch(plan), self._dp_wake)


class _WatchedStep:
    def __init__(self, step: PendingStep, dp_wake: DPWake) -> None:
        self._step = step
        self._dp_wake = dp_wake

    def result(self) -> StepResult:
        """Return the step's result. Raises `GroupFailed` if a rank went during the step."""
        result = self._step.result()
        self._dp_wake.check()
        return result
