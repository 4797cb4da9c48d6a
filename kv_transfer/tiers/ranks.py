"""Tiers of a group of ranks: each keeps its share of a block, in the slot of the same number.

    rank 0     TierStore ── TierBooks ──moves──> TierGroup ──┬── TierWorker         memory and files of rank 0
                                                             └── Team ──moves──> TierServant ── TierWorker    of rank 1

The books are rank 0's alone. A block is stored, or restored, when it is so on every rank, and lost when it is on any.
What the files have from earlier processes counts where every rank's has it in the same slot.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from baton.engine.core.layout import KVRegion
from baton.engine.core.prefix import BlockHash
from baton.engine.core.tiers import Tier
from baton.engine.net.curve import ClusterKey

from ..codec import MAX_REASON_CHARS
from ..errors import MalformedMessage, RankLost, TransportError
from ..group.team import Team, TeamMember
from ..group.team_messages import (
    MAX_KEPT,
    MAX_MOVES,
    AreYouThere,
    Carried,
    Carry,
    Found,
    Opened,
    OpenTiers,
    TeamOrder,
    TeamReport,
)
from ..net.channel import RankSocket
from .books import Move
from .disk_files import Seat
from .settings import TierSettings
from .worker import Losses, TierWorker, take_room

logger = logging.getLogger(__name__)


class TierGroup:
    """The `TierHands` of rank 0 of a group.

    Raises `TransportError` where a rank does not come or cannot keep its share. Calls raise `RankLost`.
    """

    def __init__(self, region: KVRegion, settings: TierSettings, name: str, socket: RankSocket) -> None:
        room = take_room(region, settings, Seat(0, socket.size))
        try:
            self._team = Team(socket, region.layout.fingerprint)
            self._team.order(OpenTiers(room.files.file_set if room.files else ""))
            self._own = TierWorker(region, settings, name, room)
            opened = [self._opened(rank) for rank in self._team.ranks]
        except RankLost as error:
            raise TransportError(f"KV tiers: {error}") from error
        full = [room.disk_full, *(end.disk_full for end, _ in opened)]
        self.disk_full = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(full) if reason)
        self.num_host_slots = min(self._own.num_host_slots, *(end.num_host_slots for end, _ in opened))
        self.num_disk_slots = min(self._own.num_disk_slots, *(end.num_disk_slots for end, _ in opened))
        self.kept = [each for each in self._own.kept if all(each in others for _, others in opened)]
        self._a_disk_failed = False

    @property
    def disk_failed(self) -> bool:
        return self._own.disk_failed or self._a_disk_failed

    def carry_out(self, moves: Sequence[Move]) -> Losses:
        losses: Losses = []
        for start in range(0, len(moves), MAX_MOVES):
            losses += self._carry_out_some(moves[start : start + MAX_MOVES])
        return losses

    def note_use(self, used: Sequence[tuple[int, BlockHash]]) -> None:
        """The order on rank 0's disk is that of all."""
        self._own.note_use(used)

    def close(self) -> None:
        self._own.close()
        self._team.close()

    def _carry_out_some(self, moves: Sequence[Move]) -> Losses:
        self._team.order(Carry(list(moves)))
        by_rank = [self._own.carry_out(moves)]
        for rank, carried in zip(self._team.ranks, self._team.answers(Carried), strict=True):
            if len(carried.losses) != len(moves):
                raise RankLost(f"rank {rank} tells of {len(carried.losses)} moves, not of {len(moves)}")
            by_rank.append(carried.losses)
            if carried.disk_failed and not self._a_disk_failed:
                self._a_disk_failed = True
                logger.error("the disk tier is off until the next start: the disk of rank %d failed", rank)
        return [next((loss for loss in losses if loss is not None), None) for losses in zip(*by_rank, strict=True)]

    def _opened(self, rank: int) -> tuple[Opened, set[tuple[BlockHash, int]]]:
        kept: set[tuple[BlockHash, int]] = set()
        while isinstance(report := self._team.next_report(rank), Found):
            kept.update(report.kept)
        if not isinstance(report, Opened):
            raise RankLost(f"rank {rank} sends {type(report).__name__} instead of Opened")
        return report, kept


class TierServant:
    """The same on another rank: opens what it is told to open, moves what it is told to move."""

    def __init__(self, region: KVRegion, settings: TierSettings, name: str, rank: int, num_ranks: int) -> None:
        self._region, self._settings, self._name = region, settings, name
        self._rank, self._num_ranks = rank, num_ranks
        self._worker: TierWorker | None = None

    def obey(self, order: TeamOrder) -> Iterator[TeamReport]:
        match order:
            case OpenTiers():
                yield from self._open(order.file_set)
            case Carry():
                worker = self._checked(order.moves)
                losses = worker.carry_out(order.moves)
                yield Carried(losses, worker.disk_failed)
            case AreYouThere():
                pass
            case _:
                raise MalformedMessage(f"a {type(order).__name__} is no order about tiers")

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _open(self, file_set: str) -> Iterator[TeamReport]:
        settings = self._settings
        if not file_set:  # rank 0 has no files
            settings = settings.model_copy(update={"disk_bytes": 0})
        room = take_room(self._region, settings, Seat(self._rank, self._num_ranks, file_set))
        self._worker = TierWorker(self._region, settings, self._name, room)
        kept = self._worker.kept
        for start in range(0, len(kept), MAX_KEPT):
            yield Found(kept[start : start + MAX_KEPT])
        full = room.disk_full[:MAX_REASON_CHARS]
        yield Opened(self._worker.num_host_slots, self._worker.num_disk_slots, full)

    def _checked(self, moves: Sequence[Move]) -> TierWorker:
        """Raises `MalformedMessage` for slots that there are not."""
        if self._worker is None:
            raise MalformedMessage("moves come before anything is open")
        room = {
            Tier.POOL: self._region.num_blocks,
            Tier.HOST: self._worker.num_host_slots,
            Tier.DISK: self._worker.num_disk_slots,
        }
        for move in moves:
            if not (0 <= move.source_slot < room[move.source] and 0 <= move.target_slot < room[move.target]):
                raise MalformedMessage(f"{move} is outside of {room}")
        return self._worker


def follow_tiers(
    region: KVRegion,
    settings: TierSettings,
    *,
    rank: int,
    num_ranks: int,
    leader: str,
    key: ClusterKey | None,
    name: str,
    cpu_affinity: str,
) -> TeamMember:
    """Keeps another rank's share of what rank 0's `TierStore` keeps, until it is closed. Raises `TransportError`.

    `leader`: the address of the socket that rank 0's store was given. `name` is that of no other in this process.
    """
    return TeamMember(
        lambda: TierServant(region, settings, name, rank, num_ranks),
        rank=rank,
        fingerprint=region.layout.fingerprint,
        leader=leader,
        key=key,
        device=region.device,
        cpu_affinity=cpu_affinity,
        name="baton-tiers",
    )
