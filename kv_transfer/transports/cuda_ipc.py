"""A transport between GPUs of one machine: we map the peer's blocks into our process, and our own GPU copies them.

    holder    allocates its blocks ── handle of the allocation ──> metadata
    reader    add_peer: open the handle, check the nonce, time copies of blocks  ──> CONNECTED
              read: one kernel or a few copies in a stream of their own          ──> event reached: DONE

Between two processes on one GPU, UCX goes over TCP (0.4 GB/s on an H200). A mapping is read at the speed of the memory,
and over NVLink at the speed of the link.

* The holder takes no part in a read: `progress` does nothing.
* The driver keeps an allocation while another process has it mapped, even after its owner has died. So a read of a dead
  peer succeeds; whether its bytes may be used is decided by the lease, as always. `remove_peer` frees the memory, once
  the probe has ended: a thread of its own waits for one that hangs.
* A peer describes its memory as a part of an allocation. The driver knows how large that is, and a copy of more would
  be an illegal access, which ends our process. So a description that does not fit is refused when it is mapped.
* A handle does not prove whose memory it opens: `CUDA_VISIBLE_DEVICES` may number devices differently on both sides.
  The nonce in the probe buffer proves that the mapping is the peer's memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta

from .. import codec
from ..devices import use_device
from ..errors import NotRegistrable, TransportError
from . import Lane, Memory, PeerHandle, PeerState, Ranges, ReadHandle, ReadState
from .common import RangeTable, check_ranges
from .range_copies import ALIGNMENT, GpuCopies, GpuCopy

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

NAME = "cuda_ipc"
PROBE_BYTES = 8 << 20
PROBE_COPIES = 64  # of `PROBE_BYTES` each: they take 0.3 ms within a GPU, 20 ms over PCIe
NONCE_BYTES = 16
LIKELY_REASONS = "its process has ended, is in a container with an IPC namespace of its own, or on a GPU out of reach"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_Offset = Annotated[int, Meta(ge=0, lt=2**62)]
_Length = Annotated[int, Meta(ge=ALIGNMENT, lt=2**62)]


class _Shared(msgspec.Struct, frozen=True, array_like=True):
    """A part of an allocation that other processes can open."""

    handle: Annotated[bytes, Meta(min_length=64, max_length=64)]
    offset: _Offset
    num_bytes: _Length


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    """The metadata with which a peer maps our memory."""

    name: str
    machine: str
    device: str  # UUID of the GPU
    blocks: _Shared
    probe: _Shared
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


decode_metadata: Callable[[bytes], _Metadata] = codec.decoder(_Metadata, "metadata of a CUDA IPC peer")


@dataclasses.dataclass(slots=True)
class _Peer:
    metadata: _Metadata
    blocks: _Mapping
    probe: _Mapping
    probe_events: list[torch.cuda.Event]  # before, between and after the two timed copies
    probe_bytes: int  # difference in size of the two copies
    nonce: torch.Tensor  # read from the peer's memory; valid once the probe has ended
    copies: list[GpuCopy]  # of the probe
    state: PeerState = PeerState.CONNECTING
    bytes_per_s: float | None = None

    @property
    def is_probed(self) -> bool:
        """True once nothing of the probe runs any more. Raises `RuntimeError` for a device's error."""
        return self.probe_events[-1].query()

    def unmap(self) -> None:
        """Unmap its memory, which no copy may use any more."""
        self.blocks.close()
        self.probe.close()


@dataclasses.dataclass(slots=True)
class _Read:
    copy: GpuCopy
    state: ReadState = ReadState.RUNNING


class _Mapping:
    """Another process's allocation, mapped into this one until `close`."""

    def __init__(self, shared: _Shared, content: str) -> None:
        """Map it. Raises `TransportError` if that fails, or if `content` is not within it."""
        from baton.kernels.p2p.cuda_ipc import DeviceMemory, DriverError

        try:
            self._memory = DeviceMemory.open(shared.handle)
        except DriverError as error:
            raise TransportError(f"its memory cannot be mapped ({error}): {LIKELY_REASONS}") from error
        try:
            allocation_bytes = self._memory.num_bytes()
        except DriverError as error:
            logger.info("the size of a peer's memory is not known, what it describes is believed: %s", error)
            allocation_bytes = shared.offset + shared.num_bytes
        try:
            check_shared(shared.offset, shared.num_bytes, allocation_bytes, content)
        except TransportError:
            self.close()
            raise
        self.address = self._memory.address + shared.offset

    def close(self) -> None:
        from baton.kernels.p2p.cuda_ipc import DriverError

        try:
            self._memory.free()
        except DriverError as error:
            logger.warning("a peer's memory stays mapped: %s", error)


