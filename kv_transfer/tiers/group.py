"""Tiers of a group of ranks: each rank keeps its share of a block, in the slot of the same number.

    rank 0     TierStore ── TierIndex ──moves──> TierGroup ──┬── TierWorker            memory and files of rank 0
                                                             └── TpCopyGroup ──moves──> TierHandler ── TierWorker
                                                                                                   of rank 1

Only rank 0 has the indexes. A block is stored, or restored, when that is done on every rank, and lost when one rank has
lost it. A block of an earlier process can be used if every rank's files have it in the same slot.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from baton.engine.core.prefix import HASH_BYTES, BlockHash
from baton.engine.core.regions import CacheRegion
from baton.engine.core.tiers import Tier

from ..affinity import pin_thread
from ..channel import Channel, Route
from ..codec import MAX_REASON_CHARS, Id, Reason
from ..errors import MalformedMessage, RankLost, TransportError
from ..group.rpc import IDLE_S, GroupMember, GroupRank, GroupSocket, MemberThread, Service, TpCopyGroup
from ..settings import TierSettings
from .disk_files import FileOwner
from .division import TierDivision
from .tier_index import Loss, Move
from .worker import KeptBlock, Losses, TierWorker, take_disk_space

logger = logging.getLogger(__name__)

MAX_MOVES = 1024  # in one order: at most 70 KB
MAX_FOUND = 16384  # in one report: at most 500 KB

FoundBlock = tuple[Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)], Id]  # its hash, its slot


class FoundBlocks(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Some of the blocks of earlier processes in a cache group's files. `OpenedTiers` follows the last of them."""

    kept: Annotated[list[FoundBlock], Meta(max_length=MAX_FOUND)]


class OpenedTiers(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The answer to `OpenTiers`, once for each cache group, in order."""

    num_host_slots: Id
    num_disk_slots: Id
    disk_full: Reason = ""  # why there is no disk tier, although the settings ask for one


class MovedBlocks(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The answer to `MoveBlocks`."""

    losses: Annotated[list[Loss | None], Meta(max_length=MAX_MOVES)]  # one for each move
    disk_failed: bool


class OpenTiers(msgspec.Struct, frozen=True, array_like=True, tag=10):
    file_set: Annotated[str, Meta(max_length=64)]  # of rank 0; empty: rank 0 has no files


class MoveBlocks(msgspec.Struct, frozen=True, array_like=True, tag=11):
    moves: Annotated[list[Move], Meta(max_length=MAX_MOVES)]


TierOrder = OpenTiers | MoveBlocks
TierReport = FoundBlocks | OpenedTiers | MovedBlocks

TIERS = Service.of(TierOrder, TierReport)


class _RankTiers(NamedTuple):
    """The tiers of one cache group on another rank."""

    num_host_slots: int
    num_disk_slots: int
    disk_full: str
    kept: set[KeptBlock]


class TierGroup:
    """Rank 0's `TierMover` of a group: it moves blocks on all ranks.

    Raises `TransportError` if a rank does not join or cannot keep its share. Calls raise `RankLost`.
    """

    def __init__(
        self, fingerprint: str, division: TierDivision, settings: TierSettings, name: str, socket: GroupSocket
    ) -> None:
        """`fingerprint` identifies the layout of all cache groups."""
        space = take_disk_space(division, settings, FileOwner(0, socket.size))
        num_groups = len(division.groups)
        try:
            self._group = TpCopyGroup(socket, fingerprint, TIERS)
            self._group.order(OpenTiers(space.file_set))
            self._own = TierWorker(division, name, space)
            opened = [[self._opened(rank) for _ in range(num_groups)] for rank in self._group.ranks]
        except RankLost as error:
            raise TransportError(f"KV tiers: {error}") from error
        full = [space.disk_full, *(groups[0].disk_full for groups in opened)]
        self.disk_full = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(full) if reason)
        alike = list(zip(*opened, strict=True))  # for each cache group, the other ranks' tiers
        self.num_host_slots = [
            min(own, *(other.num_host_slots for other in others))
            for own, others in zip(self._own.num_host_slots, alike, strict=True)
        ]
        self.num_disk_slots = [
            min(own, *(other.num_disk_slots for other in others))
            for own, others in zip(self._own.num_disk_slots, alike, strict=True)
        ]
        self._check_numbers(division)
        self.kept = [
            [each for each in own if all(each in other.kept for other in others)]
            for own, others in zip(self._own.kept, alike, strict=True)
        ]
        self._another_disk_failed = False

    def _check_numbers(self, division: TierDivision) -> None:
        """Raise `TransportError` if slots of several cache groups would have other numbers on other ranks."""
        found = list(zip(self.num_host_slots, self.num_disk_slots, strict=True))
        asked = [(group.num_host_slots, group.num_disk_slots) for group in division.groups]
        without_disk = [(group.num_host_slots, 0) for group in division.groups]
        if len(found) > 1 and found not in (asked, without_disk):
            raise TransportError(f"KV tiers: ranks have different slots, rank 0 {asked}: give all the same kv_tiers")

    @property
    def disk_failed(self) -> bool:
        return self._own.disk_failed or self._another_disk_failed

    def move(self, moves: Sequence[Move]) -> Losses:
        losses: Losses = []
        for start in range(0, len(moves), MAX_MOVES):
            losses += self._move_some(moves[start : start + MAX_MOVES])
        return losses

    def note_use(self, used: Sequence[tuple[int, BlockHash]]) -> None:
        """Record uses on rank 0's disk, whose order of blocks is used for all ranks."""
        self._own.note_use(used)

    def close(self) -> None:
        self._own.close()
        self._group.close()

    def _move_some(self, moves: Sequence[Move]) -> Losses:
        self._group.order(MoveBlocks(list(moves)))
        by_rank = [self._own.move(moves)]
        for rank, moved in zip(self._group.ranks, self._group.answers(MovedBlocks), strict=True):
            if len(moved.losses) != len(moves):
                raise RankLost(f"rank {rank} reports of {len(moved.losses)} moves, not of {len(moves)}")
            by_rank.append(moved.losses)
            if moved.disk_failed and not self._another_disk_failed:
                self._another_disk_failed = True
                logger.error("the disk tier is off until the next start: the disk of rank %d failed", rank)
        return [next((loss for loss in losses if loss is not None), None) for losses in zip(*by_rank, strict=True)]

    def _opened(self, rank: int) -> _RankTiers:
        """Return a rank's tiers of the next cache group."""
        kept: set[KeptBlock] = set()
        while isinstance(report := self._group.next_report(rank), FoundBlocks):
            kept.update(report.kept)
        if not isinstance(report, OpenedTiers):
            raise RankLost(f"rank {rank} sends {type(report).__name__} instead of OpenedTiers")
        return _RankTiers(report.num_host_slots, report.num_disk_slots, report.disk_full, kept)


