"""Copies of blocks in the tiers, and the requests that wait for blocks out of them.

    down     a block is full ── its step is settled ──> stored: a reference keeps it from being overwritten ── Stored
    up       restore ── Restored ──> the request's again, filled as far as it went
                    └─ abort, PATIENCE_S ──> quarantined ── Restored ──> released

A block goes down as soon as it is full, not when it is evicted: so eviction never has to wait for a copy, and a process
that is killed leaves its blocks behind. Few blocks are being stored at a time (`STORING_SHARE`); one that has to wait
for its turn may be evicted meanwhile, and is then not stored.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from ..block_log import BlockLog
from ..prefix import BlockHash
from ..requests.request import Request
from ..tiers import CopyId, KVTiers, Restored, Stored, Tier, TierStats
from .blocks import BlockPool
from .held_blocks import Quarantine

logger = logging.getLogger(__name__)

STORING_SHARE = 16  # one block in so many may be referenced by stores
BATCH_BLOCKS = 32  # of one store: a restore waits for no longer than that
PATIENCE_S = 10.0  # a request computes what takes longer; nothing is asked of the tiers until they answer


class Restoration(NamedTuple):
    """The end of a restore, which has added `num_tokens` to those that the request had in the pool.

    After one that took too long the request has no blocks at all.
    """

    request: Request
    num_tokens: int


class _Restore(NamedTuple):
    request: Request
    hashes: list[BlockHash]
    blocks: Counter[Tier]  # in each
    since: float


class TierCopies:
    """The copies between an engine's pool and its tiers. Without tiers nothing is stored and nothing found.

    They move the blocks of one cache group.
    """

    def __init__(
        self,
        tiers: KVTiers | None,
        pool: BlockPool,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tiers = tiers
        self._pool = pool
        self._block_size = block_size
        self.quarantine = Quarantine(pool)
        self._unsettled: deque[tuple[int, int]] = deque()  # step, and how many blocks were full when it was the newest
        self._num_written = 0  # blocks with lower numbers are no longer written by any step
        self._lent: dict[CopyId, list[int]] = {}
        self._num_lent = 0
        self._restores: dict[CopyId, _Restore] = {}
        self._copy_of: dict[Request, CopyId] = {}
        self._coming: set[BlockHash] = set()
        self._clock = clock
        self._answers = True  # the tiers do, in time
        self._restore_cost = RestoreCost()
        self._log: BlockLog | None = None
        self._hits = self._misses = self._restored = self._given_up = 0  # blocks
        if tiers is not None:
            pool.track_new_blocks()

    @property
    def exists(self) -> bool:
        return self._tiers is not None

    def block_log(self) -> BlockLog:
        """Return the log of block places. It is kept from the first call on, and is always the same object."""
        if self._log is None:
            self._log = BlockLog(self._pool.findable, self._tiers)
            self._pool.watch(self._log)
            if self._tiers is not None:
                self._tiers.watch(self._log)
        return self._log

    @property
    def num_restoring(self) -> int:
        """The number of requests that wait for blocks."""
        return len(self._copy_of)

    @property
    def any_referenced(self) -> bool:
        """True while stores reference blocks, which may have no other owner."""
        return self._num_lent > 0

    def owned_blocks(self) -> list[list[int]]:
        """Return the blocks that each store reads, and those that each cancelled restore may still write."""
        return [*self._lent.values(), *self.quarantine.owned_blocks()]

    # ------------------------------------------------------------------ down

    def planned(self, step: int) -> None:
        """Note that step `step` has been launched."""
        if self._tiers is not None:
            self._restore_cost.planned(step, self._clock())

    def settled(self, step: int, newest_planned: int, num_tokens: int) -> None:
        """Note the end of a step of `num_tokens`, and store full blocks. Steps up to `newest_planned` may still write.

        Called only in engines with tiers.
        """
        self._restore_cost.settled(step, num_tokens, self._clock())
        self._unsettled.append((newest_planned, self._pool.num_registered))
        while self._unsettled and self._unsettled[0][0] <= step:
            _, self._num_written = self._unsettled.popleft()
        self._store()

    def _store(self) -> None:
        assert self._tiers is not None
        most = max(1, self._pool.num_blocks // STORING_SHARE)
        while (room := min(BATCH_BLOCKS, most - self._num_lent)) > 0 and (batch := self._next_batch(room)):
            blocks = [block for block, _ in batch]
            self._lent[self._tiers.store([block_hash for _, block_hash in batch], blocks)] = blocks
            self._num_lent += len(blocks)

    def _next_batch(self, most: int) -> list[tuple[int, BlockHash]]:
        """Return full blocks that are in no tier, each with a reference added."""
        assert self._tiers is not None
        batch: list[tuple[int, BlockHash]] = []
        while len(batch) < most and (new_block := self._pool.take_new_block(before=self._num_written)):
            block, block_hash = new_block
            if not self._tiers.knows(block_hash):
                self._pool.reference(block)
                batch.append(new_block)
        return batch

    # ------------------------------------------------------------------ up

    def pays(self, missing: Sequence[BlockHash]) -> bool:
        """Return whether enough of a request's missing blocks can be restored, and sooner than computed."""
        assert self._tiers is not None
        if not self._answers:
            return False
        num_blocks = self._tiers.find(missing)
        if num_blocks * self._block_size < self._tiers.min_tokens:
            return False
        blocks = self._count(missing[:num_blocks])
        for restore in self._restores.values():  # it would wait for them
            blocks.update(restore.blocks)
        return self._restore_cost.prefer_restoring(blocks, num_blocks * self._block_size, self._clock())

    def _count(self, hashes: Sequence[BlockHash]) -> Counter[Tier]:
        """Count blocks, which `find` has found just now, by tier."""
        assert self._tiers is not None
        return Counter(tier for block_hash in hashes if (tier := self._tiers.tier_of(block_hash)) is not None)

    def is_coming(self, block_hash: BlockHash) -> bool:
        """Return whether a restore of another request will bring this block into the pool."""
        return block_hash in self._coming

    def restore(self, request: Request, missing: Sequence[BlockHash]) -> None:
        """Start to fill the request's blocks behind its prefix hits; see `pays`."""
        assert self._tiers is not None
        hashes = list(missing[: self._tiers.find(missing)])
        blocks = self._count(hashes)
        first = request.num_computed // self._block_size
        copy_id = self._tiers.restore(hashes, request.block_ids[first : first + len(hashes)])
        self._restores[copy_id] = _Restore(request, hashes, blocks, self._clock())
        self._copy_of[request] = copy_id
        self._coming.update(hashes)
        self._hits += len(hashes)

    def restores(self, request: Request) -> bool:
        return request in self._copy_of

    def cancel(self, request: Request) -> None:
        """Separate a request from its blocks, some of which may still be written. No `Restoration` follows."""
        copy_id = self._copy_of.pop(request)
        first = request.num_computed // self._block_size
        _, (blocks,) = request.give_up_memory()
        self._pool.release(blocks[:first])
        self.quarantine.admit(copy_id, blocks[first:])

    def started(self, request: Request) -> None:
        """Count a new request's blocks that are in no tier and not in the pool, and note the use of its prefix."""
        if self._tiers is not None:
            num_present = request.num_computed // self._block_size
            self._misses += max(0, (request.num_prompt - 1) // self._block_size - num_present)
            self._tiers.touch(request.block_hashes[:num_present])

    # ------------------------------------------------------------------ events

    def poll(self) -> list[Restoration]:
        if self._tiers is None:
            return []
        over = []
        for event in self._tiers.poll():
            self._answers = True
            match event:
                case Stored():
                    blocks = self._lent.pop(event.copy_id)
                    self._num_lent -= len(blocks)
                    self._pool.release(blocks)
                case Restored():
                    request, hashes, _, since_s = self._restores.pop(event.copy_id)
                    self._restore_cost.restored(event, since_s, self._clock())
                    self._coming.difference_update(hashes)
                    if self.quarantine.release(event.copy_id):
                        continue
                    del self._copy_of[request]
                    self._restored += event.num_blocks
                    over.append(Restoration(request, event.num_blocks * self._block_size))
        self._store()
        return over + self._give_up_overdue()

    def _give_up_overdue(self) -> list[Restoration]:
        """Cancel restores that take too long: a disk that hangs must not delay all requests behind one."""
        if not self._copy_of:
            return []
        since_s = min(self._restores[copy_id].since for copy_id in self._copy_of.values())
        if self._clock() - since_s < PATIENCE_S:
            return []
        self._answers = False
        late = list(self._copy_of)
        logger.warning("the KV tiers have not answered for %g s: %d requests are computed", PATIENCE_S, len(late))
        for request in late:
            hashes = self._restores[self._copy_of[request]].hashes
            self._given_up += len(hashes)
            self._coming.difference_update(hashes)
            self.cancel(request)
        return [Restoration(request, 0) for request in late]

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
            restored_tokens=self._restored * self._block_size,
            failures={**stats.failures, "slow": self._given_up} if self._given_up else stats.failures,
            min_tokens=self._tiers.min_tokens,
            answers=self._answers,
            restore_s={tier.value: block_s for tier, block_s in self._restore_cost.blocks_s(now_s).items()},
            compute_s=0.0 if token_s is None else token_s * self._block_size,
        )


