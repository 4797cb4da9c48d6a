"""Reads on ranks 1, 2, ... of a group: a handler that carries out rank 0's read orders with a `RankReader`.

    rank 0's TpReadGroup ──orders──> MemberThread: socket ── ReadHandler ── RankReader ── transport
                         <──reports──

The thread sleeps while there are no orders, reads or readers.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator

import msgspec

from baton.engine.core.regions import CacheRegion

from ..channel import Channel, Route
from ..codec import MAX_REASON_CHARS
from ..errors import TransferError
from ..pacing import POLL_IDLE_S, pause_s
from ..settings import TransferSettings
from ..transports import Lane, PeerHandle, PeerState, ReadHandle, ReadState
from ..transports.opening import START_TIMEOUT_S, open_transport
from .rank_reader import RankReader
from .read_messages import (
    READS,
    AddPeer,
    Alive,
    CheckReport,
    CompareBlocks,
    MakeDigests,
    MakeProgress,
    Order,
    PeerReport,
    ReadDetails,
    ReadReport,
    RemovePeer,
    StartRead,
)
from .rpc import GroupMember, GroupRank, MemberThread


class ReadHandler:
    """Carries out rank 0's read orders with `reader`, in the time that `clock` returns."""

    def __init__(self, reader: RankReader, clock: Callable[[], float]) -> None:
        self._reader = reader
        self._clock = clock
        self._peers: dict[PeerHandle, tuple[PeerState, Lane | None]] = {}  # as last reported
        self._running: set[ReadHandle] = set()
        self._releasing: dict[ReadHandle, tuple[ReadState, str]] = {}
        self._read_started_at = 0.0  # the newest read
        self._peer_added_at = 0.0  # the newest peer
        self._serve_until = 0.0

    def details(self) -> ReadDetails:
        reader = self._reader
        return ReadDetails(reader.region.num_blocks, reader.transport_name, reader.memory, reader.staged)

    def handle(self, order: Order) -> Iterator[msgspec.Struct]:
        match order:
            case AddPeer():
                yield from self._add_peer(order)
            case RemovePeer():
                if self._peers.pop(order.peer, None) is not None:
                    self._reader.remove_peer(order.peer)
            case StartRead():
                self._reader.read(order.read, order.peer, order.source_blocks, order.blocks)
                self._running.add(order.read)
                self._read_started_at = self._clock()
            case MakeDigests():
                yield CheckReport(order.check, digests=self._reader.digests(order.blocks))
            case CompareBlocks():
                difference = self._reader.difference(order.peer, order.blocks, order.by_rank)
                yield CheckReport(order.check, difference=difference)
            case MakeProgress():
                self._serve_until = self._clock() + order.seconds
                yield Alive()

    def advance(self) -> tuple[list[msgspec.Struct], float]:
        ended = self._settle_reads()
        changed = self._changed_peers()
        now = self._clock()
        serving = now < self._serve_until
        if serving:
            self._reader.progress()
        pause = pause_s(
            now,
            self._read_started_at if self._running or self._releasing else None,
            None,
            device=self._reader.region.device,
            warming_since=self._peer_added_at if self._any_connecting else None,
            serving=serving,
        )
        # Report peers before reads, because rank 0 looks at the state of the peer when a read has failed.
        return [*changed, *ended], POLL_IDLE_S if pause is None else pause

    def close(self) -> None:
        self._reader.close()

    def _add_peer(self, order: AddPeer) -> Iterator[PeerReport]:
        try:
            self._reader.add_peer(order.peer, order.metadata)
        except TransferError as error:
            yield PeerReport(order.peer, PeerState.BROKEN, str(error)[:MAX_REASON_CHARS])
        else:
            self._peers[order.peer] = PeerState.CONNECTING, None
            self._peer_added_at = self._clock()

    def _changed_peers(self) -> list[PeerReport]:
        reader, changed = self._reader, []
        for peer, before in self._peers.items():
            state = reader.peer_state(peer)
            now = state, reader.lane(peer) if state is PeerState.CONNECTED else None
            if now != before:
                self._peers[peer] = now
                changed.append(PeerReport(peer, state, lane=now[1]))
        return changed

    @property
    def _any_connecting(self) -> bool:
        return any(state is PeerState.CONNECTING for state, _ in self._peers.values())

    def _settle_reads(self) -> list[ReadReport]:
        reports: list[ReadReport] = []
        for read in [read for read in self._releasing if self._reader.release(read)]:
            reports.append(self._report(read, *self._releasing.pop(read), released=True))
        for read in list(self._running):
            state = self._reader.poll(read)
            if state is ReadState.RUNNING:
                continue
            self._running.remove(read)
            reason = self._reader.reason(read)[:MAX_REASON_CHARS]
            released = self._reader.release(read)
            reports.append(self._report(read, state, reason, released=released))
            if not released:
                self._releasing[read] = state, reason
        return reports

    def _report(self, read: ReadHandle, state: ReadState, reason: str, *, released: bool) -> ReadReport:
        reader = self._reader
        counts = reader.num_bytes, reader.num_descriptors, reader.num_fallbacks
        return ReadReport(read, state, reason, released, *counts)


def read_member(reader: RankReader, channel: Channel, leader: Route, clock: Callable[[], float]) -> GroupMember:
    """Join rank 0's reads over the connection `leader`."""
    fingerprint = reader.region.fingerprint
    return GroupMember(
        ReadHandler(reader, clock), READS, rank=reader.rank, fingerprint=fingerprint, channel=channel, leader=leader
    )


def join_tp_read_group(
    region: CacheRegion,
    me: GroupRank,
    *,
    leader: str,
    engine_id: str,
    settings: TransferSettings | None = None,
    staged: bool = False,
) -> MemberThread:
    """Start a thread that joins the reads of rank 0's `TransferConnector`, which waits for all ranks.

    `leader` is the address of rank 0's socket. `staged`: the region holds staging slots. Close rank 0's connector
    before this thread, since it waits for reads that still run. Raises `TransportError` if the region cannot be
    registered.
    """
    settings = settings or TransferSettings()
    # All agents that a peer knows must have different names.
    agent_name = f"{engine_id}:{me.rank}:{secrets.token_hex(8)}"

    def begin(channel: Channel, route: Route) -> GroupMember:
        reader = RankReader(me.rank, region, open_transport(settings, region, agent_name), staged=staged)
        return read_member(reader, channel, route, time.monotonic)

    return MemberThread(begin, me, leader=leader, name="baton-transfer").open(START_TIMEOUT_S)
