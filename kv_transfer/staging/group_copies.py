"""Copies between blocks and staging slots on all ranks of a group: each rank copies its own share.

    rank 0     HostBufferConnector ── CopyThread ── GroupBlockCopier ──┬── BlockCopier                 of rank 0
                                                                       └── TpCopyGroup ──orders──> CopyHandler
                                                                                            ── BlockCopier   of rank 1

Blocks and slots have the same numbers on every rank. A copy is done when every rank has done it. Each rank registers
its slots instead of its blocks, and reads into them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.engine.core.regions import CacheRegion

from ..affinity import pin_thread
from ..block_copies import BlockCopier, SlotPair
from ..channel import Channel, Route
from ..codec import Id
from ..errors import MalformedMessage, NotRegistrable
from ..group.read_member import join_tp_read_group
from ..group.rpc import IDLE_S, GroupMember, GroupRank, GroupSocket, MemberThread, Service, TpCopyGroup
from ..settings import TransferSettings
from .slots import StagingCopier, StagingSlots, take_staging_slots

MAX_PAIRS = 1024  # in one order: at most 20 KB


class Copy(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Orders copies between blocks and slots. `is_down` copies blocks into slots."""

    is_down: bool
    pairs: Annotated[list[tuple[Id, Id]], Meta(max_length=MAX_PAIRS)]


class Copied(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The answer to `Copy`."""


COPIES = Service.of(Copy, Copied)


class GroupBlockCopier:
    """Rank 0's `BlockCopier`, which copies on all ranks.

    Raises `TransportError` if another rank does not join. Calls raise `RankLost` once one is gone.
    """

    def __init__(self, region: CacheRegion, slots: StagingSlots, socket: GroupSocket) -> None:
        self._own = StagingCopier(region, slots)
        self._group = TpCopyGroup(socket, region.fingerprint, COPIES)

    def down(self, pairs: Sequence[SlotPair]) -> None:
        self._copy(self._own.down, pairs, is_down=True)

    def up(self, pairs: Sequence[SlotPair]) -> None:
        self._copy(self._own.up, pairs, is_down=False)

    def _copy(
        self, copy_own: Callable[[Sequence[SlotPair]], None], pairs: Sequence[SlotPair], *, is_down: bool
    ) -> None:
        for start in range(0, len(pairs), MAX_PAIRS):
            some = list(pairs[start : start + MAX_PAIRS])
            self._group.order(Copy(is_down, some))
            copy_own(some)
            self._group.answers(Copied)


class CopyHandler:
    """Copies the share of a rank other than 0, when rank 0 orders it."""

    def __init__(self, region: CacheRegion, slots: StagingSlots) -> None:
        self._num_blocks, self._num_slots = region.num_blocks, slots.region.num_blocks
        self._copier: BlockCopier = StagingCopier(region, slots)

    def details(self) -> None:
        return None

    def handle(self, order: Copy) -> Iterator[Copied]:
        pairs = self._checked(order.pairs)
        if order.is_down:
            self._copier.down(pairs)
        else:
            self._copier.up(pairs)
        yield Copied()

    def advance(self) -> tuple[Sequence[msgspec.Struct], float]:
        return (), IDLE_S

    def close(self) -> None:
        pass

    def _checked(self, pairs: Sequence[SlotPair]) -> Sequence[SlotPair]:
        """Return the pairs of an order. Raises `MalformedMessage` for blocks and slots that do not exist."""
        for block, slot in pairs:
            if block >= self._num_blocks or slot >= self._num_slots:
                raise MalformedMessage(
                    f"block {block} or slot {slot} does not exist: "
                    f"this rank has {self._num_blocks} blocks and {self._num_slots} slots"
                )
        return pairs


class StagedMember:
    """A rank's threads for hand-offs through its staging slots: one reads into slots, one copies slots and blocks."""

    def __init__(self, reader: MemberThread, copier: MemberThread) -> None:
        self._reader, self._copier = reader, copier

    def close(self) -> None:
        self._copier.close()
        self._reader.close()


def follow_connector(
    region: CacheRegion,
    me: GroupRank,
    *,
    settings: TransferSettings,
    leader: str,
    copies: str,
    engine_id: str,
) -> MemberThread | StagedMember:
    """Join rank 0's `open_connector` from another rank, with the blocks themselves or through staging slots.

    `leader` and `copies` are the addresses of the two sockets that rank 0's connector was given. Raises
    `TransportError`.
    """
    if settings.buffer != "host":
        with contextlib.suppress(NotRegistrable) if settings.buffer == "auto" else contextlib.nullcontext():
            return join_tp_read_group(region, me, leader=leader, engine_id=engine_id, settings=settings)
    slots = take_staging_slots(region, settings.buffer_bytes)  # rank 0 has the same error, and logs it
    reader = join_tp_read_group(slots.region, me, leader=leader, engine_id=engine_id, settings=settings, staged=True)

    def begin(channel: Channel, route: Route) -> GroupMember:
        pin_thread(settings.cpu_affinity, region.device)
        handler, fingerprint = CopyHandler(region, slots), region.fingerprint
        return GroupMember(handler, COPIES, rank=me.rank, fingerprint=fingerprint, channel=channel, leader=route)

    try:
        copier = MemberThread(begin, me, leader=copies, name="baton-copies").start()
    except Exception:
        reader.close()
        raise
    return StagedMember(reader, copier)
