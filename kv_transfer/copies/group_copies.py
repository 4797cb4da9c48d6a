"""The host buffer of a group of ranks: each copies its share between its blocks and its places.

    rank 0     HostBuffer ── Copier ── GroupCopies ──┬── Copies                        of rank 0
                                                     └── Team ──orders──> CopyServant ── Copies    of rank 1

Blocks and places have the same numbers on every rank, and a copy is over when it is so on every rank. Each rank
registers its places instead of its blocks, and reads into them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from baton.engine.core.layout import KVRegion
from baton.engine.net.curve import ClusterKey

from ..errors import MalformedMessage, NotRegistrable
from ..group.crew_member import CrewMember
from ..group.team import Team, TeamMember
from ..group.team_messages import MAX_MOVES, AreYouThere, Copied, CopyDown, CopyUp, TeamOrder, TeamReport
from ..net.channel import RankSocket
from ..settings import TransferSettings
from .host_memory import Copies, HostMemory, Pair, open_copies
from .places import take_places


class GroupCopies:
    """The `Copies` of rank 0. Raises `TransportError` where another rank does not come; calls raise `RankLost`."""

    def __init__(self, region: KVRegion, memory: HostMemory, socket: RankSocket) -> None:
        self._own = open_copies(region, memory)
        self._team = Team(socket, region.layout.fingerprint)

    def down(self, pairs: Sequence[Pair]) -> None:
        self._copy(CopyDown, self._own.down, pairs)

    def up(self, pairs: Sequence[Pair]) -> None:
        self._copy(CopyUp, self._own.up, pairs)

    def _copy(
        self, order: type[CopyDown | CopyUp], own: Callable[[Sequence[Pair]], None], pairs: Sequence[Pair]
    ) -> None:
        for start in range(0, len(pairs), MAX_MOVES):
            some = list(pairs[start : start + MAX_MOVES])
            self._team.order(order(some))
            own(some)
            self._team.answers(Copied)


class CopyServant:
    """The same on another rank."""

    def __init__(self, region: KVRegion, memory: HostMemory) -> None:
        self._num_blocks, self._num_places = region.num_blocks, memory.num_slots
        self._copies: Copies = open_copies(region, memory)

    def obey(self, order: TeamOrder) -> Iterator[TeamReport]:
        match order:
            case CopyDown():
                self._copies.down(self._checked(order.pairs))
                yield Copied()
            case CopyUp():
                self._copies.up(self._checked(order.pairs))
                yield Copied()
            case AreYouThere():
                pass
            case _:
                raise MalformedMessage(f"a {type(order).__name__} is no order about copies")

    def close(self) -> None:
        pass

    def _checked(self, pairs: Sequence[Pair]) -> Sequence[Pair]:
        """Raises `MalformedMessage` for blocks and places that there are not."""
        for block, place in pairs:
            if block >= self._num_blocks or place >= self._num_places:
                raise MalformedMessage(
                    f"block {block} of {self._num_blocks}, place {place} of {self._num_places}: there is no such"
                )
        return pairs


class BufferMember:
    """Another rank's part in hand-offs by way of the host: its places are read and read into, and it copies."""

    def __init__(self, reader: CrewMember, copier: TeamMember) -> None:
        self._reader, self._copier = reader, copier

    def close(self) -> None:
        self._copier.close()
        self._reader.close()


def follow_connector(
    region: KVRegion,
    *,
    settings: TransferSettings,
    rank: int,
    leader: str,
    copies: str,
    engine_id: str,
    key: ClusterKey | None,
) -> CrewMember | BufferMember:
    """What another rank does for rank 0's `open_connector`, over the blocks themselves or by way of the host's memory.

    `leader`, `copies`: the addresses of the two sockets that rank 0's was given. Raises `TransportError`.
    """
    if settings.buffer != "host":
        with contextlib.suppress(NotRegistrable) if settings.buffer == "auto" else contextlib.nullcontext():
            return CrewMember(region, rank=rank, leader=leader, engine_id=engine_id, key=key, settings=settings)
    places = take_places(region, settings.buffer_bytes)  # rank 0 says why, as the same happens to it
    reader = CrewMember(
        places.region, rank=rank, leader=leader, engine_id=engine_id, key=key, settings=settings, buffered=True
    )
    try:
        copier = TeamMember(
            lambda: CopyServant(region, places.memory),
            rank=rank,
            fingerprint=region.layout.fingerprint,
            leader=copies,
            key=key,
            device=region.device,
            cpu_affinity=settings.cpu_affinity,
            name="baton-copies",
        )
    except Exception:
        reader.close()
        raise
    return BufferMember(reader, copier)
