"""A transport made of several, which reads each peer over the fastest one that works.

    network   NIXL or UCX: reaches every machine
    direct    CUDA IPC: GPUs of one machine
    staged    through pinned memory of both hosts, if the others are slow and both ends have it

    add_peer: all connect and time a few MB ──> CONNECTED as long as one is
          one that has not connected in time is late: it is not waited for, and is used if it connects after all
    read:     over the fastest ──fails──> again over another, and counted ──fails──> FAILED
    staged:   connected ──breaks──> forgotten once no read of it is left ──a pause──> connected again, during reads

Its name is the network transport's, since both ends must have that one, and either may lack the others.
`opening.py` makes the transport that the settings ask for.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from .. import codec
from ..errors import MalformedMessage, TransportError
from ..lease_clock import lease_now
from . import Lane, PeerHandle, PeerState, Ranges, ReadHandle, ReadState, Transport

logger = logging.getLogger(__name__)

SLOW_GPU_BYTES_PER_S = 2e9  # PCIe and InfiniBand are ten times faster; a slower lane of a GPU goes through TCP
# The pause before a broken staged lane is tried again, twice as long each time. The first is longer than a holder keeps
# buffers for a reader (`staged_messages.KEPT_S`), so both ends begin anew.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    """Metadata of all transports."""

    name: Annotated[str, Meta(max_length=4096)]
    network: bytes
    direct: bytes | None
    staged: bytes | None = None


_decode_metadata: Callable[[bytes], _Metadata] = codec.decoder(_Metadata, "metadata of a peer")


@dataclasses.dataclass(slots=True, eq=False)
class _Route:
    """A peer as one of the transports reads it."""

    transport: Transport
    peer: PeerHandle
    late_at: float  # the time from which on its connection is not waited for

    @property
    def state(self) -> PeerState:
        return self.transport.peer_state(self.peer)

    @property
    def rate(self) -> float:
        lane = self.transport.lane(self.peer)
        return 0.0 if lane is None else lane.bytes_per_s or 0.0


@dataclasses.dataclass(slots=True)
class _StagedLane:
    """A peer's lane through host memory. It is tried only if the peer's other lanes are slow, or none works."""

    metadata: bytes
    route: _Route | None = None  # None: not tried so far, or broken
    again_at: float = math.inf  # when it is to be tried again, or was, until it works
    pause_s: float = FIRST_PAUSE_S  # before the next attempt

    @property
    def is_untried(self) -> bool:
        return self.route is None and self.again_at == math.inf

    def broke(self, now: float) -> None:
        self.route, self.again_at = None, now + self.pause_s
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)


@dataclasses.dataclass(slots=True)
class _Peer:
    name: str
    routes: list[_Route]  # the direct one first, so that it wins a tie
    staged: _StagedLane | None  # None: one of the two ends has none
    why_not_direct: str = ""  # why there is no direct lane; empty: there is one, or neither end has any
    is_paired: bool = False  # reads over all lanes that connected in time have been timed, and the result is in the log
    was_connected: bool = False  # it has been, so it is broken when no lane of it is connected

    def best(self) -> _Route | None:
        """Return the fastest connected route. None: none is connected."""
        connected = [route for route in self.routes if route.state is PeerState.CONNECTED]
        return max(connected, key=lambda route: route.rate, default=None)


@dataclasses.dataclass(slots=True)
class _Read:
    peer: _Peer
    ranges: Ranges
    route: _Route
    handle: ReadHandle
    is_second: bool = False
    failed: tuple[_Route, ReadHandle] | None = None  # the first attempt, while it may still write

    def release_failed(self) -> bool:
        """Return False while the failed first attempt may still write."""
        if self.failed is not None:
            route, handle = self.failed
            self.failed = None if route.transport.release(handle) else self.failed
        return self.failed is None

    def uses(self, route: _Route) -> bool:
        return self.route is route or (self.failed is not None and self.failed[0] is route)


class FastestTransport:
    """A `Transport` made of several. With one it only adds logs of names and rates to the network transport."""

    def __init__(
        self,
        network: Transport,
        direct: Transport | None,
        name: str,
        *,
        on_gpu: bool,
        staged: Transport | None = None,
        patience_s: float = math.inf,
        clock: Callable[[], float] = lease_now,
    ) -> None:
        """`name` is this engine's name in peers' logs. `on_gpu`: the memory is a GPU's, so a slow lane is a warning.

        A lane that has not connected within `patience_s` is not waited for.
        """
        self.name = network.name
        self._network, self._direct, self._staged = network, direct, staged
        self._on_gpu = on_gpu
        self._patience_s = patience_s
        self._clock = clock
        of_direct, of_staged = (None if each is None else each.metadata() for each in (direct, staged))
        known = _Metadata(name, network.metadata(), of_direct, of_staged)
        self._metadata = codec.encode(known)
        self._ids = itertools.count(1)
        self._peers: dict[PeerHandle, _Peer] = {}
        self._reads: dict[ReadHandle, _Read] = {}
        self.num_fallbacks = 0  # reads that failed over the fastest route and began again over another

    def metadata(self) -> bytes:
        return self._metadata

    def add_peer(self, metadata: bytes) -> PeerHandle:
        known = _decode_metadata(metadata)
        routes = [self._connect(self._network, known.network)]
        why_not_direct = ""
        try:
            if (direct := self._connect_direct(known)) is not None:
                routes.insert(0, direct)
        except (TransportError, MalformedMessage) as error:
            why_not_direct = str(error)
            logger.info("%s is not read directly, but over %s: %s", known.name, self.name, error)
        except Exception:  # the caller may try again, and must not leave a connection behind each time
            self._network.remove_peer(routes[0].peer)
            raise
        handle = next(self._ids)
        staged = None if self._staged is None or known.staged is None else _StagedLane(known.staged)
        self._peers[handle] = _Peer(known.name, routes, staged, why_not_direct)
        return handle

    def _connect_direct(self, known: _Metadata) -> _Route | None:
        """Begin to connect directly. None: neither end can. Raises `TransportError` if one cannot, or refuses."""
        if self._direct is not None and known.direct is not None:
            return self._connect(self._direct, known.direct)
        if self._direct is not None:
            raise TransportError("it shares no memory with other processes, and its log says why")
        if known.direct is not None:
            raise TransportError("this engine shares no memory with other processes")
        return None

    def _connect(self, transport: Transport, metadata: bytes) -> _Route:
        return _Route(transport, transport.add_peer(metadata), late_at=self._clock() + self._patience_s)

    def peer_state(self, peer: PeerHandle) -> PeerState:
        known = self._peers[peer]
        state = self._state_of(known) if known.is_paired else self._pair(known)
        known.was_connected |= state is PeerState.CONNECTED
        return state

    def _state_of(self, peer: _Peer) -> PeerState:
        """Return the state of a peer whose lanes are all known."""
        self._mend_staged(peer)
        return PeerState.BROKEN if peer.best() is None else PeerState.CONNECTED

    def _pair(self, peer: _Peer) -> PeerState:
        """Wait until reads over all lanes are timed, and through host memory too if the others are slow or late."""
        states = {route: route.state for route in peer.routes}
        now = self._clock()
        awaited = [each for each, state in states.items() if state is PeerState.CONNECTING and now < each.late_at]
        if not awaited:
            if self._wants_staged(peer) and self._connect_staged(peer):
                return PeerState.CONNECTING
            if PeerState.CONNECTED in states.values():
                peer.is_paired = True
                self._log_lane(peer)
        measures_staged = any(route.transport is self._staged for route in awaited)
        if PeerState.CONNECTED in states.values() and not measures_staged:
            return PeerState.CONNECTED
        can_wait = PeerState.CONNECTING in states.values() and not peer.was_connected
        return PeerState.CONNECTING if can_wait or measures_staged else PeerState.BROKEN

    def _wants_staged(self, peer: _Peer) -> bool:
        """Return whether a peer's other lanes are slow, or do not work, and host memory has not been tried."""
        best = peer.best()
        return peer.staged is not None and peer.staged.is_untried and (best is None or self._is_slow(best.rate))

    def _connect_staged(self, peer: _Peer) -> bool:
        """Begin to connect a peer through host memory, too. Returns False if that is refused."""
        lane = peer.staged
        assert lane is not None, "both ends have it"
        assert self._staged is not None, "both ends have it"
        try:
            lane.route = self._connect(self._staged, lane.metadata)
        except (TransportError, MalformedMessage) as error:
            logger.warning("%s is not read through host memory: %s", peer.name, error)
            lane.broke(self._clock())
            return False
        peer.routes.append(lane.route)
        return True

    def _mend_staged(self, peer: _Peer) -> None:
        """Connect a peer through host memory again, some time after that lane has broken. Reads go on meanwhile."""
        lane = peer.staged
        if lane is None or lane.is_untried:
            return
        if lane.route is None:
            assert self._staged is not None, "both ends have it"
            self._staged.progress()  # so that reads into bounce buffers end, and with them the broken endpoint
            if self._clock() >= lane.again_at:
                self._connect_staged(peer)
            return
        state = lane.route.state
        if state is PeerState.BROKEN and not any(read.uses(lane.route) for read in self._reads.values()):
            peer.routes.remove(lane.route)
            lane.route.transport.remove_peer(lane.route.peer)
            lane.broke(self._clock())
        elif state is PeerState.CONNECTED and lane.again_at < math.inf:
            lane.again_at = math.inf
            self._log_lane(peer)

    def _is_slow(self, rate: float) -> bool:
        return self._on_gpu and 0 < rate < SLOW_GPU_BYTES_PER_S

    def lane(self, peer: PeerHandle) -> Lane | None:
        known = self._peers[peer]
        if not known.is_paired:  # one lane was connected first, and nobody asks for the state any more
            self._pair(known)
        return self._lane_of(known)

    def remove_peer(self, peer: PeerHandle) -> None:
        for route in self._peers.pop(peer).routes:
            route.transport.remove_peer(route.peer)

    def read(self, peer: PeerHandle, ranges: Ranges) -> ReadHandle:
        known = self._peers[peer]
        self._mend_staged(known)
        route = known.best()
        if route is None:
            raise TransportError(f"the connection to {known.name} is broken")
        entry = self._begin(known, ranges, route)
        read = next(self._ids)
        self._reads[read] = entry
        return read

    def poll(self, read: ReadHandle) -> ReadState:
        entry = self._reads[read]
        if entry.peer.staged is not None and entry.peer.staged.again_at < math.inf:
            self._mend_staged(entry.peer)
        all_released = entry.release_failed()
        state = entry.route.transport.poll(entry.handle)
        if state is ReadState.FAILED and not entry.is_second and self._begin_again(entry):
            return self.poll(read)
        return ReadState.RUNNING if state is ReadState.DONE and not all_released else state

    def release(self, read: ReadHandle) -> bool:
        entry = self._reads[read]
        if not entry.release_failed() or not entry.route.transport.release(entry.handle):
            return False
        del self._reads[read]
        return True

    def progress(self) -> None:
        for transport in self._transports:
            transport.progress()

    def close(self) -> None:
        for transport in reversed(self._transports):
            transport.close()

    @property
    def _transports(self) -> list[Transport]:
        return [each for each in (self._network, self._direct, self._staged) if each is not None]

    def _begin(self, peer: _Peer, ranges: Ranges, route: _Route) -> _Read:
        """Begin a read, over another route if this one refuses it. Raises `TransportError` if both do."""
        try:
            return _Read(peer, ranges, route, route.transport.read(route.peer, ranges))
        except TransportError as error:
            other = self._other(peer, route)
            if other is None:
                raise
            self._note_fallback(peer, route, other, str(error))
        return _Read(peer, ranges, other, other.transport.read(other.peer, ranges), is_second=True)

    def _begin_again(self, entry: _Read) -> bool:
        """Begin a failed read again over another route. Returns False if that does not work either."""
        other = self._other(entry.peer, entry.route)
        if other is None:
            return False
        try:
            handle = other.transport.read(other.peer, entry.ranges)
        except TransportError as error:
            logger.warning("%s cannot be read over %s either: %s", entry.peer.name, other.transport.name, error)
            return False
        self._note_fallback(entry.peer, entry.route, other, "the read failed")
        entry.failed = entry.route, entry.handle
        entry.route, entry.handle, entry.is_second = other, handle, True
        return True

    @staticmethod
    def _other(peer: _Peer, route: _Route) -> _Route | None:
        return next((each for each in peer.routes if each is not route and each.state is PeerState.CONNECTED), None)

    def _note_fallback(self, peer: _Peer, route: _Route, other: _Route, reason: str) -> None:
        self.num_fallbacks += 1
        logger.warning(
            "%s is now read over %s instead of %s: %s", peer.name, other.transport.name, route.transport.name, reason
        )

    def _lane_of(self, peer: _Peer) -> Lane | None:
        route = peer.best()
        if route is None:
            return None
        rate, is_staged = route.rate, route.transport is self._staged
        return Lane(route.transport.name, rate or None, self._is_slow(rate), is_staged)

    def _log_lane(self, peer: _Peer) -> None:
        rates = ", ".join(f"{route.transport.name} {self._shown(route)}" for route in peer.routes)
        if peer.why_not_direct:
            rates += f", not directly: {peer.why_not_direct}"
        lane = self._lane_of(peer)
        if lane is None:
            return
        if lane.is_staged:
            log = logger.warning if lane.is_slow else logger.info
            log("GPU memory of %s is read through pinned memory of both hosts, the fastest way: %s", peer.name, rates)
        elif lane.is_slow:
            logger.warning("GPU memory of %s is read slowly, probably through TCP: %s", peer.name, rates)
        else:
            logger.info("memory of %s is read over %s (%s)", peer.name, lane.transport, rates)

    def _shown(self, route: _Route) -> str:
        match route.state:
            case PeerState.CONNECTED:
                return f"{route.rate / 1e9:.1f} GB/s" if route.rate else "not measured"
            case PeerState.CONNECTING:
                return f"not connected within {self._patience_s:g} s"
        return "does not work"
