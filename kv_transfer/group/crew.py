"""All ranks of one group as one reader of blocks.

    Handoff ──> Crew ──┬──> RankReader                       rank 0's own
                       ├──> RemoteRank ──orders, reports──   rank 1: CrewMember ──> RankReader
                       └──> ...

Rank 0 keeps the protocol with other engines. A block has the same id on every rank; each rank reads its own heads of
it. A peer is connected, a read is done, when it is so on every rank; it is broken, failed, when it is so on any; a read
is released, and its blocks can be used again, when nothing can write on any rank.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

from baton.engine.core.layout import UnevenHeads

from ..errors import MalformedMessage, RankLost, TransportError
from ..net.channel import Channel, RankSocket
from ..protocol.messages import MAX_METADATA_BYTES
from ..transports import PeerHandle, PeerState, ReadHandle, ReadState
from .crew_messages import CheckHandle, CheckReport, Join, decode_report
from .rank_reader import RankMemory, RankReader, group_metadata, worst
from .remote_rank import RemoteRank

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 50.0

Rank = RankReader | RemoteRank


class Crew:
    """Reads blocks on all ranks of a group. One thread uses it; calls return at once.

    `others`, ranks 1, 2, ..., are reached over `channel`. Where there are none, no call raises `RankLost`; where there
    are, any may, and the group is at its end. `metadata` are what a peer's `add_peer` needs to read our blocks.

    Raises `TransportError` where these are more than a greeting takes.
    """

    def __init__(self, own: RankReader, others: Sequence[RemoteRank] = (), channel: Channel | None = None) -> None:
        self.metadata = _told_in_a_greeting([own.memory, *(rank.memory for rank in others)])
        self.layout = own.region.layout
        self.device = own.region.device
        self.num_blocks = own.region.num_blocks
        self.block_bytes = own.region.block_bytes  # of each rank
        self.transport_name = own.transport_name
        self._own = own
        self._others = others
        self._channel = channel
        self._ranks: tuple[Rank, ...] = (own, *others)
        self._handles = itertools.count(1)
        self._releasing: dict[ReadHandle, list[Rank]] = {}  # ranks on which it may still write
        self._own_reports: dict[CheckHandle, CheckReport] = {}

    @property
    def num_bytes(self) -> int:
        """Read by all ranks since the start."""
        return sum(rank.num_bytes for rank in self._ranks)

    @property
    def num_descriptors(self) -> int:
        return sum(rank.num_descriptors for rank in self._ranks)

    def add_peer(self, metadata: bytes) -> PeerHandle:
        """Begins to connect to another group.

        Raises `MalformedMessage` or `TransportError` for metadata that make no sense.
        """
        peer = next(self._handles)
        for rank in self._ranks:  # our own comes first: what it refuses, no other gets to see
            rank.add_peer(peer, metadata)
        return peer

    def peer_state(self, peer: PeerHandle) -> PeerState:
        return worst(rank.peer_state(peer) for rank in self._ranks)

    def remove_peer(self, peer: PeerHandle) -> None:
        """Forgets a peer of which no read is left."""
        for rank in self._ranks:
            rank.remove_peer(peer)

    def read(self, peer: PeerHandle, source_blocks: Sequence[int], blocks: Sequence[int]) -> ReadHandle:
        """Begins to read the peer's `source_blocks` into our `blocks`, of the same number."""
        read = next(self._handles)
        for rank in reversed(self._ranks):  # the others have a way to go, and our own may copy before it returns
            rank.read(read, peer, source_blocks, blocks)
        return read

    def poll(self, read: ReadHandle) -> ReadState:
        return worst(rank.poll(read) for rank in self._ranks)

    def reason(self, read: ReadHandle) -> str:
        """Why it is FAILED."""
        return next(rank.reason(read) for rank in self._ranks if rank.poll(read) is ReadState.FAILED)

    def release(self, read: ReadHandle) -> bool:
        """For a read that is DONE or FAILED. True: forgotten, and nothing can write on any rank any more."""
        left = [rank for rank in self._releasing.get(read, self._ranks) if not rank.release(read)]
        if left:
            self._releasing[read] = left
            return False
        self._releasing.pop(read, None)
        return True

    def digest(self, blocks: Sequence[int]) -> CheckHandle:
        """Begins to digest blocks of ours; `checked` tells the result."""
        check = next(self._handles)
        for rank in self._others:
            rank.digest(check, blocks)
        self._own_reports[check] = CheckReport(check, digests=self._own.digests(blocks))
        return check

    def compare(self, peer: PeerHandle, blocks: Sequence[int], by_rank: Sequence[bytes]) -> CheckHandle:
        """Begins to compare blocks of ours with digests of the peer's ranks; `checked` tells the result."""
        check = next(self._handles)
        for rank in self._others:
            rank.compare(check, peer, blocks, by_rank)
        self._own_reports[check] = CheckReport(check, objection=self._own.objection(peer, blocks, by_rank))
        return check

    def checked(self, check: CheckHandle) -> list[CheckReport] | None:
        """What each rank found, once: the handle is forgotten then. None: some have not answered yet."""
        reports = [report for rank in self._others if (report := rank.report_of(check)) is not None]
        if len(reports) < len(self._others):
            return None
        for rank in self._others:
            rank.forget(check)
        return [self._own_reports.pop(check), *reports]

    def progress(self) -> None:
        """Serves peers that read our blocks over lanes that need our CPU, on every rank."""
        for rank in self._ranks:
            rank.progress()

    def pump(self) -> None:
        """Takes in what the other ranks have reported."""
        if self._channel is None:
            return
        by_route = {rank.route: rank for rank in self._others}
        for route, data in self._channel.receive():
            rank = by_route.get(route)
            if rank is None:
                logger.warning("dropped: %d bytes of someone who is not of this group", len(data))
                continue
            try:
                rank.on_report(decode_report(data))
            except MalformedMessage as error:
                raise RankLost(f"rank {rank.rank} sends nonsense: {error}") from error
        for rank in self._others:
            rank.watch()

    def close(self) -> None:
        self._own.close()