KEPT = 0.8  # of what earlier pieces count for, with each further piece
FORGOTTEN_S = 30.0  # a pace that was measured longer ago is none
MIN_MEASURED_TOKENS = 128  # steps of fewer say nothing about what a prompt takes


class Rate:
    """The time per unit of work. Pieces run one after the other, however early they were requested."""

    def __init__(self) -> None:
        self._seconds = self._units = 0.0
        self._over_s = self._measured_s = 0.0

    def note(self, asked_s: float, over_s: float, num_units: int) -> None:
        """Note the end of a piece. One of no units only bounds the start of the next."""
        began_s, self._over_s = max(asked_s, self._over_s), over_s
        if num_units:
            self.add(over_s - began_s, num_units, over_s)

    def add(self, seconds: float, num_units: int, now_s: float) -> None:
        """Add a measurement made elsewhere: `num_units` took `seconds`."""
        kept = KEPT if self._is_known(now_s) else 0.0
        self._seconds = self._seconds * kept + seconds
        self._units = self._units * kept + num_units
        self._measured_s = now_s

    def per_unit_s(self, now_s: float) -> float | None:
        """Return the seconds per unit; None where nothing was measured lately."""
        return self._seconds / self._units if self._is_known(now_s) else None

    def _is_known(self, now_s: float) -> bool:
        return self._units > 0 and now_s - self._measured_s <= FORGOTTEN_S