class CudaIpcTransport:
    """A `Transport` between GPUs of one machine. One thread makes, uses and closes it.

    Raises `NotRegistrable` if the region cannot be shared with other processes.
    """

    name = NAME
    num_fallbacks = 0

    def __init__(self, region: Memory, agent_name: str) -> None:
        device = use_device(region.device)
        if device is None:
            raise NotRegistrable("blocks in the host's memory are not shared by CUDA IPC")
        import torch

        self._device = device
        self._num_bytes = region.num_bytes
        self._address = region.address
        self._uuid = str(torch.cuda.get_device_properties(device).uuid)
        self._copies = GpuCopies(device)
        self._probe = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=region.device)
        self._scratch = torch.empty_like(self._probe)
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._probe[:NONCE_BYTES].copy_(torch.frombuffer(bytearray(nonce), dtype=torch.uint8))
        torch.cuda.synchronize(device)
        self._machine = _BOOT_ID.read_text().strip()
        blocks, probe = _shared(region.address, region.num_bytes), _shared(self._probe.data_ptr(), PROBE_BYTES)
        self._metadata = codec.encode(_Metadata(agent_name, self._machine, self._uuid, blocks, probe, nonce))
        self._ids = itertools.count(1)
        self._peers: dict[PeerHandle, _Peer] = {}
        self._reads: dict[ReadHandle, _Read] = {}
        self._copies.compile(self._probe.data_ptr(), self._scratch.data_ptr())

    def metadata(self) -> bytes:
        return self._metadata

    def add_peer(self, metadata: bytes) -> PeerHandle:
        known = decode_metadata(metadata)
        if known.machine != self._machine:
            raise TransportError(f"{known.name} is on another machine")
        blocks = _Mapping(known.blocks, "blocks")
        try:
            probe = _Mapping(known.probe, "probe buffer")
        except TransportError:
            blocks.close()
            raise
        handle = next(self._ids)
        self._peers[handle] = self._begin_probe(known, blocks, probe)
        return handle

    def peer_state(self, peer: PeerHandle) -> PeerState:
        known = self._peers[peer]
        if known.state is PeerState.CONNECTING and known.is_probed:
            self._judge_probe(known)
        return known.state

    def lane(self, peer: PeerHandle) -> Lane:
        return Lane(self.name, self._peers[peer].bytes_per_s)

    def is_same_device(self, peer: PeerHandle) -> bool:
        return self._peers[peer].metadata.device == self._uuid

    def remove_peer(self, peer: PeerHandle) -> None:
        known = self._peers.pop(peer)
        if _has_no_copies(known):
            known.unmap()
        else:  # memory must not be unmapped during a copy, and a peer that hangs must not hold the caller
            name = f"baton-unmap-{known.metadata.name}"
            threading.Thread(target=_unmap_later, args=(known, self._device), name=name, daemon=True).start()

    def read(self, peer: PeerHandle, ranges: Ranges) -> ReadHandle:
        known = self._peers[peer]
        table = check_ranges(ranges, self._num_bytes, known.metadata.blocks.num_bytes, known.metadata.name)
        try:
            entry = _Read(self._copies.begin(table + np.array((known.blocks.address, self._address, 0))))
        except RuntimeError as error:  # torch and Triton raise it for errors of the driver
            known.state = PeerState.BROKEN
            raise TransportError(f"the GPU refuses to copy from {known.metadata.name}: {error}") from error
        read = next(self._ids)
        self._reads[read] = entry
        return read

    def poll(self, read: ReadHandle) -> ReadState:
        entry = self._reads[read]
        if entry.state is ReadState.RUNNING:
            try:
                entry.state = ReadState.DONE if self._copies.has_ended(entry.copy) else ReadState.RUNNING
            except RuntimeError as error:  # a CUDA error: nothing runs on this device any more
                logger.error("a copy between GPUs failed: %s", error)
                entry.state = ReadState.FAILED
        return entry.state

    def release(self, read: ReadHandle) -> bool:
        entry = self._reads[read]
        assert entry.state is not ReadState.RUNNING, "a read that runs may still write"
        del self._reads[read]
        return True

    def progress(self) -> None:
        """Do nothing: peers read our memory without our help."""

    def close(self) -> None:
        self._copies.wait()
        for peer in list(self._peers):
            self.remove_peer(peer)

    def _begin_probe(self, known: _Metadata, blocks: _Mapping, probe: _Mapping) -> _Peer:
        """Copy the nonce, then time two copies of blocks, of a few and of many: both take the same time to launch.

        They copy different blocks if there are enough, because caches make a second copy of the same blocks faster.
        """
        import torch

        nonce = torch.empty(NONCE_BYTES, dtype=torch.uint8, device=self._scratch.device)
        size = min(PROBE_BYTES, known.blocks.num_bytes) // ALIGNMENT * ALIGNMENT
        starts = (copy % (known.blocks.num_bytes // size) * size for copy in range(PROBE_COPIES))
        pieces = _rows(*((blocks.address + start, self._scratch.data_ptr(), size) for start in starts))
        parts = [
            self._copies.launch(_rows((probe.address, nonce.data_ptr(), NONCE_BYTES))),
            self._copies.launch(pieces),
        ]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record(self._copies.stream)
        parts.append(self._copies.launch(pieces[:1]))
        events[1].record(self._copies.stream)
        parts.append(self._copies.launch(pieces))
        events[2].record(self._copies.stream)
        return _Peer(known, blocks, probe, events, size * (PROBE_COPIES - 1), nonce, parts)

    def _judge_probe(self, peer: _Peer) -> None:
        for copy in peer.copies:
            self._copies.has_ended(copy)
        peer.copies.clear()
        if bytes(peer.nonce.tolist()) != peer.metadata.nonce:
            logger.warning(
                "the memory mapped through CUDA IPC is not that of %s: CUDA IPC is not used for it", peer.metadata.name
            )
            peer.state = PeerState.BROKEN
            return
        before, between, behind = peer.probe_events
        few_ms, many_ms = before.elapsed_time(between), between.elapsed_time(behind)
        milliseconds = many_ms - few_ms if many_ms > 2 * few_ms else many_ms  # else the first was held up
        peer.bytes_per_s = peer.probe_bytes / max(milliseconds, 1e-3) * 1e3
        peer.state = PeerState.CONNECTED


def check_shared(offset: int, num_bytes: int, allocation_bytes: int, content: str) -> None:
    """Raise `TransportError` unless a peer's memory is within its allocation, where the copy kernel can read it.

    `content` names the memory in the error.
    """
    if num_bytes < 1 or not 0 <= offset <= allocation_bytes - num_bytes:
        raise TransportError(
            f"its {content}, {num_bytes} bytes at {offset},"
            f" are outside the {allocation_bytes} bytes of their allocation"
        )
    if offset % ALIGNMENT:
        raise TransportError(f"its {content} begin at {offset} of their allocation, not at a multiple of {ALIGNMENT}")


def _has_no_copies(peer: _Peer) -> bool:
    try:
        return peer.is_probed
    except RuntimeError as error:
        logger.error("the probe of %s failed: %s", peer.metadata.name, error)
        return True  # nothing runs on this device any more


def _unmap_later(peer: _Peer, device: int) -> None:
    """Unmap a peer's memory when its probe has ended, however long that takes."""
    use_device(f"cuda:{device}")
    try:
        peer.probe_events[-1].synchronize()
    except RuntimeError as error:
        logger.error("the probe of %s failed: %s", peer.metadata.name, error)
    peer.unmap()


def _shared(address: int, num_bytes: int) -> _Shared:
    """Return the description with which other processes open this memory. Raises `NotRegistrable`."""
    from baton.kernels.p2p.cuda_ipc import DriverError, shared_handle

    try:
        handle, offset = shared_handle(address)
    except DriverError as error:
        raise NotRegistrable(f"the GPU's memory cannot be shared with other processes: {error}") from error
    return _Shared(handle, offset, num_bytes)


def _rows(*pieces: tuple[int, int, int]) -> RangeTable:
    return np.array(pieces, dtype=np.int64)
