"""A transport over NIXL: UCX between processes and hosts, on CPU memory and on GPUs.

Properties of NIXL 1.5 with UCX 1.23 that shaped this file:

* NIXL's progress thread polls without pause and keeps a core busy. We do not start it: the engine that is read calls
  `progress` instead.
* The first read of a peer needs round trips and the peer's `progress`, so a peer counts as connected after one small
  read. Then a read of a few MB is timed, because some lanes are a thousand times slower and nothing else shows it.
* Over shared memory `transfer` copies before it returns, and releases the GIL meanwhile.
* Releasing a running read cancels it in UCX, "which may not be enough": its data may land later. So we never release a
  running read.
* A NIXL request has several UCX operations. When one has failed, others may not be cancelled yet. The endpoint is dead,
  and UCX cancels them as it makes progress, so a failed read is released only after `SETTLE_S` of progress.
* A failed endpoint stays failed: the peer must be removed and added again.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from .. import codec
from ..devices import use_device
from ..errors import NotRegistrable, TransportError
from ..settings import nixl_name
from . import Lane, Memory, PeerHandle, PeerState, Ranges, ReadHandle, ReadState
from .common import PROBE_BYTES, WARM_BYTES, ErrorLatch, LaneRate, check_ranges, make_scratch
from .ucx_process import LOST_TCP, UcxLog, environment_defaults

logger = logging.getLogger(__name__)

SETTLE_S = 0.1
LONGEST_ROUND_S = SETTLE_S / 10  # a longer time between two calls of `progress` counts as no more
MAX_MESSAGES = 4096  # that have come and that nobody has taken; older ones are dropped

T = TypeVar("T")
_Memory = Literal["DRAM", "VRAM"]  # NIXL's names
_Descriptors = list[tuple[int, int, int]] | NDArray[np.uint64]  # address, bytes, device
_ucx_log = UcxLog()  # NIXL's UCX is one library with one log in this process


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    """NIXL's own metadata, and the address of the region."""

    nixl: bytes
    address: Annotated[int, Meta(ge=0, lt=2**62)]
    num_bytes: Annotated[int, Meta(ge=1, lt=2**62)]
    memory: _Memory
    device: Annotated[int, Meta(ge=0, lt=2**16)]


_decode_metadata: Callable[[bytes], _Metadata] = codec.decoder(_Metadata, "metadata of a NIXL peer")


@dataclasses.dataclass(slots=True)
class _Peer:
    name: str
    metadata: _Metadata
    warm_read: Any  # NIXL's handle of the warm-up read, then of a probe; None if that could not be prepared
    state: PeerState = PeerState.CONNECTING
    rate: LaneRate = dataclasses.field(default_factory=LaneRate)


@dataclasses.dataclass(slots=True)
class _Read:
    handle: Any
    peer: _Peer
    state: ReadState
    settled_s: float = 0.0  # time of progress since it failed
    progressed_at: float = 0.0  # when it failed, or when progress was made after that


