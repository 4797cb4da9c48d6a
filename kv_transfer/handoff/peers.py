"""Engines whose memory we may read. They are connected and warmed up when they appear, not at their first request.

connect ──> HANDSHAKE ──accepted──> WARMING ──memory answers──> READY
              ^   │                    │                          │
              │   └─refused─> REFUSED  │ or `PAIRING_S` have gone │
              └───── the transport or the connection broke ───────┘

Some lanes need the CPU of the engine that is read, and that engine knows only readers to which it has granted an offer.
So we repeat handshakes for reads without a grant: until a peer is READY, and while a cancelled read of it still runs.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Callable, Collection, Container

from ..channel import Channel, Route
from ..errors import TransferError, TransportError
from ..group.tp_read_group import TpReadGroup
from ..protocol.messages import EngineKey, HandshakeAccepted, HandshakeRefused, encode
from ..protocol.stats import PeerLane
from ..settings import PeerInfo
from ..transports import Lane, PeerHandle, PeerState
from .handshake import SERVE_AFTER_HANDSHAKE_S, PairingTerms
from .reads import BlockReads, ReadPace

logger = logging.getLogger(__name__)

MAX_HANDSHAKE_PAUSE_S = 10.0
REPEAT_FOR_READS_S = SERVE_AFTER_HANDSHAKE_S / 2
# A peer whose memory has not answered by then is paired anew. UCX, which gives up a lost TCP connection after 10 s, has
# reported that before, and the reads that measure a lane, 12 MB, have ended even at 5 Mbit/s.
PAIRING_S = 30.0


class PeerStatus(enum.Enum):
    HANDSHAKE = enum.auto()
    WARMING = enum.auto()
    READY = enum.auto()
    REFUSED = enum.auto()


_UNREADY = (PeerStatus.HANDSHAKE, PeerStatus.WARMING)


@dataclasses.dataclass(slots=True)
class Peer:
    key: EngineKey
    address: str
    route: Route
    listed: bool  # True: the directory lists it; False: only a ticket has named it
    handshake_at: float
    handshake_pause_s: float
    status: PeerStatus = PeerStatus.HANDSHAKE
    memory: PeerHandle | None = None
    warming_since: float = 0.0
    refusal: str = ""
    is_cut_off: bool = False  # its connection broke, and no handshake has succeeded since
    is_overdue: bool = False  # it was not connected within `PAIRING_S`, and has not been since

    @property
    def why_unread(self) -> str:
        """Return why nothing can be read from it now, so that waiting for it is no use, or an empty string."""
        name = self.key.engine_id
        if self.status is PeerStatus.REFUSED:
            return f"{name} refuses to pair: {self.refusal}"
        if self.is_cut_off:
            return f"{name} at {self.address} is cut off"
        return f"the memory of {name} at {self.address} does not answer" if self.is_overdue else ""


class Peers:
    """The peers of one engine. Times are seconds on the caller's clock."""

    def __init__(self, terms: PairingTerms, channel: Channel, group: TpReadGroup, retry_s: float) -> None:
        self._terms = terms
        self._channel = channel
        self._group = group
        self._retry_s = retry_s
        self._peers: dict[EngineKey, Peer] = {}
        self._retired: dict[PeerHandle, EngineKey] = {}  # lost memories that reads still use
        self._unpaired: set[EngineKey] = set()  # live engines with another layout, which were logged

    def get(self, key: EngineKey) -> Peer | None:
        return self._peers.get(key)

    @property
    def num_ready(self) -> int:
        return sum(peer.status is PeerStatus.READY for peer in self._peers.values())

    def lanes(self, reads: BlockReads) -> list[PeerLane]:
        """Return the lanes of ready peers, with their measured read times from `reads`."""
        ready = {
            peer.memory: peer.key.engine_id
            for peer in self._peers.values()
            if peer.status is PeerStatus.READY and peer.memory is not None
        }
        reads.forget_paces(ready)
        lanes = ((name, memory, self._group.lane(memory)) for memory, name in ready.items())
        return [self._lane(name, lane, reads.pace(memory)) for name, memory, lane in lanes if lane is not None]

    def _lane(self, name: str, lane: Lane, pace: ReadPace) -> PeerLane:
        line, rate = pace.line(), lane.bytes_per_s
        if line is not None and line.unit_s and pace.num_reads:
            rate = self._group.block_bytes / line.unit_s
        return PeerLane(
            engine_id=name,
            transport=lane.transport,
            bytes_per_s=rate,
            is_slow=lane.is_slow,
            is_staged=lane.is_staged,
            num_reads=pace.num_reads,
            read_s=line,
        )

    @property
    def warming_since(self) -> float | None:
        """When the newest warm-up of a peer began. None: no peer is warming up."""
        warming = (peer.warming_since for peer in self._peers.values() if peer.status is PeerStatus.WARMING)
        return max(warming, default=None)

    @property
    def next_handshake(self) -> float | None:
        """The time of the next handshake. Those repeated for reads are left out: reads are polled more often anyway."""
        return min((peer.handshake_at for peer in self._peers.values() if peer.status in _UNREADY), default=None)

    def departed(self, live: Collection[PeerInfo]) -> list[EngineKey]:
        """Return the engines that the directory has listed and that have left."""
        paired = {info.key for info in live if self._pairs(info)}
        return [peer.key for peer in self._peers.values() if peer.listed and peer.key not in paired]

    def update(self, live: Collection[PeerInfo], now: float) -> None:
        """Connect to new engines, and forget those that left."""
        for key in self.departed(live):
            self._forget(key)
        self._unpaired &= {info.key for info in live}
        paired = {info.key: info for info in live if self._pairs(info)}
        for info in paired.values():
            try:
                self.connect(info.key, info.kv_address, now).listed = True
            except TransportError as error:
                logger.warning("not paired with %s: %s", info.engine_id, error)

    def connect(self, key: EngineKey, address: str, now: float) -> Peer:
        """Return the peer, connecting to it if it is new. Raises `TransportError` for an invalid address."""
        peer = self._peers.get(key)
        if peer is None:
            route = self._channel.connect(address)
            peer = Peer(key, address, route, listed=False, handshake_at=now, handshake_pause_s=self._retry_s)
            self._peers[key] = peer
        return peer

    def forget_idle(self, waited_for: Callable[[EngineKey], bool], reads: Callable[[PeerHandle], bool]) -> None:
        """Forget peers that only a ticket named, once no receive and no read needs them."""
        for peer in [peer for peer in self._peers.values() if not peer.listed]:
            is_read = peer.key in self._retired.values() or (peer.memory is not None and reads(peer.memory))
            if not is_read and not waited_for(peer.key):
                self._forget(peer.key)

    def broke(self, key: EngineKey, now: float) -> PeerHandle | None:
        """Reconnect a peer if a failed read broke its endpoint. Returns the memory that was lost, if any."""
        peer = self._peers.get(key)
        if peer is None or peer.memory is None or self._group.peer_state(peer.memory) is not PeerState.BROKEN:
            return None
        lost = peer.memory
        self._retire(peer)
        peer.status, peer.handshake_at = PeerStatus.HANDSHAKE, now
        return lost

    def connection_lost(self, route: Route, now: float) -> Peer | None:
        """Reconnect the peer whose connection broke. Returns it, or None if its memory was not connected."""
        peer = next((peer for peer in self._peers.values() if peer.route == route), None)
        if peer is None or peer.memory is None:
            return None
        self._retire(peer)
        peer.status, peer.handshake_at, peer.is_cut_off = PeerStatus.HANDSHAKE, now, True
        return peer

    def on_accepted(self, route: Route, message: HandshakeAccepted, now: float) -> bool:
        """Begin to connect to a peer's memory. Returns False if the message answers no handshake of ours."""
        peer = self._answering(route, message)
        if peer is None:
            return False
        if not self._may_be_connected(peer):  # the handshake was repeated only to make the peer serve us
            return True
        peer.is_cut_off = False
        try:
            peer.memory = self._group.add_peer(message.metadata)
        except TransferError as error:
            logger.warning("cannot reach the memory of %s: %s", peer.key.engine_id, error)
            self._schedule_handshake(peer, now)
        else:
            peer.status, peer.warming_since = PeerStatus.WARMING, now
        return True

    def on_refused(self, route: Route, message: HandshakeRefused) -> Peer | None:
        """Note that a peer refuses to pair. Returns it, or None if the message answers no handshake of ours."""
        peer = self._answering(route, message)
        if peer is None or peer.status not in _UNREADY:
            return None
        logger.warning("%s at %s refuses to pair: %s", peer.key.engine_id, peer.address, message.reason)
        self._retire(peer)
        peer.status, peer.refusal = PeerStatus.REFUSED, message.reason
        return peer

    def poll(self, now: float, reads: Callable[[PeerHandle], bool], given_up: Container[PeerHandle]) -> list[EngineKey]:
        """Advance warm-ups, forget lost memories without `reads`, send handshakes. Returns peers that became ready.

        `given_up` are the memories from which cancelled reads still run.
        """
        warming = [peer for peer in self._peers.values() if peer.status is PeerStatus.WARMING]
        ready = [peer.key for peer in warming if self._warm(peer, now)]
        for memory in [memory for memory in self._retired if not reads(memory)]:
            self._forget_memory(memory, now)
        for peer in self._peers.values():
            if now >= peer.handshake_at and (peer.status in _UNREADY or peer.memory in given_up):
                self._send_handshake(peer, now)
        return ready

    def _may_be_connected(self, peer: Peer) -> bool:
        """Return False while reads of the peer's lost memory run: the new one shares its name, and both would go."""
        return peer.status is PeerStatus.HANDSHAKE and peer.key not in self._retired.values()

    def _pairs(self, info: PeerInfo) -> bool:
        if info.key == self._terms.key:
            return False
        if info.fingerprint == self._terms.fingerprint:
            return True
        if info.key not in self._unpaired:
            self._unpaired.add(info.key)
            logger.info("not paired with %s: its KV layout is %s", info.engine_id, info.fingerprint)
        return False

    def _answering(self, route: Route, message: HandshakeAccepted | HandshakeRefused) -> Peer | None:
        peer = self._peers.get(message.sender)
        expected = peer is not None and peer.route == route and message.to == self._terms.key
        return peer if expected else None

    def _send_handshake(self, peer: Peer, now: float) -> None:
        self._channel.send(peer.route, encode(self._terms.request(peer.key)))
        self._schedule_handshake(peer, now)

    def _schedule_handshake(self, peer: Peer, now: float) -> None:
        if peer.status is not PeerStatus.HANDSHAKE or peer.key in self._retired.values():  # repeated for a read
            peer.handshake_at = now + REPEAT_FOR_READS_S
            return
        peer.handshake_at = now + peer.handshake_pause_s
        peer.handshake_pause_s = min(2 * peer.handshake_pause_s, MAX_HANDSHAKE_PAUSE_S)

    def _warm(self, peer: Peer, now: float) -> bool:
        assert peer.memory is not None
        state = self._group.peer_state(peer.memory)
        if state is PeerState.CONNECTED:
            peer.status, peer.handshake_pause_s, peer.is_overdue = PeerStatus.READY, self._retry_s, False
            logger.info("connected to %s at %s", peer.key.engine_id, peer.address)
            return True
        is_too_late = now - peer.warming_since >= PAIRING_S
        if is_too_late and state is PeerState.CONNECTING:
            logger.warning(
                "the memory of %s at %s does not answer: not connected within %g s, trying anew",
                *(peer.key.engine_id, peer.address, PAIRING_S),
            )
            peer.is_overdue = True
        if is_too_late or state is PeerState.BROKEN:
            peer.status = PeerStatus.HANDSHAKE
            self._schedule_handshake(peer, now)
            self._retire(peer)
        return False

    def _forget_memory(self, memory: PeerHandle, now: float) -> None:
        """Forget a memory. Its peer is reconnected at once, unless that has failed before."""
        peer = self._peers.get(self._retired.pop(memory))
        self._group.remove_peer(memory)
        if peer is not None and peer.status is PeerStatus.HANDSHAKE and peer.handshake_pause_s == self._retry_s:
            peer.handshake_at = min(peer.handshake_at, now)

    def _forget(self, key: EngineKey) -> None:
        peer = self._peers.pop(key)
        self._channel.disconnect(peer.route)
        self._retire(peer)

    def _retire(self, peer: Peer) -> None:
        if peer.memory is not None:
            self._retired[peer.memory] = peer.key
            peer.memory = None
