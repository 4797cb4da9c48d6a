"""Read one rank's KV heads of blocks from all the ranks of a holder that have them.

Here a peer is a whole group of ranks, and a read is one list of blocks; to the transport below they are several agents
and several lists of byte ranges. The caller chooses the handles, so that all ranks of a group use the same ones.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, TypeVar

import msgspec
import xxhash
from msgspec import Meta

from baton.engine.core.layout import KVRegion

from .. import codec
from ..block_copies import device_blocks
from ..descriptors import HeadSlice, assign_heads, block_ranges, slice_heads
from ..errors import MalformedMessage, TransportError
from ..transports import Lane, PeerHandle, PeerState, ReadHandle, ReadState, Transport
from .rpc import MAX_RANKS

State = TypeVar("State", PeerState, ReadState)

# From the best to the worst: the state of a whole is the worst of its parts' states.
_SEVERITY: tuple[PeerState | ReadState, ...] = (
    *(PeerState.CONNECTED, PeerState.CONNECTING, PeerState.BROKEN),
    *(ReadState.DONE, ReadState.RUNNING, ReadState.FAILED),
)


class RankMemory(msgspec.Struct, frozen=True, array_like=True):
    """One rank's memory, as other engines must know it to read its share of the blocks."""

    first_head: Annotated[int, Meta(ge=0, lt=2**16)]
    num_heads: Annotated[int, Meta(ge=1, lt=2**16)]
    transport: bytes  # its transport's metadata

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.num_heads)


_Group = Annotated[list[RankMemory], Meta(min_length=1, max_length=MAX_RANKS)]
_decode_group: Callable[[bytes], list[RankMemory]] = codec.decoder(_Group, "metadata of a group's ranks")


def group_metadata(ranks: Sequence[RankMemory]) -> bytes:
    """Encode what a peer's `add_peer` needs to read a whole group."""
    return codec.encode(ranks)


def worst(states: Iterable[State]) -> State:
    return max(states, key=_SEVERITY.index)


@dataclasses.dataclass(slots=True)
class _RankSource:
    """One rank of a holder from which we read some of our heads."""

    peer: PeerHandle
    slice: HeadSlice
    rank: int
    heads: range  # read from this rank
    kept: range  # all heads that this rank keeps


@dataclasses.dataclass(slots=True)
class _GroupRead:
    parts: list[ReadHandle]  # of the transport, not yet released
    state: ReadState = ReadState.RUNNING
    reason: str = ""