class NixlTransport:
    """A `Transport` over NIXL's `agent`. One thread makes, uses and closes it.

    Raises `TransportError` if a backend is missing or the region cannot be registered.
    """

    num_fallbacks = 0

    def __init__(self, region: Memory, agent_name: str, backends: Sequence[str] = ("UCX",)) -> None:
        with _ucx_log.capturing(), environment_defaults(LOST_TCP):
            bindings, api = import_nixl()
            self._errors = errors_of(bindings)
            self._error_latch = ErrorLatch("NIXL", self._errors)
            gpu = use_device(region.device)
            self._memory: _Memory = "DRAM" if gpu is None else "VRAM"
            self._device = gpu or 0
            config = api.nixl_agent_config(enable_prog_thread=False, backends=list(backends))
            self.agent = self._asking("cannot make a NIXL agent", api.nixl_agent, agent_name, config)
        missing = [name for name in backends if name not in self.agent.backends]
        if missing:
            available = ", ".join(sorted(self.agent.plugin_list))
            raise TransportError(f"NIXL has no backend {', '.join(missing)} here; available: {available}")
        self.name = nixl_name(backends)
        self._backends = list(backends)
        self._region = region  # its memory may be registered for as long as this object lives
        self._address = region.address
        self._num_bytes = region.num_bytes
        self._scratch = make_scratch(region.device)
        self._registered = [
            self._register(region.address, self._num_bytes),
            self._register(self._scratch.address, PROBE_BYTES),
        ]
        blob = self._asking("cannot describe our memory", self.agent.get_agent_metadata)
        known = _Metadata(blob, self._address, self._num_bytes, self._memory, self._device)
        self._metadata = codec.encode(known)
        self._ids = itertools.count(1)
        self._peers: dict[PeerHandle, _Peer] = {}
        self._reads: dict[ReadHandle, _Read] = {}
        self._lingering: list[Any] = []  # reads into the scratch that are not released yet
        self._known: collections.Counter[str] = collections.Counter()  # how often each agent was added
        # Messages, each with its sender:
        self._arrived: collections.deque[tuple[str, bytes]] = collections.deque(maxlen=MAX_MESSAGES)
        self._log_ucx()
        logger.info("NIXL agent %s: %s, %.1f MB of %s", agent_name, backends, self._num_bytes / 1e6, self._memory)

    @property
    def lanes(self) -> list[str]:
        """The lanes that UCX has chosen so far, as in its log."""
        return _ucx_log.lanes

    def metadata(self) -> bytes:
        return self._metadata

    def add_peer(self, metadata: bytes) -> PeerHandle:
        known = _decode_metadata(metadata)
        name = self._load(known)
        peer = _Peer(name, known, warm_read=None)
        try:
            peer.warm_read = self._into_scratch(peer, WARM_BYTES)
        except TransportError:
            self.remove_agent(name)
            raise
        peer.state = self._begin_warming(peer)
        handle = next(self._ids)
        self._peers[handle] = peer
        return handle

    def peer_state(self, peer: PeerHandle) -> PeerState:
        known = self._peers[peer]
        if known.state is PeerState.CONNECTING:
            state = self._state_of(known.warm_read)
            if state is ReadState.FAILED:
                known.state = PeerState.BROKEN
            elif state is ReadState.DONE and known.rate.began_s is None:
                known.state = self._begin_probe(known)
            elif state is ReadState.DONE:
                known.state = self._end_probe(known)
            self._log_ucx()
        return known.state

    def lane(self, peer: PeerHandle) -> Lane:
        return Lane(self.name, self._peers[peer].rate.bytes_per_s)

    def remove_peer(self, peer: PeerHandle) -> None:
        known = self._peers.pop(peer)
        if known.state is PeerState.CONNECTING:
            self._lingering.append(known.warm_read)  # it still runs, but writes only into the scratch
        elif known.warm_read is not None:
            self._drop(known.warm_read)
        self.remove_agent(known.name)
        self._log_ucx()

    def read(self, peer: PeerHandle, ranges: Ranges) -> ReadHandle:
        known = self._peers[peer]
        table = check_ranges(ranges, self._num_bytes, known.metadata.num_bytes, known.name)
        starts, lengths = table[:, :2].astype(np.uint64), table[:, 2].astype(np.uint64)
        starts += np.array((known.metadata.address, self._address), dtype=np.uint64)
        remote = _descriptors(starts[:, 0], lengths, known.metadata.device)
        local = _descriptors(starts[:, 1], lengths, self._device)
        try:
            handle = self._initialize(known, local, remote)
        except TransportError:
            known.state = PeerState.BROKEN  # the ranges are fine, so the peer is not
            raise
        read = next(self._ids)
        self._reads[read] = entry = _Read(handle, known, ReadState.RUNNING)
        self._become(entry, self._post(handle))
        return read

    def poll(self, read: ReadHandle) -> ReadState:
        entry = self._reads[read]
        if entry.state is ReadState.RUNNING:
            self._become(entry, self._state_of(entry.handle))
        return entry.state

    def release(self, read: ReadHandle) -> bool:
        entry = self._reads[read]
        assert entry.state is not ReadState.RUNNING, "a read that runs may still write"
        if entry.state is ReadState.FAILED and entry.settled_s < SETTLE_S:
            self.progress()
            before, entry.progressed_at = entry.progressed_at, time.monotonic()
            entry.settled_s += min(entry.progressed_at - before, LONGEST_ROUND_S)
            return False
        if not self._let_go(entry.handle):
            return False
        del self._reads[read]
        return True

    def add_agent(self, metadata: bytes) -> str:
        """Return the name of the agent with this metadata, which can be sent messages until `remove_agent`."""
        return self._load(_decode_metadata(metadata))

    def remove_agent(self, name: str) -> None:
        self._known[name] -= 1
        if self._known[name] > 0:
            return
        del self._known[name]
        try:
            self.agent.remove_remote_agent(name)
        except self._errors as error:
            logger.warning("NIXL could not forget peer %s: %s", name, error)

    def send(self, name: str, message: bytes) -> None:
        """Send a message to an agent that was added. Raises `TransportError`."""
        self._asking(f"cannot send a message to {name}", self.agent.send_notif, name, message)

    def messages(self) -> list[tuple[str, bytes]]:
        """Return the messages that have come since the last call, each with its sender's name. Makes progress."""
        self.progress()
        arrived = list(self._arrived)
        self._arrived.clear()
        return arrived

    def progress(self) -> None:
        self._error_latch.call(self._take_notifications)
        self._lingering = [h for h in self._lingering if self._state_of(h) is ReadState.RUNNING or not self._let_go(h)]

    def close(self) -> None:
        """Close. If reads still run, keep the agent and the region registered until the process ends."""
        for peer in list(self._peers):
            self.remove_peer(peer)
        self.progress()
        running = len(self._reads) + len(self._lingering)
        if running:
            logger.warning("%d reads still run: the NIXL agent is not closed", running)
            _abandoned.append(self)
            return
        for registered in self._registered:
            self._error_latch.call(functools.partial(self.agent.deregister_memory, registered))
        del self.agent

    def _register(self, address: int, num_bytes: int) -> Any:
        regions = [(address, num_bytes, self._device, "")]
        what = f"cannot register {num_bytes} bytes of {self._memory} memory"
        try:
            return self._asking(what, self.agent.register_memory, regions, self._memory, self._backends)
        except TransportError as error:
            raise NotRegistrable(str(error)) from error

    def _initialize(self, peer: _Peer, local: _Descriptors, remote: _Descriptors) -> Any:
        ours = self.agent.get_xfer_descs(local, self._memory)
        theirs = self.agent.get_xfer_descs(remote, peer.metadata.memory)
        what = f"cannot prepare a read of {peer.name}"
        return self._asking(what, self.agent.initialize_xfer, "READ", ours, theirs, peer.name, b"", self._backends)

    def _into_scratch(self, peer: _Peer, num_bytes: int) -> Any:
        """Prepare a read of the first `num_bytes` of a peer's region, or of all of it if it is smaller."""
        known = peer.metadata
        size = min(num_bytes, known.num_bytes)
        ours, theirs = (self._scratch.address, size, self._device), (known.address, size, known.device)
        return self._initialize(peer, [ours], [theirs])

    def _begin_warming(self, peer: _Peer) -> PeerState:
        return PeerState.BROKEN if self._post(peer.warm_read) is ReadState.FAILED else PeerState.CONNECTING

    def _begin_probe(self, peer: _Peer) -> PeerState:
        self._drop(peer.warm_read)
        peer.warm_read = None
        try:
            peer.warm_read = self._into_scratch(peer, PROBE_BYTES)
        except TransportError as error:
            logger.warning("%s", error)
            return PeerState.BROKEN
        peer.rate.begin(time.perf_counter())
        state = self._post(peer.warm_read)
        if state is ReadState.DONE:  # copied before it returned
            return self._end_probe(peer)
        return PeerState.BROKEN if state is ReadState.FAILED else PeerState.CONNECTING

    def _end_probe(self, peer: _Peer) -> PeerState:
        is_last = peer.rate.end(min(PROBE_BYTES, peer.metadata.num_bytes), time.perf_counter())
        return PeerState.CONNECTED if is_last else self._begin_probe(peer)

    def _post(self, handle: Any) -> ReadState:
        return self._checked(self.agent.transfer, handle)

    def _state_of(self, handle: Any) -> ReadState:
        return self._checked(self.agent.check_xfer_state, handle)

    def _checked(self, call: Callable[[Any], str], handle: Any) -> ReadState:
        try:
            said = call(handle)
        except self._errors as error:
            logger.warning("a NIXL read failed: %s", error)
            return ReadState.FAILED
        return {"DONE": ReadState.DONE, "PROC": ReadState.RUNNING}.get(said, ReadState.FAILED)

    def _become(self, read: _Read, state: ReadState) -> None:
        read.state = state
        if state is ReadState.FAILED:
            read.progressed_at = time.monotonic()
            read.peer.state = PeerState.BROKEN
            self._log_ucx()

    def _let_go(self, handle: Any) -> bool:
        try:
            handle.release()
        except self._errors as error:
            logger.warning("NIXL does not release a read yet: %s", error)
            return False
        return True

    def _drop(self, handle: Any) -> None:
        """Release a read into the scratch: now, or in `progress` if NIXL does not release it yet."""
        if not self._let_go(handle):
            self._lingering.append(handle)

    def _load(self, metadata: _Metadata) -> str:
        name = self._asking("cannot load a peer's metadata", self.agent.add_remote_agent, metadata.nixl)
        name = name.decode() if isinstance(name, bytes) else name
        self._known[name] += 1
        return name

    def _take_notifications(self) -> None:
        for name, messages in self.agent.get_new_notifs().items():
            self._arrived += [(name, message) for message in messages]

    def _asking(self, what: str, call: Callable[..., T], *arguments: object) -> T:
        try:
            return call(*arguments)
        except self._errors as error:
            raise TransportError(f"{what}: {error}") from error

    def _log_ucx(self) -> None:
        _ucx_log.drain()


_abandoned: list[NixlTransport] = []


def errors_of(bindings: Any) -> tuple[type[Exception], ...]:
    """Return NIXL's exceptions, which have no common base class."""
    return tuple(kind for name, kind in vars(bindings).items() if name.startswith("nixl") and name.endswith("Error"))


def import_nixl() -> tuple[Any, Any]:
    """Import NIXL late, because everything else works without it and UCX must load while its log is captured."""
    try:
        from nixl import _api, _bindings
    except ImportError as error:
        raise TransportError(f"NIXL cannot be imported ({error}); install `nixl`") from error
    return _bindings, _api


def _descriptors(addresses: NDArray[np.uint64], lengths: NDArray[np.uint64], device: int) -> _Descriptors:
    return np.column_stack((addresses, lengths, np.full_like(lengths, device)))
