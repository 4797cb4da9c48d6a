"""A transport over UCX alone, through UCXX: the same lanes as NIXL's UCX backend, without NIXL in between.

Differences from `nixl.py`:

* We never send active messages, but the context must ask for them: with RMA alone, UCX makes no lanes for large data,
  and reads between processes of one host go over TCP.
* Each range is one `ucp_get_nbx`, whose request tells when UCX has finished with it. So a failed read is released once
  all of its requests have completed, without a waiting time.
* Closing an endpoint cancels its requests. We do so only for reads into the scratch, when a peer is removed while it is
  being connected: it may never answer.
* UCXX's progress thread is not used: both ends of a read call `progress` or `poll`.
* A failed endpoint stays failed, as with NIXL. Here it reports that itself (`alive`), even if there is no read.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .. import codec
from ..codec import Name
from ..devices import use_device
from ..errors import TransportError
from . import Lane, Memory, PeerHandle, PeerState, Ranges, ReadHandle, ReadState
from .common import PROBE_BYTES, WARM_BYTES, ErrorLatch, LaneRate, check_ranges, make_scratch
from .ucp import IN_PROGRESS, OK, Handle, Ucp
from .ucx_process import UcxLog

logger = logging.getLogger(__name__)

# If messages may use rendezvous, UCX avoids lanes such as CMA, on which it cannot revoke a reader's access.
# We send no messages, and a reader whose read outlasts the lease discards the data.
CONFIG = {"RNDV_THRESH": "inf"}
PROGRESS_S = 2e-3  # limit of one call: while data flow, UCX always finds more to do
CLOSE_PERIOD_NS, CLOSE_ATTEMPTS = 10_000_000, 10

_ucx_log = UcxLog()  # NIXL has its own UCX library, and its own log


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    """The version and address of the UCX worker, and the key and address of the region."""

    version: Name
    name: Name
    worker: Annotated[bytes, Meta(min_length=1)]
    key: Annotated[bytes, Meta(min_length=1)]
    address: Annotated[int, Meta(ge=0, lt=2**62)]
    num_bytes: Annotated[int, Meta(ge=1, lt=2**62)]


_decode_metadata: Callable[[bytes], _Metadata] = codec.decoder(_Metadata, "metadata of a UCX peer")


@dataclasses.dataclass(slots=True)
class _Transfer:
    """The requests of one read that have not completed, in the order in which they began."""

    running: deque[Handle] = dataclasses.field(default_factory=deque)
    status: int = OK  # of the first request that failed

    @property
    def state(self) -> ReadState:
        if self.status != OK:
            return ReadState.FAILED
        return ReadState.RUNNING if self.running else ReadState.DONE


@dataclasses.dataclass(slots=True)
class _Peer:
    metadata: _Metadata
    endpoint: Any  # UCXX's
    key: Handle
    warm_read: _Transfer  # the warm-up read, then the probes
    state: PeerState = PeerState.CONNECTING
    rate: LaneRate = dataclasses.field(default_factory=LaneRate)


@dataclasses.dataclass(slots=True)
class _Read:
    peer: _Peer
    transfer: _Transfer


class UcxTransport:
    """A `Transport` over UCXX. One thread makes, uses and closes it.

    Raises `TransportError` if UCXX is missing or the region cannot be registered.
    """

    name = "ucx"
    num_fallbacks = 0

    def __init__(self, region: Memory, agent_name: str) -> None:
        self._address = region.address
        self._num_bytes = region.num_bytes
        kind = "cpu" if use_device(region.device) is None else "cuda"
        self._scratch = make_scratch(region.device)
        with _ucx_log.capturing():
            self._ucxx, self._ucp = _import_ucxx()
            try:
                features = self._ucxx.Feature
                self._context = self._ucxx.UCXContext(CONFIG, (features.RMA, features.AM))
                self.worker = self._ucxx.UCXWorker(self._context)
            except self._ucxx.UCXError as error:
                raise TransportError(f"cannot make a UCX worker: {error}") from error
        self._memory = self._ucp.register(self._context.handle, self._address, self._num_bytes, kind)
        self._into_region = self._ucp.registered(self._memory)
        self._error_latch = ErrorLatch("UCX", (self._ucxx.UCXError,))
        key = self._ucp.pack_key(self._context.handle, self._memory)
        worker = self.worker.address.tobytes()
        known = _Metadata(self._ucp.version, agent_name, worker, key, self._address, self._num_bytes)
        self._metadata = codec.encode(known)
        self._ids = itertools.count(1)
        self._peers: dict[PeerHandle, _Peer] = {}
        self._reads: dict[ReadHandle, _Read] = {}
        self._lingering: list[_Peer] = []  # removed peers whose warm-up read still writes into the scratch
        _ucx_log.drain()
        logger.info("UCX %s worker %s: %.1f MB of %s", self._ucp.version, agent_name, self._num_bytes / 1e6, kind)

    @property
    def lanes(self) -> list[str]:
        """The lanes that UCX has chosen so far, as in its log."""
        return _ucx_log.lanes

    def metadata(self) -> bytes:
        return self._metadata

    def add_peer(self, metadata: bytes) -> PeerHandle:
        known = _decode_metadata(metadata)
        if known.version != self._ucp.version:
            raise TransportError(f"{known.name} has UCX {known.version}, here is {self._ucp.version}: install the same")
        endpoint = self._connect(known)
        try:
            key = self._ucp.unpack_key(endpoint.handle, known.key)
        except TransportError:
            self._close_endpoint(endpoint)
            raise
        peer = _Peer(known, endpoint, key, _Transfer())
        self._into_scratch(peer, WARM_BYTES)
        handle = next(self._ids)
        self._peers[handle] = peer
        return handle

    def peer_state(self, peer: PeerHandle) -> PeerState:
        known = self._peers[peer]
        if known.state is PeerState.CONNECTING:
            self._advance()
            self._settle(known.warm_read)
            if known.warm_read.state is ReadState.DONE:
                self._probe(known)
        if known.warm_read.state is ReadState.FAILED or not known.endpoint.alive:
            known.state = PeerState.BROKEN
            _ucx_log.drain()
        return known.state

    def lane(self, peer: PeerHandle) -> Lane:
        return Lane(self.name, self._peers[peer].rate.bytes_per_s)

    def remove_peer(self, peer: PeerHandle) -> None:
        known = self._peers.pop(peer)
        if known.warm_read.running:  # cancel it, since it ends by itself only if the peer still answers
            self._close_endpoint(known.endpoint)
        self._lingering.append(known)
        self._advance()

    def read(self, peer: PeerHandle, ranges: Ranges) -> ReadHandle:
        known = self._peers[peer]
        table = check_ranges(ranges, self._num_bytes, known.metadata.num_bytes, known.metadata.name)
        if not known.endpoint.alive:
            known.state = PeerState.BROKEN
            raise TransportError(f"the connection to {known.metadata.name} is broken")
        entry = _Read(known, _Transfer())
        for remote, local, num_bytes in table.tolist():
            self._get(
                known,
                entry.transfer,
                known.metadata.address + remote,
                self._address + local,
                num_bytes,
                self._into_region,
            )
            if entry.transfer.status != OK:
                break
        self._note_failure(entry)
        read = next(self._ids)
        self._reads[read] = entry
        return read

    def poll(self, read: ReadHandle) -> ReadState:
        entry = self._reads[read]
        if entry.transfer.state is ReadState.RUNNING:
            self._advance()
            self._settle(entry.transfer)
            self._note_failure(entry)
        return entry.transfer.state

    def release(self, read: ReadHandle) -> bool:
        entry = self._reads[read]
        assert entry.transfer.state is not ReadState.RUNNING, "a read that runs may still write"
        if entry.transfer.running:
            self._advance()
            self._settle(entry.transfer)
        if entry.transfer.running:
            return False
        del self._reads[read]
        return True

    def progress(self) -> None:
        self._advance()

    def close(self) -> None:
        """Close. If reads still run, keep the worker and the region registered until the process ends."""
        for read in self._reads.values():
            self._settle(read.transfer)
        running = sum(bool(read.transfer.running) for read in self._reads.values())
        if not running:
            for peer in list(self._peers):
                self.remove_peer(peer)
        if running or self._lingering:
            logger.warning("%d reads still run: the UCX worker is not closed", running + len(self._lingering))
            _abandoned.append(self)
            return
        self._ucp.deregister(self._context.handle, self._memory)
        del self.worker, self._context

    def _connect(self, known: _Metadata) -> Any:
        try:
            address = self._ucxx.UCXAddress.create_from_buffer(known.worker)
            return self.worker.create_endpoint_from_worker_address(address, endpoint_error_handling=True)
        except self._ucxx.UCXError as error:
            raise TransportError(f"cannot connect to {known.name}: {error}") from error

    def _close_endpoint(self, endpoint: Any) -> None:
        try:
            endpoint.close_blocking(CLOSE_PERIOD_NS, CLOSE_ATTEMPTS)
        except self._ucxx.UCXError as error:
            logger.warning("UCX closed a connection with: %s", error)
        _ucx_log.drain()

    def _probe(self, peer: _Peer) -> None:
        """Time reads of a few MB once the warm-up read has ended. The peer is connected when they are done."""
        num_bytes = min(PROBE_BYTES, peer.metadata.num_bytes)
        while peer.warm_read.state is ReadState.DONE:
            if peer.rate.began_s is not None and peer.rate.end(num_bytes, time.perf_counter()):
                peer.state = PeerState.CONNECTED
                _ucx_log.drain()
                return
            peer.rate.begin(time.perf_counter())
            self._into_scratch(peer, PROBE_BYTES)
            self._settle(peer.warm_read)

    def _into_scratch(self, peer: _Peer, num_bytes: int) -> None:
        """Read the first `num_bytes` of a peer's region, or all of it if it is smaller."""
        size = min(num_bytes, peer.metadata.num_bytes)
        self._get(peer, peer.warm_read, peer.metadata.address, self._scratch.address, size)

    def _get(
        self, peer: _Peer, transfer: _Transfer, remote: int, local: int, num_bytes: int, params: Any = None
    ) -> None:
        status, request = self._ucp.get(peer.endpoint.handle, peer.key, remote, local, num_bytes, params)
        if status == IN_PROGRESS:
            transfer.running.append(request)
        else:
            transfer.status = transfer.status or status

    def _settle(self, transfer: _Transfer) -> None:
        """Remove completed requests from the front. Later ones are not checked before the first has completed."""
        while transfer.running and (status := self._ucp.check(transfer.running[0])) != IN_PROGRESS:
            self._ucp.free(transfer.running.popleft())
            transfer.status = transfer.status or status

    def _note_failure(self, read: _Read) -> None:
        status = read.transfer.status
        if status != OK and read.peer.state is not PeerState.BROKEN:
            read.peer.state = PeerState.BROKEN
            logger.warning("a read of %s failed: %s", read.peer.metadata.name, self._ucp.reason(status))
            _ucx_log.drain()

    def _advance(self) -> None:
        until = time.monotonic() + PROGRESS_S
        while self._error_latch.call(self.worker.progress_once) and time.monotonic() < until:
            pass
        for peer in list(self._lingering):
            self._settle(peer.warm_read)
            if not peer.warm_read.running:
                self._lingering.remove(peer)
                self._ucp.destroy_key(peer.key)  # after the reads that use it
                self._close_endpoint(peer.endpoint)


_abandoned: list[UcxTransport] = []


def _import_ucxx() -> tuple[Any, Ucp]:
    """Import UCXX late, because everything else works without it and UCX must load while its log is captured."""
    ours = dict(os.environ)
    try:
        from ucxx._lib import libucxx
    except ImportError as error:
        raise TransportError(f"UCXX cannot be imported ({error}); install `baton[ucx]`") from error
    for name in os.environ.keys() - ours.keys():
        del os.environ[name]  # UCXX sets variables for its own messages, and child processes would inherit them
    return libucxx, Ucp()
