"""Numbers of blocks across all cache groups, as transfers use them, and the order of the blocks of a hand-off.

    arenas      [ full: 0 ... 99 ][ window: 100 ... 139 ][ state: 140 ... 147 ]        numbered through, arena by arena

    hand-off of 40 tokens, blocks of 16, window of 20

        full      b0  b1  b2
        window        w1  w2          what the next token reads
        state               s         the state after token 39

        order     b0  b1  w1  b2  w2  s

Blocks are in the order in which prefill completes them. So a reader with a prefix hit lacks only the last blocks of the
list, the blocks written so far of a growing offer are the first ones, and states come last.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from ..regions import first_blocks
from .cache_groups import CacheGroup, StateGroup


class _Entry(NamedTuple):
    end: int  # the entry is complete when this many tokens are computed
    group: int
    place: int  # index in the group's table


class BlockNumbers:
    """Numbers of blocks, and references to blocks, across all arenas. With a single arena, a number is a block id."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._groups = groups
        self._firsts = first_blocks([group.pool.num_blocks for group in groups])
        self.num_states = sum(isinstance(group, StateGroup) for group in groups)  # the last entries of every hand-off

    def num_complete(self, num_tokens: int, num_computed: int) -> int:
        """Return how many leading entries of a hand-off of `num_tokens` are complete after `num_computed` tokens."""
        computed = min(num_tokens, num_computed)
        if computed == num_tokens:
            return sum(self._num_entries(group, num_tokens) for group in self._groups)
        return sum(max(0, computed // group.entry_tokens - group.first_visible(num_tokens)) for group in self._groups)

    def handed_over(self, tables: Sequence[Sequence[int]], num_tokens: int) -> list[int]:
        """Return the numbers of the blocks that the token at index `num_tokens` reads, in the order of a hand-off.

        For a state that is not computed yet, the number is that of the slot which has the sequence's state now.
        """
        if len(self._groups) == 1:
            group, table = self._groups[0], tables[0]
            first = group.first_visible(num_tokens)
            return list(table[first : first + self._num_entries(group, num_tokens)])
        lasts = [len(table) - 1 for table in tables]
        return [
            self._firsts[entry.group] + tables[entry.group][min(entry.place, lasts[entry.group])]
            for entry in self._order(num_tokens)
        ]

    def states(self, tables: Sequence[Sequence[int]]) -> list[int]:
        """Return the numbers of the state slots of a computed sequence: the last blocks of its hand-off."""
        return [
            first + table[-1]
            for first, group, table in zip(self._firsts, self._groups, tables, strict=True)
            if isinstance(group, StateGroup)
        ]

    def number_of(self, group: int, block: int) -> int:
        return self._firsts[group] + block

    def of_groups(self, blocks: Sequence[Sequence[int]]) -> list[int]:
        """Return the numbers of blocks that are given by group."""
        if len(self._groups) == 1:
            return list(blocks[0]) if blocks else []
        return [first + block for first, some in zip(self._firsts, blocks, strict=False) for block in some]

    def reference(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            group = self._group_of(number)
            self._groups[group].pool.reference(number - self._firsts[group])

    def release(self, numbers: Sequence[int]) -> None:
        if len(self._groups) == 1:
            self._groups[0].pool.release(numbers)
            return
        by_group: list[list[int]] = [[] for _ in self._groups]
        for number in numbers:
            owner = self._group_of(number)
            by_group[owner].append(number - self._firsts[owner])
        for group, blocks in zip(self._groups, by_group, strict=True):
            group.pool.release(blocks)

    def _group_of(self, number: int) -> int:
        return bisect.bisect_right(self._firsts, number) - 1

    def _num_entries(self, group: CacheGroup, num_tokens: int) -> int:
        return -(-num_tokens // group.entry_tokens) - group.first_visible(num_tokens)

    def _order(self, num_tokens: int) -> list[_Entry]:
        entries = []
        for number, group in enumerate(self._groups):
            size, first = group.entry_tokens, group.first_visible(num_tokens)
            last = first + self._num_entries(group, num_tokens)
            entries += [_Entry(min((index + 1) * size, num_tokens), number, index) for index in range(first, last)]
        return sorted(entries)
