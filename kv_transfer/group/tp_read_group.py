"""One reader of blocks, made of all ranks of a tensor-parallel group.

    HandoffCoordinator ──> TpReadGroup ──┬──> RankReader                       rank 0's own
                                         ├──> RemoteRank ──orders, reports──   rank 1: ReadHandler ──> RankReader
                                         └──> ...

Rank 0 alone talks to other engines. A block has the same id on every rank, and each rank reads its own heads of it. A
peer is connected, or a read done, when it is so on every rank. A peer is broken, or a read has failed, when it is so on
any rank. A read is released, and its blocks can be used again, when no rank can write into them any more.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

import msgspec

from baton.engine.core.layout import UnevenHeads

from ..channel import Channel
from ..errors import RankLost, TransportError
from ..protocol.block_runs import BlockNumbers
from ..protocol.messages import MAX_METADATA_BYTES
from ..transports import Lane, PeerHandle, PeerState, ReadHandle, ReadState, slowest
from .rank_reader import RankMemory, RankReader, group_metadata, worst
from .read_messages import (
    READS,
    AddPeer,
    CheckHandle,
    CheckReport,
    CompareBlocks,
    MakeDigests,
    MakeProgress,
    PeerReport,
    ReadDetails,
    ReadReport,
    RemovePeer,
    Report,
    StartRead,
)
from .rpc import JOIN_TIMEOUT_S, GroupLeader

logger = logging.getLogger(__name__)
ASK_ALIVE_EVERY_S = 0.5
SERVE_FOR_S = 2 * ASK_ALIVE_EVERY_S
MAX_UNANSWERED = 20  # a rank that leaves so many `MakeProgress` in a row without any report is lost


class RemoteRank:
    """Rank 0's proxy for the `RankReader` of another rank, with the same methods.

    Orders are sent at once. States are those that the rank has reported last. Calls raise `RankLost` once the rank
    cannot be reached.
    """

    def __init__(
        self, rank: int, memory: RankMemory, send: Callable[[msgspec.Struct], None], clock: Callable[[], float]
    ) -> None:
        self.rank = rank
        self.memory = memory
        self.num_bytes = 0
        self.num_descriptors = 0
        self.num_fallbacks = 0
        self._send = send
        self._clock = clock
        self._peers: dict[PeerHandle, PeerState] = {}
        self._lanes: dict[PeerHandle, Lane | None] = {}
        self._reads: dict[ReadHandle, ReadReport] = {}
        self._checks: dict[CheckHandle, CheckReport | None] = {}
        self._ask_alive_at = 0.0
        self._unanswered = 0

    def add_peer(self, peer: PeerHandle, metadata: bytes) -> None:
        self._peers[peer] = PeerState.CONNECTING
        self._send(AddPeer(peer, metadata))

    def peer_state(self, peer: PeerHandle) -> PeerState:
        return self._peers[peer]

    def lane(self, peer: PeerHandle) -> Lane | None:
        return self._lanes.get(peer)

    def remove_peer(self, peer: PeerHandle) -> None:
        del self._peers[peer]
        self._lanes.pop(peer, None)
        self._send(RemovePeer(peer))

    def read(self, read: ReadHandle, peer: PeerHandle, source_blocks: BlockNumbers, blocks: BlockNumbers) -> None:
        self._reads[read] = ReadReport(read, ReadState.RUNNING, "", False, 0, 0)
        self._send(StartRead(read, peer, source_blocks.tolist(), blocks.tolist()))

    def poll(self, read: ReadHandle) -> ReadState:
        return self._reads[read].state

    def reason(self, read: ReadHandle) -> str:
        return f"rank {self.rank}: {self._reads[read].reason}"

    def release(self, read: ReadHandle) -> bool:
        if not self._reads[read].released:
            return False
        del self._reads[read]
        return True

    def digest(self, check: CheckHandle, blocks: Sequence[int]) -> None:
        self._checks[check] = None
        self._send(MakeDigests(check, list(blocks)))

    def compare(self, check: CheckHandle, peer: PeerHandle, blocks: Sequence[int], by_rank: Sequence[bytes]) -> None:
        self._checks[check] = None
        self._send(CompareBlocks(check, peer, list(blocks), tuple(by_rank)))

    def report_of(self, check: CheckHandle) -> CheckReport | None:
        return self._checks[check]

    def forget(self, check: CheckHandle) -> None:
        del self._checks[check]

    def progress(self) -> None:
        """Ask the rank to serve its readers and to answer with `Alive`, at most twice a second."""
        if self._clock() < self._ask_alive_at:
            return
        if self._unanswered == MAX_UNANSWERED:
            raise RankLost(f"rank {self.rank} has not answered for {MAX_UNANSWERED * ASK_ALIVE_EVERY_S:g} s")
        self._unanswered += 1
        self._ask_alive_at = self._clock() + ASK_ALIVE_EVERY_S
        self._send(MakeProgress(SERVE_FOR_S))

    def watch(self) -> None:
        """Ask for a sign of life while reports are due, so that the loss of the rank raises `RankLost`."""
        if self._reads or self._checks or PeerState.CONNECTING in self._peers.values():
            self.progress()

    def on_report(self, report: Report) -> None:
        self._unanswered = 0
        match report:
            case PeerReport():
                if report.peer in self._peers:  # it may have been removed meanwhile
                    self._peers[report.peer] = report.state
                    self._lanes[report.peer] = report.lane
                if report.reason:
                    logger.warning("rank %d cannot reach a peer's memory: %s", self.rank, report.reason)
            case ReadReport():
                if report.read not in self._reads:
                    raise RankLost(f"rank {self.rank} reports a read that it was not asked for")
                self._reads[report.read] = report
                self.num_bytes, self.num_descriptors = report.num_bytes, report.num_descriptors
                self.num_fallbacks = report.num_fallbacks
            case CheckReport():
                if report.check not in self._checks:
                    raise RankLost(f"rank {self.rank} reports digests that it was not asked for")
                self._checks[report.check] = report


Rank = RankReader | RemoteRank


class TpReadGroup:
    """Reads blocks on all ranks of a group. One thread uses it, and calls return at once.

    `leader` connects to `others`, the ranks 1, 2, .... If there are others, every call may raise `RankLost`, and the
    group must end then. A peer's `add_peer` needs `metadata` to read our blocks.

    Raises `TransportError` if the metadata do not fit into a handshake.
    """

    def __init__(self, own: RankReader, others: Sequence[RemoteRank] = (), leader: GroupLeader | None = None) -> None:
        self.metadata = _checked_metadata([own.memory, *(rank.memory for rank in others)])
        self.region = own.region
        self.device = own.region.device
        self.block_bytes = own.region.block_bytes  # one rank's share of a block, in the first cache group
        self.transport_name = own.transport_name
        self._own = own
        self._others = others
        self._leader = leader
        self._ranks: tuple[Rank, ...] = (own, *others)
        self._handles = itertools.count(1)
        self._releasing: dict[ReadHandle, list[Rank]] = {}  # ranks that may still write
        self._own_reports: dict[CheckHandle, CheckReport] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes read by all ranks since the start."""
        return sum(rank.num_bytes for rank in self._ranks)

    @property
    def num_descriptors(self) -> int:
        return sum(rank.num_descriptors for rank in self._ranks)

    def add_peer(self, metadata: bytes) -> PeerHandle:
        """Begin to connect to another group.

        Raises `MalformedMessage` or `TransportError` for invalid metadata.
        """
        peer = next(self._handles)
        for rank in self._ranks:  # rank 0 comes first, so that the others never see metadata that it refuses
            rank.add_peer(peer, metadata)
        return peer

    def peer_state(self, peer: PeerHandle) -> PeerState:
        return worst(rank.peer_state(peer) for rank in self._ranks)

    def lane(self, peer: PeerHandle) -> Lane | None:
        """Return the slowest lane over which a rank reads the peer. None: no rank is connected."""
        return slowest(rank.lane(peer) for rank in self._ranks)

    @property
    def num_fallbacks(self) -> int:
        """Number of reads that failed over one transport and began again over another, on all ranks."""
        return sum(rank.num_fallbacks for rank in self._ranks)

    def remove_peer(self, peer: PeerHandle) -> None:
        """Forget a peer. No read of it may be left."""
        for rank in self._ranks:
            rank.remove_peer(peer)

    def read(self, peer: PeerHandle, source_blocks: BlockNumbers, blocks: BlockNumbers) -> ReadHandle:
        """Begin to read the peer's `source_blocks` into as many `blocks` of ours."""
        read = next(self._handles)
        for rank in reversed(self._ranks):  # send the orders first: our own read may copy before it returns
            rank.read(read, peer, source_blocks, blocks)
        return read

    def poll(self, read: ReadHandle) -> ReadState:
        return worst(rank.poll(read) for rank in self._ranks)

    def reason(self, read: ReadHandle) -> str:
        """Return why a FAILED read failed."""
        return next(rank.reason(read) for rank in self._ranks if rank.poll(read) is ReadState.FAILED)

    def release(self, read: ReadHandle) -> bool:
        """Forget a read that is DONE or FAILED. Returns False while it may still write on any rank."""
        left = [rank for rank in self._releasing.get(read, self._ranks) if not rank.release(read)]
        if left:
            self._releasing[read] = left
            return False
        self._releasing.pop(read, None)
        return True

    def digest(self, blocks: Sequence[int]) -> CheckHandle:
        """Begin to digest blocks of ours; `checked` returns the result."""
        check = next(self._handles)
        for rank in self._others:
            rank.digest(check, blocks)
        self._own_reports[check] = CheckReport(check, digests=self._own.digests(blocks))
        return check

    def compare(self, peer: PeerHandle, blocks: Sequence[int], by_rank: Sequence[bytes]) -> CheckHandle:
        """Begin to compare blocks of ours with digests of the peer's ranks; `checked` returns the result."""
        check = next(self._handles)
        for rank in self._others:
            rank.compare(check, peer, blocks, by_rank)
        self._own_reports[check] = CheckReport(check, difference=self._own.difference(peer, blocks, by_rank))
        return check

    def checked(self, check: CheckHandle) -> list[CheckReport] | None:
        """Return each rank's result, and forget the handle. None: some ranks have not answered yet."""
        reports = [report for rank in self._others if (report := rank.report_of(check)) is not None]
        if len(reports) < len(self._others):
            return None
        for rank in self._others:
            rank.forget(check)
        return [self._own_reports.pop(check), *reports]

    def progress(self) -> None:
        """Serve, on every rank, peers that read our blocks over lanes that need our CPU."""
        for rank in self._ranks:
            rank.progress()

    def pump(self) -> None:
        """Process the reports of the other ranks."""
        if self._leader is None:
            return
        by_rank = {rank.rank: rank for rank in self._others}
        for rank, report in self._leader.receive():
            by_rank[rank].on_report(report)
        for other in self._others:
            other.watch()

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
) -> TpReadGroup:
    """Return the group of `size` ranks once all of them have joined over `channel`. `wait(seconds)` may return early.

    Raises `TransportError` if a rank does not join in time or does not fit.
    """
    leader = GroupLeader(channel, size, own.region.fingerprint, READS, clock=clock)
    leader.gather(wait, timeout_s)
    for rank in leader.ranks:
        _check(rank, leader.details[rank], own, size)
    _check_heads(own.rank, own.region.arenas[0].heads, own, size)
    return TpReadGroup(own, [_remote_rank(leader, rank, clock) for rank in leader.ranks], leader)


