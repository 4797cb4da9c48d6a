"""Copies of blocks in the tiers, and the requests that wait for blocks to be restored from them.

    down     a block is full ── its step is settled ──> stored: a reference keeps it from being overwritten ── Stored
    up       restore ── Restored ──> the request's again, filled as far as the restore got
                    └─ abort, RESTORE_TIMEOUT_S ──> quarantined ── Restored ──> released

A block is stored as soon as it is full, not when it is evicted: so eviction never has to wait for a copy, and a process
that is killed leaves its blocks in the tiers. Only a few blocks are being stored at a time (`STORING_SHARE`). A block
that is evicted before its turn is not stored.

Each cache group stores its full, registered blocks. A restore brings all groups to the same prefix length. If a model
has several groups and one of them does not get all of its blocks, that length is not reached: the blocks that did
arrive stay in the prefix cache, and the request goes back to the queue, to be looked up again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from ..block_log import BlockLog, GroupLog
from ..prefix import BlockHash
from ..requests.request import Request
from ..tiers import CopyId, KVTiers, Restored, Stored, Tier, TierStats
from .block_numbers import BlockNumbers
from .cache_groups import CacheGroup, StateGroup
from .held_blocks import Quarantine
from .request_memory import MissingBlock, RequestMemory, RestorePlan
from .restore_cost import RestoreCost

logger = logging.getLogger(__name__)

STORING_SHARE = 16  # stores reference at most 1 / STORING_SHARE of the blocks of an arena
BATCH_BLOCKS = 32  # most blocks of one store, counted in those of the first group: a restore may have to wait for it
RESTORE_TIMEOUT_S = 10.0  # then a request is computed instead, and the tiers get no more work until they answer


class Restoration(NamedTuple):
    """The end of a restore, which added `num_tokens` computed tokens to the request's hits in the pool.

    The request has lost all of its blocks if the restore took too long, or if one of several groups lacks some.
    """

    request: Request
    num_tokens: int


class _Restore(NamedTuple):
    request: Request
    plan: RestorePlan
    sizes: dict[Tier, float]  # what it reads from each tier, in blocks of the first group
    since: float


class _Store(NamedTuple):
    """Blocks that a store reads."""

    group: int
    blocks: list[int]


class TierCopies:
    """Copies between an engine's pools and its tiers. Without tiers nothing is stored and nothing found."""

    def __init__(
        self,
        tiers: KVTiers | None,
        groups: Sequence[CacheGroup],
        numbers: BlockNumbers,
        memory: RequestMemory,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tiers = tiers
        self._groups = groups
        self._pools = [group.pool for group in groups]
        self._numbers = numbers
        self._memory = memory
        self._block_size = block_size
        self.quarantine = Quarantine(numbers)
        # Each step to wait for, and how many blocks of each group were registered when it was the newest one planned.
        self._unsettled: deque[tuple[int, Sequence[int]]] = deque()
        self._num_written: Sequence[int] = [0] * len(groups)  # no step writes to blocks registered with lower numbers
        self._stores: dict[CopyId, _Store] = {}
        self._num_stored = [0] * len(groups)
        self._restores: dict[CopyId, _Restore] = {}
        self.num_restores_over = 0  # restores that have ended, or for which no request waits any more
        self._copy_of: dict[Request, CopyId] = {}
        self._coming: set[tuple[int, BlockHash]] = set()  # group and hash of each block that a request waits for
        self._clock = clock
        self._answers = True  # the tiers answer in time
        self._answered_s = 0.0  # when they answered last
        self._restore_cost = RestoreCost()
        self._log: BlockLog | None = None
        self._hits = self._misses = self._given_up = 0  # blocks
        self._restored_tokens = 0
        if tiers is not None:
            for pool in self._pools:
                pool.track_new_blocks()

    @property
    def has_tiers(self) -> bool:
        return self._tiers is not None

    def block_log(self) -> BlockLog:
        """Return the log of the places of blocks. The first call starts it; later ones return the same object."""
        if self._log is None:
            logs = [GroupLog(pool.findable, self._tiers, number) for number, pool in enumerate(self._pools)]
            rules = [] if self._memory.keeps_all else [group.hit_rule for group in self._groups]
            self._log = BlockLog(logs, rules)
            for number, (pool, log) in enumerate(zip(self._pools, logs, strict=True)):
                pool.watch(log)
                if self._tiers is not None:
                    self._tiers.watch(log, number)
        return self._log

    @property
    def num_restoring(self) -> int:
        """The number of requests that wait for a restore."""
        return len(self._copy_of)

    @property
    def has_stores(self) -> bool:
        """True while stores reference blocks. Such a block may have no other owner."""
        return bool(self._stores)

    def blocks_being_stored(self, group: int) -> list[list[int]]:
        """Return the blocks of a group that stores read: a list for each store."""
        return [store.blocks for store in self._stores.values() if store.group == group]

    # ------------------------------------------------------------------ down

    def planned(self, step: int) -> None:
        """Note that step `step` has been launched."""
        if self._tiers is not None:
            self._restore_cost.planned(step, self._clock())

    def settled(self, step: int, newest_planned: int, num_tokens: int) -> None:
        """Note the end of a step of `num_tokens`, and store full blocks. Steps up to `newest_planned` may still write.

        Only called in engines with tiers.
        """
        self._restore_cost.settled(step, num_tokens, self._clock())
        self._unsettled.append((newest_planned, [pool.num_registered for pool in self._pools]))
        while self._unsettled and self._unsettled[0][0] <= step:
            _, self._num_written = self._unsettled.popleft()
        self._store()

    def _store(self) -> None:
        for number, group in enumerate(self._groups):
            self._store_of(number, group)

    def _store_of(self, number: int, group: CacheGroup) -> None:
        """Store full blocks of a group, within the limits on blocks being stored."""
        assert self._tiers is not None
        most = max(1, group.pool.num_blocks // STORING_SHARE)
        at_once = max(1, int(BATCH_BLOCKS / self._tiers.block_sizes[number]))
        while (room := min(at_once, most - self._num_stored[number])) > 0 and (batch := self._next_batch(number, room)):
            blocks = [block for block, _ in batch]
            hashes = [block_hash for _, block_hash in batch]
            copy_id = self._tiers.store(hashes, [self._numbers.number_of(number, block) for block in blocks])
            self._stores[copy_id] = _Store(number, blocks)
            self._num_stored[number] += len(blocks)

    def _next_batch(self, number: int, most: int) -> list[tuple[int, BlockHash]]:
        """Return full blocks of a group that are in no tier, with a reference to each.

        No states while no slot is free: a sequence whose slot is being read needs another one to continue in.
        """
        assert self._tiers is not None
        pool, before = self._pools[number], self._num_written[number]
        batch: list[tuple[int, BlockHash]] = []
        if isinstance(self._groups[number], StateGroup) and not pool.num_free:
            return batch
        while len(batch) < most and (new_block := pool.take_new_block(before)):
            block, block_hash = new_block
            if not self._tiers.knows(block_hash, number):
                pool.reference(block)
                batch.append(new_block)
        return batch

    # ------------------------------------------------------------------ up

    def find(self, request: Request) -> RestorePlan | None:
        """Return what to restore of a request's prefix; None if that is too little, or computing it is faster.

        Only called in engines with tiers.
        """
        assert self._tiers is not None
        if not self._answers:
            return None
        plan = self._memory.find_restore(request, self._tiers)
        if plan.num_tokens < self._tiers.min_tokens or not self._pays(plan):
            return None
        # A restore of states needs one more slot than the request alone.
        return plan if not self._memory.has_states or self._memory.fits_restored(request, plan) else None

    def _pays(self, plan: RestorePlan) -> bool:
        sizes = self._sizes(plan.missing)
        for restore in self._restores.values():  # a new restore would have to wait for these
            for tier, size in restore.sizes.items():
                sizes[tier] = sizes.get(tier, 0.0) + size
        running = {tier for restore in self._restores.values() for tier in restore.sizes}
        return self._restore_cost.prefer_restoring(sizes, plan.num_tokens, self._clock(), running)

    def _sizes(self, missing: Iterable[MissingBlock]) -> dict[Tier, float]:
        """Return the total size of blocks that were just found, by tier."""
        assert self._tiers is not None
        sizes = dict[Tier, float]()
        for group, _, block_hash in missing:
            if (tier := self._tiers.tier_of(block_hash, group)) is not None:
                sizes[tier] = sizes.get(tier, 0.0) + self._tiers.block_sizes[group]
        return sizes

    def is_being_restored(self, plan: RestorePlan) -> bool:
        """Return whether a restore of another request will bring blocks of this plan into the pool.

        Blocks of a group arrive in order, so it is enough to look at the first one of each group.
        """
        firsts = {each.group: each for each in reversed(plan.missing)} if self._coming else {}
        return any((each.group, each.block_hash) in self._coming for each in firsts.values())

    def restore(self, request: Request, plan: RestorePlan) -> None:
        """Start to fill the blocks that were reserved for the request with this plan."""
        assert self._tiers is not None
        tables = request.block_tables
        hashes = [each.block_hash for each in plan.missing]
        blocks = [self._numbers.number_of(each.group, tables[each.group][each.entry]) for each in plan.missing]
        sizes = self._sizes(plan.missing)
        copy_id = self._tiers.restore(hashes, blocks)
        self._restores[copy_id] = _Restore(request, plan, sizes, self._clock())
        self._copy_of[request] = copy_id
        self._coming.update((each.group, each.block_hash) for each in plan.missing)
        self._hits += len(hashes)

    def restores(self, request: Request) -> bool:
        return request in self._copy_of

    def cancel(self, request: Request) -> None:
        """Take a request's blocks from it, some of which may still be written. No `Restoration` follows."""
        copy_id = self._copy_of.pop(request)
        self._forget_coming(self._restores[copy_id])
        _, owned = request.give_up_memory()
        written = []
        for pool, blocks in zip(self._pools, owned, strict=True):
            pool.release([block for block in blocks if pool.is_cached(block)])
            written.append([block for block in blocks if not pool.is_cached(block)])
        self.quarantine.admit(copy_id, self._numbers.of_groups(written))

    def started(self, request: Request) -> None:
        """Count a new request's blocks that neither pool nor tiers had, and mark its prefix as used in the tiers."""
        if self._tiers is None:
            return
        num_present = request.num_computed // self._block_size
        self._misses += max(0, (request.num_prompt - 1) // self._block_size - num_present)
        hashes = request.block_hashes[:num_present]
        for number, group in enumerate(self._groups):
            entries = range(group.first_visible(len(hashes) * self._block_size), group.num_entries(len(hashes)))
            self._tiers.touch([hashes[group.last_block(entry)] for entry in entries], number)

    # ------------------------------------------------------------------ events

    def poll(self) -> list[Restoration]:
        if self._tiers is None:
            return []
        over = []
        for event in self._tiers.poll():
            self._answers, self._answered_s = True, self._clock()
            match event:
                case Stored():
                    group, blocks = self._stores.pop(event.copy_id)
                    self._num_stored[group] -= len(blocks)
                    self._pools[group].release(blocks)
                case Restored():
                    restore = self._restores.pop(event.copy_id)
                    self._restore_cost.restored(event, restore.since, self._clock())
                    if self.quarantine.release(event.copy_id):
                        continue
                    self._forget_coming(restore)
                    del self._copy_of[restore.request]
                    over.append(self._restored(restore, event.num_blocks))
        self._store()
        return over + self._give_up_overdue()

    def _restored(self, restore: _Restore, num_filled: int) -> Restoration:
        request, plan = restore.request, restore.plan
        if num_filled < len(plan.missing) and not self._memory.keeps_all:
            self._keep_what_came(request, plan.missing[:num_filled])
            return Restoration(request, 0)
        complete = num_filled == len(plan.missing)
        num_tokens = plan.num_tokens if complete else num_filled * self._block_size
        self._restored_tokens += num_tokens
        return Restoration(request, num_tokens)

    def _keep_what_came(self, request: Request, filled: Sequence[MissingBlock]) -> None:
        """Leave the blocks that were filled in the prefix cache, and release all blocks of the request."""
        for group, entry, block_hash in filled:
            self._pools[group].register(request.block_tables[group][entry], block_hash)
        _, owned = request.give_up_memory()
        for pool, blocks in zip(self._pools, owned, strict=True):
            pool.release(blocks)

    def _forget_coming(self, restore: _Restore) -> None:
        self.num_restores_over += 1
        self._coming.difference_update((each.group, each.block_hash) for each in restore.plan.missing)

    def _give_up_overdue(self) -> list[Restoration]:
        """Cancel restores that take too long: a disk that hangs must not delay all requests that wait for it."""
        if not self._are_late():
            return []
        self._answers = False
        late = list(self._copy_of)
        logger.warning(
            "the KV tiers have not answered for %g s: %d requests compute their prompts instead",
            RESTORE_TIMEOUT_S,
            len(late),
        )
        for request in late:
            restore = self._restores[self._copy_of[request]]
            self._given_up += len(restore.plan.missing)
            self.cancel(request)
        return [Restoration(request, 0) for request in late]

    def _are_late(self) -> bool:
        """Return whether a request waits too long, or the tiers are silent for so long while they restore anything."""
        since_s = [self._restores[copy_id].since for copy_id in self._copy_of.values()]
        if self._answers and self._restores:
            since_s.append(max(self._answered_s, next(iter(self._restores.values())).since))
        return bool(since_s) and self._clock() - min(since_s) >= RESTORE_TIMEOUT_S

    def stats(self) -> TierStats | None:
        """Return the tiers' statistics; None without tiers."""
        if self._tiers is None:
            return None
        stats, now_s = self._tiers.stats(), self._clock()
        token_s = self._restore_cost.token_s(now_s)
        return msgspec.structs.replace(
            stats,
            hits=self._hits,
            misses=self._misses,
            restored_tokens=self._restored_tokens,
            failures={**stats.failures, "slow": self._given_up} if self._given_up else stats.failures,
            min_tokens=self._tiers.min_tokens,
            answers=self._answers,
            restore_s={tier.value: block_s for tier, block_s in self._restore_cost.blocks_s(now_s).items()},
            compute_s=0.0 if token_s is None else token_s * self._block_size,
        )