class TierHandler:
    """Opens the tiers of a rank other than 0, and moves its share of blocks, when rank 0 orders it."""

    def __init__(self, region: CacheRegion, settings: TierSettings, name: str, rank: int, num_ranks: int) -> None:
        self._region, self._settings, self._name = region, settings, name
        self._division = TierDivision(region, settings)
        self._rank, self._num_ranks = rank, num_ranks
        self._worker: TierWorker | None = None

    def details(self) -> None:
        return None

    def handle(self, order: TierOrder) -> Iterator[TierReport]:
        match order:
            case OpenTiers():
                yield from self._open(order.file_set)
            case MoveBlocks():
                worker = self._checked(order.moves)
                losses = worker.move(order.moves)
                yield MovedBlocks(losses, worker.disk_failed)

    def advance(self) -> tuple[Sequence[msgspec.Struct], float]:
        return (), IDLE_S

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _open(self, file_set: str) -> Iterator[TierReport]:
        settings = self._settings
        if not file_set:  # rank 0 has no files
            settings = settings.model_copy(update={"disk_bytes": 0})
        self._division = TierDivision(self._region, settings)
        space = take_disk_space(self._division, settings, FileOwner(self._rank, self._num_ranks, file_set))
        self._worker = worker = TierWorker(self._division, self._name, space)
        full = space.disk_full[:MAX_REASON_CHARS]
        for num_host, num_disk, kept in zip(worker.num_host_slots, worker.num_disk_slots, worker.kept, strict=True):
            for start in range(0, len(kept), MAX_FOUND):
                yield FoundBlocks(kept[start : start + MAX_FOUND])
            yield OpenedTiers(num_host, num_disk, full)

    def _checked(self, moves: Sequence[Move]) -> TierWorker:
        """Return the worker. Raises `MalformedMessage` for slots that do not exist, and for moves between groups."""
        if self._worker is None:
            raise MalformedMessage("moves come before anything is open")
        num_slots = {
            Tier.POOL: self._region.num_blocks,
            Tier.HOST: sum(self._worker.num_host_slots),
            Tier.DISK: sum(self._worker.num_disk_slots),
        }
        for move in moves:
            if not (0 <= move.source_slot < num_slots[move.source] and 0 <= move.target_slot < num_slots[move.target]):
                raise MalformedMessage(f"{move} is outside of {num_slots}")
            if self._division.joins_groups(move):
                raise MalformedMessage(f"{move} goes from one cache group to another")
        return self._worker


def follow_tiers(
    region: CacheRegion,
    me: GroupRank,
    settings: TierSettings,
    *,
    leader: str,
    name: str,
    cpu_affinity: str,
) -> MemberThread:
    """Start the thread that keeps a rank's share of the blocks of rank 0's `TierStore`. Raises `TransportError`.

    `leader` is the address of the socket that rank 0's store was given. `name` must be unique in this process.
    """

    def begin(channel: Channel, route: Route) -> GroupMember:
        pin_thread(cpu_affinity, region.device)
        handler, fingerprint = TierHandler(region, settings, name, me.rank, me.size), region.fingerprint
        return GroupMember(handler, TIERS, rank=me.rank, fingerprint=fingerprint, channel=channel, leader=route)

    return MemberThread(begin, me, leader=leader, name="baton-tiers").start()
