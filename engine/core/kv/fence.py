"""Rows and blocks that were given up while steps in flight may still touch them.

    retire(row, blocks, last_step) ── last_step settled ──> free row, released blocks

A stop, an abort or a preemption takes effect at once in the scheduler's state, but the device may be about to run a
step that was planned before. Until the newest such step is over, no other request and no transfer may write there.
"""

from __future__ import annotations

from ..requests.request import NEVER, NO_ROW
from .blocks import BlockPool


class RowPool:
    """The runner's rows. A freed row is listed in the next plan's `freed_rows`, and may be taken in that plan."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._freed: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, row: int) -> None:
        self._free.append(row)
        self._freed.append(row)

    def drain_freed(self) -> list[int]:
        """Return the rows given back since the last call, in order."""
        freed, self._freed = self._freed, []
        return freed


class Fence:
    def __init__(self, rows: RowPool, pool: BlockPool) -> None:
        self._rows = rows
        self._pool = pool
        self._settled = NEVER
        self._retired: dict[int, list[tuple[int, list[int]]]] = {}

    @property
    def closed(self) -> bool:
        """True while rows or blocks wait for a step in flight."""
        return bool(self._retired)

    def has_passed(self, step: int) -> bool:
        return step <= self._settled

    def retire(self, row: int, blocks: list[int], last_step: int) -> None:
        """Free a row and blocks once step `last_step` is settled, which may be now."""
        if self.has_passed(last_step):
            self._free(row, blocks)
        else:
            self._retired.setdefault(last_step, []).append((row, blocks))

    def settled(self, step: int) -> None:
        self._settled = step
        for row, blocks in self._retired.pop(step, ()):
            self._free(row, blocks)

    def _free(self, row: int, blocks: list[int]) -> None:
        if row != NO_ROW:
            self._rows.give_back(row)
        self._pool.release(blocks)
