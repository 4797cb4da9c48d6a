"""A gateway's mirror of the blocks that one engine has cached, in its pool and its tiers.

    names of a prompt's blocks      n0  n1  n2  n3  n4  n5        a hit of four blocks, as in `core/kv/cache_groups.py`:
    group 0, which needs all         x   x   x   x   x            the longest of which each group has the blocks that
    group 1, a window of two                 x   x                its rule needs (`HitRule`)
    group 2, a state every two                   x

A block has the same name in all groups; a state has the name of the block that ends with it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence, Set
from typing import NamedTuple

from baton.engine.core.block_log import BlocksCached, BlocksChanged, BlockUpdate, GroupBlocks, HitRule, unpack_names

BlockName = int  # the first bytes of a block's hash, which covers all tokens up to the block's end
HasBlock = Callable[[BlockName], bool]


class FoundPrefix(NamedTuple):
    """Counts of the blocks at the start of a prompt that an engine has cached: first in the pool, then in tiers."""

    pool: int = 0
    host: int = 0
    disk: int = 0

    @property
    def in_tiers(self) -> int:
        return self.host + self.disk


class GroupMirror:
    """The blocks of one cache group, each in its fastest place."""

    def __init__(self) -> None:
        self.pool: set[BlockName] = set()
        self.host: set[BlockName] = set()
        self.disk: set[BlockName] = set()

    def replace(self, blocks: BlocksCached | GroupBlocks, num_blocks: int, num_tier_blocks: int) -> None:
        """Hold these blocks alone: at most so many in the pool, and so many in tiers."""
        self.pool = set(unpack_names(blocks.stored)[:num_blocks])
        self.host = set(unpack_names(blocks.host)[:num_tier_blocks])
        self.disk = set(unpack_names(blocks.disk)[: num_tier_blocks - len(self.host)])

    def move(self, blocks: BlocksChanged | GroupBlocks) -> None:
        self._move(blocks.stored, self.pool, self.host, self.disk)
        self._move(blocks.host, self.host, self.pool, self.disk)
        self._move(blocks.disk, self.disk, self.pool, self.host)
        evicted = unpack_names(blocks.evicted)
        for place in (self.pool, self.host, self.disk):
            place.difference_update(evicted)

    def behind(self, names: Sequence[BlockName], count: int) -> FoundPrefix:
        """Count blocks that tiers can restore behind the first `count` of a prompt, which the pool has or will have."""
        host, disk = self.host, self.disk
        if not host and not disk:
            return FoundPrefix(count)
        num_host = num_disk = 0
        for index in range(count, len(names)):
            if names[index] in host:
                num_host += 1
            elif names[index] in disk:
                num_disk += 1
            else:
                break
        return FoundPrefix(count, num_host, num_disk)

    @property
    def num_in_tiers(self) -> int:
        return len(self.host) + len(self.disk)

    @staticmethod
    def _move(packed: bytes, place: set[BlockName], *others: set[BlockName]) -> None:
        if names := unpack_names(packed):
            place.update(names)
            for other in others:
                other.difference_update(names)


class CachedBlocks:
    """The mirror. It is exact as of the engine's last message about blocks; a busy engine sends four a second.

    A block that is cached in several places counts in the fastest one. The mirror holds at most as many blocks as the
    engine has blocks and tier slots, at about 70 bytes each in this process.

    An engine of a version that publishes only its first cache group has no rules: it counts as if it had no others.
    """

    def __init__(self, num_blocks: int, num_tier_blocks: int = 0) -> None:
        """Create an empty mirror of pools of `num_blocks` and tiers of `num_tier_blocks`, of all cache groups."""
        self._num_blocks, self._num_tier_blocks = num_blocks, num_tier_blocks
        self._number: int | None = None  # number of the last message applied; None: a snapshot is needed
        self._first = GroupMirror()
        self._groups = [self._first]
        self._rules: Sequence[HitRule] = ()  # of all groups; none: there is one, and hits need all of its blocks

    def __len__(self) -> int:
        return sum(len(group.pool) + group.num_in_tiers for group in self._groups)

    @property
    def number(self) -> int | None:
        """The number of the last message; None while a snapshot is needed."""
        return self._number

    @property
    def places(self) -> Sequence[tuple[Set[BlockName], Set[BlockName], Set[BlockName]]]:
        """The blocks of each group whose fastest place is the pool, the host tier and the disk tier."""
        return [(group.pool, group.host, group.disk) for group in self._groups]

    def apply(self, message: BlockUpdate) -> bool:
        """Apply a message. Return False if a snapshot is needed: a message is missing, or the result is impossible.

        After a missing message the mirror stays as it is until the snapshot comes: most of it is still right.
        """
        if isinstance(message, BlocksCached):
            self._replace(message)
        elif self._number is None:
            return True  # a snapshot was asked for, and will follow
        elif message.number != self._number + 1:
            self._number = None
            return False
        else:
            self._first.move(message)
            others = self._groups[1:]
            for group, blocks in zip(others, message.groups, strict=False):
                group.move(blocks)
            self._number = message.number
            if not self._can_be_true() or len(message.groups) not in (0, len(others)):
                self._forget()
                return False
        return True

    def find(self, names: Sequence[BlockName], expected: Container[BlockName] = ()) -> FoundPrefix:
        """Return the hit that the engine would find for a prompt, given the names of its blocks.

        It counts blocks that the pool has or that are `expected` there, and behind them those that tiers can restore.
        """
        count = self.count_prefix(names, expected)
        if self._rules:
            return self._find_in_groups(names, count, expected)
        return self._first.behind(names, count)

    def count_prefix(self, names: Sequence[BlockName], expected: Container[BlockName] = ()) -> int:
        """Count the blocks at the start of a prompt that the first group has in its pool, or that are `expected`."""
        pool, count = self._first.pool, len(names)
        for index, name in enumerate(names):
            if name not in pool:
                count = index
                break
        if expected:
            while count < len(names) and (names[count] in expected or names[count] in pool):
                count += 1
        return count

    def count_present(self, names: Sequence[BlockName], expected: Container[BlockName] = ()) -> int:
        """Count the leading blocks of a prompt that a hand-off to the engine need not bring.

        It brings windows and states that the next token reads. If a window is not whole, it begins at the missing
        block at the latest.
        """
        count = self.count_prefix(names, expected)
        if not self._rules:
            return count
        has = [self._in_pool(group, expected) for group in self._groups]
        present = min(self._count_prefixes(names, count, has))
        for rule, group_has in zip(self._rules, has, strict=True):
            if rule.window_blocks is not None:
                gap = _first_gap(names, max(0, len(names) - rule.window_blocks), present, group_has)
                present = present if gap is None else gap
        return present

    def _find_in_groups(self, names: Sequence[BlockName], count: int, expected: Container[BlockName]) -> FoundPrefix:
        """Find a prompt by the rules of all groups, where the first group's pool has or will have `count` blocks.

        Blocks of the first group that only count because tiers can restore those of other groups count as if they
        were in the host's memory themselves.
        """
        has = [self._in_pool(group, expected) for group in self._groups]
        counts = self._count_prefixes(names, count, has)
        pool = self._deepest(names, min(counts), has)
        if not any(group.num_in_tiers for group in self._groups):
            return FoundPrefix(pool)
        reach = min(sum(group.behind(names, each)) for group, each in zip(self._groups, counts, strict=True))
        whole = self._deepest(names, reach, [_or_in_tiers(*each) for each in zip(has, self._groups, strict=True)])
        num_disk = sum(name in self._first.disk for name in names[pool:whole])
        return FoundPrefix(pool, whole - pool - num_disk, num_disk)

    def _count_prefixes(self, names: Sequence[BlockName], count: int, has: Sequence[HasBlock]) -> Sequence[int]:
        """Return the prefix that each group has without a gap; of groups that may have gaps, the whole prompt.

        The first group has `count` blocks.
        """
        counts = []
        for rule, group, group_has in zip(self._rules, self._groups, has, strict=True):
            if not rule.needs_all:
                counts.append(len(names))
            elif group is self._first:
                counts.append(count)
            else:
                gap = _first_gap(names, 0, len(names), group_has)
                counts.append(len(names) if gap is None else gap)
        return counts

    def _deepest(self, names: Sequence[BlockName], most: int, has: Sequence[HasBlock]) -> int:
        """Return the longest prefix, of at most `most` blocks, at which every window and every state can be had."""
        depth, before = most, -1
        while depth != before:
            before = depth
            for rule, group_has in zip(self._rules, has, strict=True):
                depth = _deepest_by(rule, names, depth, group_has)
        return depth

    def _in_pool(self, group: GroupMirror, expected: Container[BlockName]) -> HasBlock:
        """Return the test for blocks that a group's pool has, or will have once `expected` blocks are computed.

        When the engine has reported that the first group has a block, it has also reported which others have it.
        """
        pool, reported = group.pool, self._first.pool
        if not expected:
            return pool.__contains__
        return lambda name: name in pool or (name in expected and name not in reported)

    def _replace(self, message: BlocksCached) -> None:
        self._rules = message.rules
        self._groups = [self._first, *(GroupMirror() for _ in message.groups)]
        published: list[BlocksCached | GroupBlocks] = [message, *message.groups]
        num_blocks, num_tier_blocks = self._num_blocks, self._num_tier_blocks
        for group, blocks in zip(self._groups, published, strict=True):
            group.replace(blocks, num_blocks, num_tier_blocks)
            num_blocks -= len(group.pool)
            num_tier_blocks -= group.num_in_tiers
        self._number = message.number

    def _can_be_true(self) -> bool:
        num_below = sum(group.num_in_tiers for group in self._groups)
        return sum(len(group.pool) for group in self._groups) <= self._num_blocks and num_below <= self._num_tier_blocks

    def _forget(self) -> None:
        self._first = GroupMirror()
        self._groups, self._rules = [self._first], ()
        self._number = None


def _deepest_by(rule: HitRule, names: Sequence[BlockName], most: int, has: HasBlock) -> int:
    """Return the longest prefix, of at most `most` blocks, at whose end a group has its window or its state.

    All of `most` if the rule needs neither.
    """
    depth = most
    if (every := rule.checkpoint_blocks) is not None:
        depth -= depth % every
        while depth and not has(names[depth - 1]):
            depth -= every
    if (window := rule.window_blocks) is not None:
        checked = depth  # the group has the blocks from here to `depth`
        while (missing := _first_gap(names, max(0, depth - window), checked, has)) is not None:
            depth, checked = missing, max(0, depth - window)  # it rules out every prefix that would need it
    return depth


def _first_gap(names: Sequence[BlockName], start: int, end: int, has: HasBlock) -> int | None:
    """Return the first of the blocks from `start` to `end` that a group lacks; None if it has them all."""
    return next((index for index in range(start, end) if not has(names[index])), None)


def _or_in_tiers(has: HasBlock, group: GroupMirror) -> HasBlock:
    """Return the test for blocks that satisfy `has` or are in the group's tiers."""
    host, disk = group.host, group.disk
    return lambda name: has(name) or name in host or name in disk