def _remote_rank(leader: GroupLeader, rank: int, clock: Callable[[], float]) -> RemoteRank:
    return RemoteRank(rank, leader.details[rank].memory, lambda order: leader.send(rank, order), clock)


def _checked_metadata(ranks: Sequence[RankMemory]) -> bytes:
    metadata = group_metadata(ranks)
    if len(metadata) > MAX_METADATA_BYTES:
        raise TransportError(
            f"to reach the memory of {len(ranks)} ranks peers need {len(metadata)} bytes, and a handshake takes"
            f" {MAX_METADATA_BYTES}: name fewer network devices (UCX_NET_DEVICES), or give fewer ranks"
        )
    return metadata


def _check(rank: int, details: ReadDetails, own: RankReader, size: int) -> None:
    """Raise `TransportError` if a rank's blocks or transport do not fit rank 0's."""
    if details.staged != own.staged:
        ways = {False: "its KV cache directly", True: "a buffer in host memory, as its KV cache cannot be registered"}
        raise TransportError(
            f"rank {rank} hands over from {ways[details.staged]}, rank 0 from {ways[own.staged]}:"
            " set transfer.buffer to 'host', or to 'device' and make all memory registrable"
        )
    ours, theirs = (own.region.num_blocks, own.transport_name), (details.num_blocks, details.transport)
    if ours != theirs:
        raise TransportError(f"rank {rank} keeps other blocks than rank 0: number and transport {theirs}, not {ours}")
    _check_heads(rank, details.memory.heads, own, size)


def _check_heads(rank: int, heads: range, own: RankReader, size: int) -> None:
    try:
        expected = own.region.arenas[0].layout.heads_of(rank, size)
    except UnevenHeads as error:
        raise TransportError(str(error)) from error
    if heads != expected:
        raise TransportError(f"rank {rank} of {size} keeps {heads} of the KV heads, and should keep {expected}")
