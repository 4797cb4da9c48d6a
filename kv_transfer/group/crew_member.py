"""The half of a group's transfers that runs on every rank but 0: reads when it is told to.

    rank 0's Crew ──orders──> CrewMember's thread: socket, transport, RankReader
                 <──reports──

Without orders, reads and readers it sleeps.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable

from baton.engine.core.layout import KVRegion
from baton.engine.net.curve import ClusterKey

from ..codec import MAX_REASON_CHARS
from ..errors import RankLost, TransferError
from ..net.channel import Channel, Route, join_ranks
from ..pacing import POLL_IDLE_S, pause_s
from ..settings import TransferSettings
from ..threads import ChannelThread
from ..transports import PeerHandle, PeerState, ReadHandle, ReadState
from ..transports.opening import START_TIMEOUT_S, open_transport
from .crew_messages import (
    AddPeer,
    Attend,
    CheckReport,
    Compare,
    Farewell,
    Join,
    MakeDigests,
    Order,
    PeerReport,
    Present,
    ReadReport,
    RemovePeer,
    Report,
    StartRead,
    decode_order,
    encode,
)
from .rank_reader import RankReader

logger = logging.getLogger(__name__)


class Follower:
    """Carries out rank 0's orders with `reader`. No thread, no sleeping, no clock of its own.

    `pump` raises what a transport does not survive, and `RankLost`; the connection to rank 0 is `leader`.
    """

    def __init__(self, reader: RankReader, channel: Channel, leader: Route, clock: Callable[[], float]) -> None:
        self._reader = reader
        self._channel = channel
        self._leader = leader
        self._clock = clock
        self._peers: dict[PeerHandle, PeerState] = {}  # as last reported
        self._running: set[ReadHandle] = set()
        self._releasing: dict[ReadHandle, tuple[ReadState, str]] = {}
        self._read_started_at = 0.0  # the youngest one
        self._peer_added_at = 0.0  # the youngest one
        self._serve_until = 0.0
        region = reader.region
        self._tell(
            Join(
                reader.rank,
                region.layout.fingerprint,
                region.num_blocks,
                reader.transport_name,
                reader.memory,
                reader.buffered,
            )
        )

    def pump(self) -> float:
        """One round of everything. Returns after how many seconds to call again, unless an order comes."""
        for _, data in self._channel.receive():
            self._obey(decode_order(data))
        ended = self._settle_reads()
        for peer in self._peers:
            self._report_peer(peer)  # before the reads: whoever hears that one failed looks at its peer
        for report in ended:
            self._tell(report)
        now = self._clock()
        serving = now < self._serve_until
        if serving:
            self._reader.progress()
        pause = pause_s(
            now,
            self._read_started_at if self._running or self._releasing else None,
            None,
            device=self._reader.region.device,
            warming_since=self._peer_added_at if PeerState.CONNECTING in self._peers.values() else None,
            serving=serving,
        )
        return POLL_IDLE_S if pause is None else pause

    def bid_farewell(self, reason: str) -> None:
        self._channel.send(self._leader, encode(Farewell(reason[:MAX_REASON_CHARS])))  # if it still listens

    def _obey(self, order: Order) -> None:
        match order:
            case AddPeer():
                self._add_peer(order)
            case RemovePeer():
                if self._peers.pop(order.peer, None) is not None:
                    self._reader.remove_peer(order.peer)
            case StartRead():
                self._reader.read(order.read, order.peer, order.source_blocks, order.blocks)
                self._running.add(order.read)
                self._read_started_at = self._clock()
            case MakeDigests():
                self._tell(CheckReport(order.check, digests=self._reader.digests(order.blocks)))
            case Compare():
                objection = self._reader.objection(order.peer, order.blocks, order.by_rank)
                self._tell(CheckReport(order.check, objection=objection))
            case Attend():
                self._serve_until = self._clock() + order.seconds
                self._tell(Present())

    def _add_peer(self, order: AddPeer) -> None:
        try:
            self._reader.add_peer(order.peer, order.metadata)
        except TransferError as error:
            self._tell(PeerReport(order.peer, PeerState.BROKEN, str(error)[:MAX_REASON_CHARS]))
        else:
            self._peers[order.peer] = PeerState.CONNECTING
            self._peer_added_at = self._clock()

    def _report_peer(self, peer: PeerHandle) -> None:
        state = self._reader.peer_state(peer)
        if state is not self._peers[peer]:
            self._peers[peer] = state
            self._tell(PeerReport(peer, state))

    def _settle_reads(self) -> list[Report]:
        reports: list[Report] = []
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
        return ReadReport(read, state, reason, released, self._reader.num_bytes, self._reader.num_descriptors)

    def _tell(self, report: Report) -> None:
        """A broken connection is for rank 0 to notice. Where reports pile up, one that was lost would be waited for."""
        if not self._channel.send(self._leader, encode(report)):
            raise RankLost("rank 0 takes no reports any more")


class CrewMember:
    """One rank's part in its group's transfers, in a thread of its own. Ranks 1, 2, ... have one each.

    `leader` is the address of rank 0's `CrewSocket`, which waits for all ranks before it is ready itself. What this one
    cannot survive, rank 0 is told. Raises `TransportError` if the region cannot be registered.
    """

    def __init__(
        self,
        region: KVRegion,
        *,
        rank: int,
        leader: str,
        engine_id: str,
        key: ClusterKey | None,
        settings: TransferSettings | None = None,
        buffered: bool = False,
    ) -> None:
        """`buffered`: the region is a host buffer's."""
        self._buffered = buffered
        self._region = region
        self._rank = rank
        self._name = f"{engine_id}:{rank}:{secrets.token_hex(8)}"  # no two agents that one peer knows share a name
        self._settings = settings or TransferSettings()
        self._channel, self._leader = join_ranks(leader, key)
        self._thread = ChannelThread("baton-transfer", self._channel, self._run)
        self._thread.open(START_TIMEOUT_S)

    def close(self) -> None:
        """Deregisters the memory. Rank 0's connector is to be closed first: it waits for reads that still run.

        Otherwise rank 0 finds out when it needs this rank next.
        """
        self._thread.close()

    # ------------------------------------------------------------------ in the transfer thread

    def _run(self, ready: Callable[[], None]) -> None:
        transport = open_transport(self._settings, self._region, self._name)
        reader = RankReader(self._rank, self._region, transport, buffered=self._buffered)
        follower = Follower(reader, self._channel, self._leader, time.monotonic)
        ready()
        try:
            while not self._thread.is_closing:
                self._channel.wait(follower.pump())
        except Exception as error:
            logger.exception("the transfer thread of %s died", self._name)
            follower.bid_farewell(f"{type(error).__name__}: {error}")
        reader.close()