class RestoreCost:
    """Measured times of computing a token and of restoring a block of each tier, by one clock of the caller's."""

    def __init__(self) -> None:
        self._planned_s: dict[int, float] = {}  # of steps in flight
        self._computing = Rate()
        self._restoring: dict[Tier, Rate] = {Tier.HOST: Rate(), Tier.DISK: Rate()}
        self._restored_until_s = 0.0

    def planned(self, step: int, now_s: float) -> None:
        self._planned_s[step] = now_s

    def settled(self, step: int, num_tokens: int, now_s: float) -> None:
        num_measured = num_tokens if num_tokens >= MIN_MEASURED_TOKENS else 0
        self._computing.note(self._planned_s.pop(step), now_s, num_measured)

    def restored(self, restored: Restored, since_s: float, now_s: float) -> None:
        """Note a restore. Its time, waiting included, is divided among the tiers in the proportion of their copies."""
        took_s = now_s - max(since_s, self._restored_until_s)
        self._restored_until_s = now_s
        copies_s = sum(read.seconds for read in restored.reads)
        for read in restored.reads:
            if read.seconds > 0:
                self._restoring[read.tier].add(took_s * read.seconds / copies_s, read.num_blocks, now_s)

    def prefer_restoring(self, blocks: Counter[Tier], num_tokens: int, now_s: float) -> bool:
        """Return whether restoring these blocks is faster than computing `num_tokens`; True while unknown."""
        token_s = self.token_s(now_s)
        if token_s is None:
            return True
        restore_s = 0.0
        for tier, count in blocks.items():
            block_s = self._restoring[tier].per_unit_s(now_s)
            if block_s is None:
                return True
            restore_s += count * block_s
        return restore_s <= num_tokens * token_s

    def token_s(self, now_s: float) -> float | None:
        """Return the time to compute one token; None where nothing was measured lately."""
        return self._computing.per_unit_s(now_s)

    def blocks_s(self, now_s: float) -> dict[Tier, float]:
        """Return the time to restore one block, for each tier that was measured lately."""
        rates = {tier: rate.per_unit_s(now_s) for tier, rate in self._restoring.items()}
        return {tier: block_s for tier, block_s in rates.items() if block_s is not None}