def gather(
    own: RankReader,
    size: int,
    channel: Channel,
    *,
    clock: Callable[[], float],
    wait: Callable[[float], None],
    timeout_s: float = JOIN_TIMEOUT_S,
) -> Crew:
    """The crew of a group of `size` ranks, once all of them have joined. `wait(seconds)` may return early.

    Raises `TransportError` for ranks that do not come in time or do not fit.
    """
    found: dict[int, RemoteRank] = {}
    deadline = clock() + timeout_s
    while missing := [rank for rank in range(1, size) if rank not in found]:
        if clock() >= deadline:
            raise TransportError(f"of {size} ranks these did not join within {timeout_s:g} s: {missing}")
        wait(deadline - clock())
        for route, data in channel.receive():
            join = _join_in(data)
            if join is not None:
                _check(join, own, size, found)
                found[join.rank] = RemoteRank(join.rank, join.memory, route, channel, clock)
    _check_heads(own.rank, own.region.heads, own, size)
    return Crew(own, [found[rank] for rank in sorted(found)], channel)


def _told_in_a_greeting(ranks: Sequence[RankMemory]) -> bytes:
    metadata = group_metadata(ranks)
    if len(metadata) > MAX_METADATA_BYTES:
        raise TransportError(
            f"to reach the memory of {len(ranks)} ranks peers need {len(metadata)} bytes, and a greeting takes"
            f" {MAX_METADATA_BYTES}: name fewer network devices (UCX_NET_DEVICES), or give fewer ranks"
        )
    return metadata


def _join_in(data: bytes) -> Join | None:
    """None: whoever sent this is not of the group, or leaves it already and will be missed."""
    try:
        report = decode_report(data)
    except MalformedMessage as error:
        logger.warning("dropped: %s", error)
        return None
    return report if isinstance(report, Join) else None


def _check(join: Join, own: RankReader, size: int, found: dict[int, RemoteRank]) -> None:
    """Raises `TransportError` where a rank does not fit to rank 0."""
    if join.rank >= size or join.rank in found:
        raise TransportError(f"rank {join.rank} joined a group of {size} ranks that has no place for it")
    if join.buffered != own.buffered:
        ways = {False: "its blocks themselves", True: "the host's memory, as its blocks cannot be registered"}
        raise TransportError(
            f"rank {join.rank} hands over by way of {ways[join.buffered]}, rank 0 by way of {ways[own.buffered]}:"
            " set transfer.buffer to 'host', or to 'device' and make all memory registrable"
        )
    ours = (own.region.layout.fingerprint, own.region.num_blocks, own.transport_name)
    theirs = (join.fingerprint, join.num_blocks, join.transport)
    if ours != theirs:
        raise TransportError(
            f"rank {join.rank} keeps other blocks (layout, number, transport) {theirs} than rank 0 {ours}"
        )
    _check_heads(join.rank, join.memory.heads, own, size)


def _check_heads(rank: int, heads: range, own: RankReader, size: int) -> None:
    try:
        expected = own.region.layout.heads_of(rank, size)
    except UnevenHeads as error:
        raise TransportError(str(error)) from error
    if heads != expected:
        raise TransportError(f"rank {rank} of {size} keeps {heads} of the KV heads, and should keep {expected}")


class CrewSocket(RankSocket):
    """Where the other ranks of a group join rank 0's transfers. `TransferConnector` closes it once it has started."""

    def gather(self, own: RankReader, clock: Callable[[], float]) -> Crew:
        """Raises `TransportError`; see `gather`."""
        return gather(own, self.size, self.channel, clock=clock, wait=self.channel.wait)