class RankReader:
    """Reads blocks into `region` through `transport`, with which the region is registered.

    `block_bytes` reads a block of the region, for tests whose region has no address. `staged`: the region is that of
    staging slots.
    """

    def __init__(
        self,
        rank: int,
        region: KVRegion,
        transport: Transport,
        block_bytes: BlockBytes | None = None,
        *,
        staged: bool = False,
    ) -> None:
        self.rank = rank
        self.staged = staged
        self.region = region
        self._transport = transport
        self._block_bytes = block_bytes
        self._peers: dict[PeerHandle, list[_RankSource]] = {}
        self._reads: dict[ReadHandle, _GroupRead] = {}
        self.num_bytes = 0  # asked of the transport since the start
        self.num_descriptors = 0

    @property
    def transport_name(self) -> str:
        return self._transport.name

    @property
    def num_fallbacks(self) -> int:
        return self._transport.num_fallbacks

    @property
    def memory(self) -> RankMemory:
        return RankMemory(self.region.first_head, self.region.num_heads, self._transport.metadata())

    def add_peer(self, peer: PeerHandle, metadata: bytes) -> None:
        """Begin to connect to those ranks of a group that this one will read.

        Raises `MalformedMessage` or `TransportError` for metadata that make no sense; nothing was begun then.
        """
        holders = _decode_group(metadata)
        sources: list[_RankSource] = []
        try:
            for assigned in assign_heads(self.rank, self.region.heads, [holder.heads for holder in holders]):
                holder = holders[assigned.holder_rank]
                piece = slice_heads(assigned.heads, holder.heads, self.region.heads, self.region.layout.head_bytes)
                peer_rank = self._transport.add_peer(holder.transport)
                sources.append(_RankSource(peer_rank, piece, assigned.holder_rank, assigned.heads, holder.heads))
        except Exception:
            for source in sources:
                self._transport.remove_peer(source.peer)
            raise
        self._peers[peer] = sources

    def peer_state(self, peer: PeerHandle) -> PeerState:
        return worst(self._transport.peer_state(source.peer) for source in self._peers[peer])

    def lane(self, peer: PeerHandle) -> Lane | None:
        """Return the slowest way in which this rank reads the peer's ranks; None where none is connected."""
        lanes = (self._transport.lane(source.peer) for source in self._peers[peer])
        return min((lane for lane in lanes if lane is not None), key=lambda lane: lane.bytes_per_s or 0.0, default=None)

    def remove_peer(self, peer: PeerHandle) -> None:
        """Forget a peer of which no read is left."""
        for source in self._peers.pop(peer):
            self._transport.remove_peer(source.peer)

    def read(self, read: ReadHandle, peer: PeerHandle, source_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Begin to read the peer's `source_blocks` into our `blocks`, of the same number."""
        entry = self._reads[read] = _GroupRead([])
        for source in self._peers[peer]:
            ranges = block_ranges(source_blocks, blocks, source.slice)
            try:
                entry.parts.append(self._transport.read(source.peer, ranges))
            except TransportError as error:
                entry.state, entry.reason = ReadState.FAILED, str(error)
                return
            self.num_bytes += len(blocks) * source.slice.num_bytes
            self.num_descriptors += len(ranges)

    def poll(self, read: ReadHandle) -> ReadState:
        entry = self._reads[read]
        if entry.state is ReadState.RUNNING:
            entry.state = worst(self._transport.poll(part) for part in entry.parts)
            if entry.state is ReadState.FAILED:
                entry.reason = "the transport lost the connection to the peer's memory"
        return entry.state

    def reason(self, read: ReadHandle) -> str:
        """Return why a FAILED read failed."""
        return self._reads[read].reason

    def release(self, read: ReadHandle) -> bool:
        """Forget a read that is DONE or FAILED. Returns False while it may still write into our region."""
        entry = self._reads[read]
        entry.parts = [part for part in entry.parts if not self._release_part(part)]
        if entry.parts:
            return False
        del self._reads[read]
        return True

    def digests(self, blocks: Sequence[int]) -> bytes:
        """Return the digests of our heads of some blocks. Raises `MalformedMessage` for a block that does not exist."""
        if any(not 0 <= block < self.region.num_blocks for block in blocks):
            raise MalformedMessage(f"blocks {list(blocks)} are to be digested, and there are {self.region.num_blocks}")
        if self._block_bytes is None:
            self._block_bytes = region_bytes(self.region)
        return digests_of(self._block_bytes, blocks, self.region.num_heads)

    def difference(self, peer: PeerHandle, blocks: Sequence[int], by_rank: Sequence[bytes]) -> str:
        """Compare our blocks with the digests of that peer's ranks. Returns the first difference, or an empty string.

        Raises as `digests`.
        """
        ours, num_heads = self.digests(blocks), self.region.num_heads
        for source in self._peers[peer]:
            theirs = by_rank[source.rank] if source.rank < len(by_rank) else b""
            if len(theirs) != len(blocks) * len(source.kept) * DIGEST_BYTES:
                return f"the holder's rank {source.rank} sent {len(theirs)} bytes of digests for {len(blocks)} blocks"
            for number, block in enumerate(blocks):
                for head in source.heads:
                    mine = (number * num_heads + head - self.region.first_head) * DIGEST_BYTES
                    other = (number * len(source.kept) + head - source.kept.start) * DIGEST_BYTES
                    if ours[mine : mine + DIGEST_BYTES] != theirs[other : other + DIGEST_BYTES]:
                        return f"block {block}, KV head {head} is not what the holder's rank {source.rank} has"
        return ""

    def progress(self) -> None:
        """Serve peers that read our memory over lanes that need our CPU."""
        self._transport.progress()

    def close(self) -> None:
        self._transport.close()

    def _release_part(self, part: ReadHandle) -> bool:
        """Release a part that has ended; it may still run where another part has failed."""
        return self._transport.poll(part) is not ReadState.RUNNING and self._transport.release(part)


DIGEST_BYTES = 8

BlockBytes = Callable[[int], bytes | bytearray | memoryview]  # returns a rank's part of a block


def region_bytes(region: KVRegion) -> BlockBytes:
    """Return a function that reads blocks of a region. A GPU's memory is copied to the host block by block."""
    size = region.block_bytes
    if region.device == "cpu":
        return lambda block: (ctypes.c_char * size).from_address(region.address + block * size).raw
    blocks = device_blocks(region)
    return lambda block: blocks[block].cpu().numpy().tobytes()


def digests_of(read: BlockBytes, blocks: Sequence[int], num_heads: int) -> bytes:
    """Return the digests of a rank's parts of some blocks, in order."""
    return b"".join(_digests_of_block(bytes(read(block)), num_heads) for block in blocks)


def _digests_of_block(content: bytes, num_heads: int) -> bytes:
    size = len(content) // num_heads
    shares = (content[at : at + size] for at in range(0, len(content), size))
    return b"".join(xxhash.xxh3_64_digest(share) for share in shares)
