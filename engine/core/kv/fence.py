"""Rows and blocks that a request has given up while steps in flight may still access them.

    retire(row, blocks, last_step) ── last_step settled ──> free row, released blocks
    retire_behind(group, blocks, last_step) ── the same ──> released blocks        the request itself goes on

A stop, an abort or a preemption changes the scheduler's state at once, but the device may still run steps that were
planned before. Until the newest of them is over, no other request and no transfer may write to these blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..requests.request import NEVER, NO_ROW
from .cache_groups import CacheGroup


class RowPool:
    """The runner's rows. The next plan lists a freed row in `freed_rows`, and may already give it to another one."""

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
    def __init__(self, rows: RowPool, groups: Sequence[CacheGroup]) -> None:
        self.rows = rows
        self._pools = [group.pool for group in groups]
        self._settled = NEVER
        self._retired: dict[int, list[tuple[int, list[list[int]]]]] = {}
        self._behind: dict[int, list[tuple[int, list[int]]]] = {}  # given up behind windows: the group and its blocks

    @property
    def has_retired_requests(self) -> bool:
        """True while some request's rows and blocks wait for a step in flight, so that room is about to come free."""
        return bool(self._retired)

    def has_passed(self, step: int) -> bool:
        return step <= self._settled

    def retire(self, row: int, blocks: list[list[int]], last_step: int) -> None:
        """Free a row, and blocks by group, once step `last_step` is settled: now, if it is."""
        if self.has_passed(last_step):
            self._free(row, blocks)
        else:
            self._retired.setdefault(last_step, []).append((row, blocks))

    def retire_behind(self, group: int, blocks: list[int], last_step: int) -> None:
        """Free blocks of a group once step `last_step` is settled, for a request that goes on without them."""
        if self.has_passed(last_step):
            self._pools[group].release(blocks)
        else:
            self._behind.setdefault(last_step, []).append((group, blocks))

    def will_release_blocks(self, group: int) -> bool:
        """Return whether this group will get blocks back, given up behind windows, when a step in flight settles."""
        return any(number == group for given_back in self._behind.values() for number, _ in given_back)

    def owned_blocks(self, group: int) -> list[list[int]]:
        """Return the blocks of a group that wait for steps in flight: one list for each call that gave some up."""
        retired = [blocks[group] for given_up in self._retired.values() for _, blocks in given_up if blocks]
        behind = [blocks for given_back in self._behind.values() for number, blocks in given_back if number == group]
        return retired + behind

    def owned_rows(self) -> list[int]:
        """Return the rows that wait for steps in flight."""
        return [row for given_up in self._retired.values() for row, _ in given_up if row != NO_ROW]

    def settled(self, step: int) -> None:
        self._settled = step
        for row, blocks in self._retired.pop(step, ()):
            self._free(row, blocks)
        for group, given_back in self._behind.pop(step, ()):
            self._pools[group].release(given_back)

    def _free(self, row: int, blocks: list[list[int]]) -> None:
        if row != NO_ROW:
            self.rows.give_back(row)
        for pool, owned in zip(self._pools, blocks, strict=False):  # a request without blocks has no lists
            pool.release(owned)
