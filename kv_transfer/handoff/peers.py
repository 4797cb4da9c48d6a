"""Engines whose memory we may read: connected and warmed when they appear, not at their first request.

connect, Hello ──> GREETING ──Welcome──> WARMING ──memory answers──> READY
                      ^  │                  │                          │
                      │  └─Unwelcome─> REFUSED                         │
                      └───── the transport or the connection broke ────┘

Some lanes need the CPU of who is read, and that knows of a reader by its grants only. So whoever reads without one is
heard again and again: a peer is greeted until it is READY, and while a read of it runs that was given up.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Callable, Collection, Container

from ..errors import TransferError, TransportError
from ..group.crew import Crew
from ..net.channel import Channel, Route
from ..protocol.messages import EngineKey, Unwelcome, Welcome, encode
from ..settings import PeerInfo
from ..transports import PeerHandle, PeerState
from .handshake import SERVE_AFTER_HELLO_S, Pairing

logger = logging.getLogger(__name__)

MAX_GREET_PAUSE_S = 10.0
HELP_EVERY_S = SERVE_AFTER_HELLO_S / 2


class PeerStatus(enum.Enum):
    GREETING = enum.auto()
    WARMING = enum.auto()
    READY = enum.auto()
    REFUSED = enum.auto()


_UNREADY = (PeerStatus.GREETING, PeerStatus.WARMING)


@dataclasses.dataclass(slots=True)
class Peer:
    key: EngineKey
    address: str
    route: Route
    listed: bool  # the directory knows it; otherwise a ticket named it first
    greet_at: float
    greet_pause_s: float
    status: PeerStatus = PeerStatus.GREETING
    memory: PeerHandle | None = None
    warming_since: float = 0.0
    refusal: str = ""
    is_cut_off: bool = False  # it was connected, its connection broke, and nothing has begun anew


class Peers:
    """All peers of one engine. Times are seconds on the caller's clock."""

    def __init__(self, me: Pairing, channel: Channel, crew: Crew, retry_s: float) -> None:
        self._me = me
        self._channel = channel
        self._crew = crew
        self._retry_s = retry_s
        self._peers: dict[EngineKey, Peer] = {}
        self._retired: dict[PeerHandle, EngineKey] = {}  # forgotten by the transport once no read of it is left
        self._unpaired: set[EngineKey] = set()  # live engines of another layout, told once

    def get(self, key: EngineKey) -> Peer | None:
        return self._peers.get(key)

    @property
    def num_ready(self) -> int:
        return sum(peer.status is PeerStatus.READY for peer in self._peers.values())

    @property
    def warming_since(self) -> float | None:
        """The youngest."""
        warming = (peer.warming_since for peer in self._peers.values() if peer.status is PeerStatus.WARMING)
        return max(warming, default=None)

    @property
    def next_greeting(self) -> float | None:
        """But for peers that are greeted for a read's sake: reads are looked at sooner."""
        return min((peer.greet_at for peer in self._peers.values() if peer.status in _UNREADY), default=None)

    def changed(self, live: Collection[PeerInfo], now: float) -> list[EngineKey]:
        """Connects to those that are new. Returns those that left; they are forgotten."""
        paired = {info.key: info for info in live if self._pairs(info)}
        self._unpaired &= {info.key for info in live}
        left = [peer.key for peer in self._peers.values() if peer.listed and peer.key not in paired]
        for key in left:
            self._forget(key)
        for info in paired.values():
            try:
                self.connect(info.key, info.kv_address, now).listed = True
            except TransportError as error:
                logger.warning("not paired with %s: %s", info.engine_id, error)
        return left

    def connect(self, key: EngineKey, address: str, now: float) -> Peer:
        """The peer, known or new. Raises `TransportError` for an address that is none."""
        peer = self._peers.get(key)
        if peer is None:
            route = self._channel.connect(address)
            peer = Peer(key, address, route, listed=False, greet_at=now, greet_pause_s=self._retry_s)
            self._peers[key] = peer
        return peer

    def forget_idle(self, waited_for: Callable[[EngineKey], bool], reads: Callable[[PeerHandle], bool]) -> None:
        """Drops peers that only a ticket named, once no receive and no read needs them."""
        for peer in [peer for peer in self._peers.values() if not peer.listed]:
            is_read = peer.key in self._retired.values() or (peer.memory is not None and reads(peer.memory))
            if not is_read and not waited_for(peer.key):
                self._forget(peer.key)

    def broke(self, key: EngineKey, now: float) -> PeerHandle | None:
        """A read of it failed. If the endpoint did, it does not recover: begin anew. The memory that was lost so."""
        peer = self._peers.get(key)
        if peer is None or peer.memory is None or self._crew.peer_state(peer.memory) is not PeerState.BROKEN:
            return None
        lost = peer.memory
        self._retire(peer)
        peer.status, peer.greet_at = PeerStatus.GREETING, now
        return lost

    def cut_off(self, route: Route, now: float) -> Peer | None:
        """The peer over whose connection nothing can be had until it answers a greeting; None where that is no news."""
        peer = next((peer for peer in self._peers.values() if peer.route == route), None)
        if peer is None or peer.memory is None:
            return None
        self._retire(peer)
        peer.status, peer.greet_at, peer.is_cut_off = PeerStatus.GREETING, now, True
        return peer

    def on_welcome(self, route: Route, message: Welcome, now: float) -> bool:
        """False: not the answer to a greeting of ours."""
        peer = self._answering(route, message)
        if peer is None:
            return False
        if not self._may_be_connected(peer):  # it was to serve us
            return True
        peer.is_cut_off = False
        try:
            peer.memory = self._crew.add_peer(message.metadata)
        except TransferError as error:
            logger.warning("cannot reach the memory of %s: %s", peer.key.engine_id, error)
            self._again_later(peer, now)
        else:
            peer.status, peer.warming_since = PeerStatus.WARMING, now
        return True

    def on_unwelcome(self, route: Route, message: Unwelcome) -> Peer | None:
        """The peer that will not have us; None if it was not asked."""
        peer = self._answering(route, message)
        if peer is None or peer.status not in _UNREADY:
            return None
        logger.warning("%s at %s refuses to pair: %s", peer.key.engine_id, peer.address, message.reason)
        self._retire(peer)
        peer.status, peer.refusal = PeerStatus.REFUSED, message.reason
        return peer

    def poll(self, now: float, reads: Callable[[PeerHandle], bool], given_up: Container[PeerHandle]) -> list[EngineKey]:
        """Warms, lets go of memories that have no `reads` left, greets. Returns the peers that became ready.

        `given_up`: reads of these memories run, for which their peers promise nothing any more.
        """
        warming = [peer for peer in self._peers.values() if peer.status is PeerStatus.WARMING]
        ready = [peer.key for peer in warming if self._warm(peer, now)]
        for memory in [memory for memory in self._retired if not reads(memory)]:
            self._let_go(memory, now)
        for peer in self._peers.values():
            if now >= peer.greet_at and (peer.status in _UNREADY or peer.memory in given_up):
                self._greet(peer, now)
        return ready

    def _may_be_connected(self, peer: Peer) -> bool:
        """Not while reads of its last memory run: the transport knows both by the same name, and drops both at once."""
        return peer.status is PeerStatus.GREETING and peer.key not in self._retired.values()

    def _pairs(self, info: PeerInfo) -> bool:
        if info.key == self._me.key:
            return False
        if info.fingerprint == self._me.fingerprint:
            return True
        if info.key not in self._unpaired:
            self._unpaired.add(info.key)
            logger.info("not paired with %s: its KV layout is %s", info.engine_id, info.fingerprint)
        return False

    def _answering(self, route: Route, message: Welcome | Unwelcome) -> Peer | None:
        peer = self._peers.get(message.sender)
        expected = peer is not None and peer.route == route and message.to == self._me.key
        return peer if expected else None

    def _greet(self, peer: Peer, now: float) -> None:
        self._channel.send(peer.route, encode(self._me.hello(peer.key)))
        self._again_later(peer, now)

    def _again_later(self, peer: Peer, now: float) -> None:
        if peer.status not in _UNREADY or peer.key in self._retired.values():  # for the sake of a read
            peer.greet_at = now + HELP_EVERY_S
            return
        peer.greet_at = now + peer.greet_pause_s
        peer.greet_pause_s = min(2 * peer.greet_pause_s, MAX_GREET_PAUSE_S)

    def _warm(self, peer: Peer, now: float) -> bool:
        assert peer.memory is not None
        state = self._crew.peer_state(peer.memory)
        if state is PeerState.CONNECTED:
            peer.status, peer.greet_pause_s = PeerStatus.READY, self._retry_s
            logger.info("connected to %s at %s", peer.key.engine_id, peer.address)
            return True
        if state is PeerState.BROKEN:
            peer.status = PeerStatus.GREETING
            self._again_later(peer, now)
            self._retire(peer)
        return False

    def _let_go(self, memory: PeerHandle, now: float) -> None:
        """The peer may be connected anew: at once, where that has not been tried in vain."""
        peer = self._peers.get(self._retired.pop(memory))
        self._crew.remove_peer(memory)
        if peer is not None and peer.status is PeerStatus.GREETING and peer.greet_pause_s == self._retry_s:
            peer.greet_at = min(peer.greet_at, now)

    def _forget(self, key: EngineKey) -> None:
        peer = self._peers.pop(key)
        self._channel.disconnect(peer.route)
        self._retire(peer)

    def _retire(self, peer: Peer) -> None:
        if peer.memory is not None:
            self._retired[peer.memory] = peer.key
            peer.memory = None
