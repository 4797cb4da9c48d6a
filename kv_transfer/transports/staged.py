"""A transport that reads a peer's memory through pinned memory of both hosts.

    holder    blocks ──copy──> bounce buffer ══════READ══════> bounce buffer ──copy──> blocks    reader
                                  `network`: NIXL between the hosts' memory

For GPU memory that no direct lane reaches at speed: over TCP, UCX moves it at a fraction of the link's rate, and host
memory at all of it. A read is cut into parts that fit into a bounce buffer. Several are under way at once, so the
copies on both sides and the network are busy at the same time. The two sides are in `staged_reads.py` and
`staged_holder.py`, their buffers and messages in `staged_buffers.py` and `staged_messages.py`. Each advances when it is
polled: the reader in `poll` and `peer_state`, the holder in `progress`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from .. import codec
from ..errors import MalformedMessage, TransportError
from ..lease_clock import lease_now
from . import Lane, Memory, PeerHandle, PeerState, Ranges, RangeTable, ReadHandle, ReadState
from .common import PROBE_BYTES, LaneRate, Scratch, check_ranges
from .range_copies import ALIGNMENT, RangeCopies
from .staged_buffers import BounceBuffers
from .staged_holder import StagedHolder
from .staged_messages import Close, Filled, HostNetwork, Refused, decode
from .staged_reads import Remote, StagedRead, StagedReads

logger = logging.getLogger(__name__)

WARM_BYTES = 64  # a small read connects both ends ...
PROBE_BUFFERS = 4  # ... and one of so many buffers measures the rate
CONNECT_S = 2.0  # a peer of which no read has been timed by then is not read in this way


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    """The size of the memory that can be read, and the metadata of the network between the hosts."""

    num_bytes: Annotated[int, Meta(ge=1, lt=2**62)]
    buffer_bytes: Annotated[int, Meta(ge=WARM_BYTES, lt=2**40)]
    network: bytes


_decode_metadata: Callable[[bytes], _Metadata] = codec.decoder(_Metadata, "metadata of a staged peer")


@dataclasses.dataclass(slots=True)
class _Peer:
    num_bytes: int
    remote: Remote
    added_at: float
    state: PeerState = PeerState.CONNECTING
    probe: StagedRead | None = None  # the small read, then those that are measured
    rate: LaneRate = dataclasses.field(default_factory=LaneRate)


class StagedTransport:
    """A `Transport` through host memory. One thread makes, uses and closes it.

    `network` has registered `buffers`. `scratch` is on the region's device.
    """

    num_fallbacks = 0

    def __init__(
        self,
        region: Memory,
        network: HostNetwork,
        buffers: BounceBuffers,
        to_host: RangeCopies,
        from_host: RangeCopies,
        scratch: Scratch,
        clock: Callable[[], float] = lease_now,
    ) -> None:
        self.name = f"{network.name} staged"
        self._region = region
        self._network = network
        self._copies = (to_host, from_host)
        self._scratch = scratch
        self._buffer_bytes = buffers.buffer_bytes
        self._clock = clock
        self._holder = StagedHolder(region, network, buffers.of_peers(), to_host, clock)
        self._staged = StagedReads(network, buffers.own(), from_host, clock)
        self._metadata = codec.encode(_Metadata(region.num_bytes, self._buffer_bytes, network.metadata()))
        self._ids = itertools.count(1)
        self._peers: dict[PeerHandle, _Peer] = {}
        self._reads: dict[ReadHandle, StagedRead] = {}
        self._leaving: list[Remote] = []  # removed peers of which the network may have reads into bounce buffers

    @property
    def num_free(self) -> tuple[int, int]:
        """The free buffers: of those for peers' reads, and of our own."""
        return self._holder.num_free, self._staged.num_free

    def metadata(self) -> bytes:
        return self._metadata

    def add_peer(self, metadata: bytes) -> PeerHandle:
        known = _decode_metadata(metadata)
        network = self._network.add_peer(known.network)
        try:
            name = self._network.add_agent(known.network)
        except Exception:
            self._network.remove_peer(network)
            raise
        handle = next(self._ids)
        self._peers[handle] = _Peer(known.num_bytes, Remote(name, network, known.buffer_bytes), self._clock())
        return handle

    def peer_state(self, peer: PeerHandle) -> PeerState:
        known = self._peers[peer]
        if known.state is PeerState.BROKEN:
            return known.state
        self.progress()
        network = self._network.peer_state(known.remote.network)
        if known.remote.is_broken or network is PeerState.BROKEN:
            known.state = PeerState.BROKEN
        elif known.state is PeerState.CONNECTING:
            known.state = self._connect(known, network)
        return known.state

    def lane(self, peer: PeerHandle) -> Lane:
        return Lane(self.name, self._peers[peer].rate.bytes_per_s, is_staged=True)

    def remove_peer(self, peer: PeerHandle) -> None:
        known = self._peers.pop(peer)
        if known.probe is not None:
            self._staged.give_up(known.probe)
        self._send(known.remote.name, Close())
        self._leaving.append(known.remote)
        self._forget_leaving()

    def read(self, peer: PeerHandle, ranges: Ranges) -> ReadHandle:
        known = self._peers[peer]
        table = check_ranges(ranges, self._region.num_bytes, known.num_bytes, known.remote.name)
        read = next(self._ids)
        self._reads[read] = self._staged.begin(known.remote, table + np.array((0, self._region.address, 0)))
        return read

    def poll(self, read: ReadHandle) -> ReadState:
        self.progress()
        return self._reads[read].state

    def release(self, read: ReadHandle) -> bool:
        assert self._reads[read].state is not ReadState.RUNNING, "a read that runs may still write"
        if self._reads[read].num_writing:
            self.progress()
            return False
        del self._reads[read]
        return True

    def progress(self) -> None:
        for sender, data in self._network.messages():
            try:
                message = decode(data)
            except MalformedMessage as error:
                logger.warning("dropped: %s", error)
                continue
            if isinstance(message, Filled | Refused):
                self._staged.handle(sender, message)
            else:
                self._holder.handle(sender, message)
        self._holder.advance()
        self._staged.advance()
        self._forget_leaving()

    def close(self) -> None:
        for peer in list(self._peers):
            self.remove_peer(peer)
        for copies in self._copies:
            copies.wait()
        self._network.close()

    def _forget_leaving(self) -> None:
        leaving, self._leaving = self._leaving, []
        for remote in leaving:
            if self._staged.uses_network(remote):
                self._leaving.append(remote)
            else:
                self._network.remove_agent(remote.name)
                self._network.remove_peer(remote.network)

    # ------------------------------------------------------------------ connecting

    def _connect(self, peer: _Peer, network: PeerState) -> PeerState:
        """Make a small read once the network is connected, then some that are timed."""
        if self._clock() - peer.added_at > CONNECT_S:
            if peer.probe is not None:
                self._staged.give_up(peer.probe)
            return PeerState.BROKEN if peer.rate.bytes_per_s is None else PeerState.CONNECTED
        if peer.probe is None:
            if network is PeerState.CONNECTED:
                peer.probe = self._staged.begin(peer.remote, self._into_scratch(peer, WARM_BYTES, 1))
        elif peer.probe.state is ReadState.FAILED:
            return PeerState.BROKEN
        elif peer.probe.state is ReadState.DONE:
            table = self._into_scratch(peer, peer.remote.buffer_bytes, PROBE_BUFFERS)
            if peer.rate.began_s is not None and peer.rate.end(int(table[:, 2].sum()), self._clock()):
                return PeerState.CONNECTED
            peer.rate.begin(self._clock())
            peer.probe = self._staged.begin(peer.remote, table)
        return PeerState.CONNECTING

    def _into_scratch(self, peer: _Peer, num_bytes: int, count: int) -> RangeTable:
        size = min(num_bytes, peer.num_bytes, self._buffer_bytes, PROBE_BYTES)
        starts = (number * size % (peer.num_bytes - size + 1) // ALIGNMENT * ALIGNMENT for number in range(count))
        return np.array([(start, self._scratch.address, size) for start in starts], dtype=np.int64)

    def _send(self, name: str, message: msgspec.Struct) -> None:
        try:
            self._network.send(name, codec.encode(message))
        except TransportError as error:
            logger.info("%s gets no message: %s", name, error)
