"""Read one rank's KV heads of blocks from the ranks of a holder that keep them.

Here a peer is a whole group of ranks, and a read is one list of blocks. For the transport below, the peer is several
agents and the read several lists of byte ranges. The caller chooses the handles of peers and reads, so that all ranks
of a group use the same ones.
"""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import numpy as np
import xxhash
from msgspec import Meta

from baton.engine.core.layout import KVLayout, Piece, StateLayout, UnevenHeads
from baton.engine.core.regions import ArenaRegion, CacheRegion, first_blocks

from .. import codec
from ..block_copies import device_blocks
from ..codec import BlockNumber, Id
from ..descriptors import HeadSlice, arenas_of, assign_heads, block_ranges, slice_heads
from ..errors import MalformedMessage, TransportError
from ..protocol.block_runs import BlockNumbers
from ..transports import Lane, PeerHandle, PeerState, RangeTable, ReadHandle, ReadState, Transport, slowest
from .rpc import MAX_RANKS

Blocks = Sequence[int] | BlockNumbers
State = TypeVar("State", PeerState, ReadState)

# From best to worst. The state of a peer or read is the worst among its parts.
_SEVERITY: tuple[PeerState | ReadState, ...] = (
    *(PeerState.CONNECTED, PeerState.CONNECTING, PeerState.BROKEN),
    *(ReadState.DONE, ReadState.RUNNING, ReadState.FAILED),
)


class ArenaPlace(msgspec.Struct, frozen=True, array_like=True):
    """The position of one cache group's blocks in a rank's memory."""

    offset: Id  # bytes from the start of the memory
    num_blocks: BlockNumber


class RankMemory(msgspec.Struct, frozen=True, array_like=True):
    """The description of one rank's memory with which other engines read its share of the blocks."""

    first_head: Annotated[int, Meta(ge=0, lt=2**16)]  # in the first cache group
    num_heads: Annotated[int, Meta(ge=1, lt=2**16)]
    transport: bytes  # its transport's metadata
    arenas: Annotated[tuple[ArenaPlace, ...], Meta(max_length=64)] = ()  # one for each cache group, if several

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.num_heads)


_Group = Annotated[list[RankMemory], Meta(min_length=1, max_length=MAX_RANKS)]
_decode_group: Callable[[bytes], list[RankMemory]] = codec.decoder(_Group, "metadata of a group's ranks")


def group_metadata(ranks: Sequence[RankMemory]) -> bytes:
    """Encode the metadata with which a peer's `add_peer` connects to a whole group."""
    return codec.encode(ranks)


def worst(states: Iterable[State]) -> State:
    return max(states, key=_SEVERITY.index)


class _Share(NamedTuple):
    """Heads of one cache group that we read from one rank of a holder."""

    heads: range
    kept: range  # all heads that this rank of the holder keeps
    slice: HeadSlice


@dataclasses.dataclass(slots=True)
class _RankSource:
    """One rank of a holder from which we read some of our heads."""

    peer: PeerHandle
    rank: int
    shares: list[list[_Share]]  # by cache group
    places: Sequence[ArenaPlace]  # by cache group, in its memory


@dataclasses.dataclass(slots=True)
class _GroupRead:
    parts: list[ReadHandle]  # the transport's reads that are not released yet
    state: ReadState = ReadState.RUNNING
    reason: str = ""


class RankReader:
    """Reads blocks into `region` through `transport`, with which the region is registered.

    `block_bytes` returns the bytes of a block, for tests whose region has no address. `staged`: the region holds
    staging slots.
    """

    def __init__(
        self,
        rank: int,
        region: CacheRegion,
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
        self._first_blocks = region.first_blocks
        self._heads_at = [_pieces_of_heads(arena) for arena in region.arenas]
        self._peers: dict[PeerHandle, list[_RankSource]] = {}
        self._reads: dict[ReadHandle, _GroupRead] = {}
        self.num_bytes = 0  # bytes of all reads since the start
        self.num_descriptors = 0

    @property
    def transport_name(self) -> str:
        return self._transport.name

    @property
    def num_fallbacks(self) -> int:
        return self._transport.num_fallbacks

    @property
    def memory(self) -> RankMemory:
        first, metadata = self.region.arenas[0], self._transport.metadata()
        places = self._places if len(self.region.arenas) > 1 else ()
        return RankMemory(first.first_head, first.num_heads, metadata, places)

    @property
    def _places(self) -> tuple[ArenaPlace, ...]:
        offsets = zip(self.region.offsets, self.region.arenas, strict=True)
        return tuple(ArenaPlace(offset, arena.num_blocks) for offset, arena in offsets)

    def add_peer(self, peer: PeerHandle, metadata: bytes) -> None:
        """Begin to connect to those ranks of a group that this one will read.

        Raises `MalformedMessage` or `TransportError` for invalid metadata, and then has begun nothing.
        """
        holders = _decode_group(metadata)
        shares = self._shares(holders)
        sources: list[_RankSource] = []
        try:
            for rank, of_rank in shares.items():
                places = self._places_of(holders[rank])
                sources.append(_RankSource(self._transport.add_peer(holders[rank].transport), rank, of_rank, places))
        except Exception:
            for source in sources:
                self._transport.remove_peer(source.peer)
            raise
        self._peers[peer] = sources

    def _shares(self, holders: Sequence[RankMemory]) -> dict[int, list[list[_Share]]]:
        """Return by rank of the holder the shares to read from it. Raises `TransportError`."""
        shares: dict[int, list[list[_Share]]] = {}
        for group, arena in enumerate(self.region.arenas):
            kept = _kept_by(holders, group, arena.layout)
            for rank, heads in assign_heads(self.rank, arena.heads, kept):
                piece = slice_heads(arena.layout, heads, kept[rank], arena.heads)
                of_rank = shares.setdefault(rank, [[] for _ in self.region.arenas])
                of_rank[group].append(_Share(heads, kept[rank], piece))
        return shares

    def _places_of(self, holder: RankMemory) -> Sequence[ArenaPlace]:
        num_groups = len(self.region.arenas)
        if num_groups == 1:
            return ()  # the only arena begins where the memory does
        if len(holder.arenas) != num_groups:
            raise TransportError(f"the holder describes {len(holder.arenas)} cache groups, there are {num_groups}")
        return holder.arenas

    def peer_state(self, peer: PeerHandle) -> PeerState:
        return worst(self._transport.peer_state(source.peer) for source in self._peers[peer])

    def lane(self, peer: PeerHandle) -> Lane | None:
        """Return the slowest lane over which this rank reads the peer's ranks. None: none is connected."""
        return slowest(self._transport.lane(source.peer) for source in self._peers[peer])

    def remove_peer(self, peer: PeerHandle) -> None:
        """Forget a peer. No read of it may be left."""
        for source in self._peers.pop(peer):
            self._transport.remove_peer(source.peer)

    def read(self, read: ReadHandle, peer: PeerHandle, source_blocks: Blocks, blocks: Blocks) -> None:
        """Begin to read the peer's `source_blocks` into as many `blocks` of ours."""
        entry = self._reads[read] = _GroupRead([])
        for source in self._peers[peer]:
            try:
                ranges = self._ranges(source, source_blocks, blocks)
                if not len(ranges):
                    continue
                entry.parts.append(self._transport.read(source.peer, ranges))
            except TransportError as error:
                entry.state, entry.reason = ReadState.FAILED, str(error)
                return
            self.num_bytes += int(ranges[:, 2].sum())
            self.num_descriptors += len(ranges)

    def _ranges(self, source: _RankSource, source_blocks: Blocks, blocks: Blocks) -> RangeTable:
        """Return the byte ranges of these blocks in one rank's memory and in ours.

        Raises `TransportError` if a block of one cache group would be read into a block of another.
        """
        if len(self.region.arenas) == 1:
            tables = [block_ranges(source_blocks, blocks, share.slice) for share in source.shares[0]]
            return tables[0] if len(tables) == 1 else np.concatenate(tables)
        theirs, ours = np.asarray(source_blocks, dtype=np.int64), np.asarray(blocks, dtype=np.int64)
        their_firsts = first_blocks([place.num_blocks for place in source.places])
        groups = arenas_of(self._first_blocks, ours)
        if not np.array_equal(groups, arenas_of(their_firsts, theirs)):
            raise TransportError("blocks of the holder are of other cache groups than ours")
        tables = [np.empty((0, 3), dtype=np.int64)]
        offsets = self.region.offsets
        for group in np.unique(groups).tolist():
            some = groups == group
            own = ours[some] - self._first_blocks[group]
            their = theirs[some] - their_firsts[group]
            for share in source.shares[group]:
                tables.append(block_ranges(their, own, share.slice, source.places[group].offset, offsets[group]))
        return np.concatenate(tables)

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
        """Return the digests of our heads of these blocks, padded to the most heads that a cache group has.

        Raises `MalformedMessage` for a block that does not exist.
        """
        if any(not 0 <= block < self.region.num_blocks for block in blocks):
            raise MalformedMessage(f"blocks {list(blocks)} are to be digested, and there are {self.region.num_blocks}")
        if self._block_bytes is None:
            self._block_bytes = region_bytes(self.region)
        groups = arenas_of(self._first_blocks, blocks).tolist()
        width = max(map(len, self._heads_at)) * DIGEST_BYTES
        found = (
            digests_of(bytes(self._block_bytes(block)), self._heads_at[group])
            for block, group in zip(blocks, groups, strict=True)
        )
        return b"".join(digests.ljust(width, b"\0") for digests in found)

    def difference(self, peer: PeerHandle, blocks: Sequence[int], by_rank: Sequence[bytes]) -> str:
        """Compare our blocks with the digests of the peer's ranks. Returns the first difference, or an empty string.

        Raises the errors of `digests`.
        """
        ours, width = self.digests(blocks), max(map(len, self._heads_at))
        groups = arenas_of(self._first_blocks, blocks).tolist()
        for source in self._peers[peer]:
            theirs = by_rank[source.rank] if source.rank < len(by_rank) else b""
            their_width, rest = divmod(len(theirs), max(1, len(blocks)) * DIGEST_BYTES)
            if rest or their_width < max(len(share.kept) for shares in source.shares for share in shares):
                return f"the holder's rank {source.rank} sent {len(theirs)} bytes of digests for {len(blocks)} blocks"
            for number, (block, group) in enumerate(zip(blocks, groups, strict=True)):
                first = self.region.arenas[group].first_head
                for share in source.shares[group]:
                    for head in share.heads:
                        mine = (number * width + head - first) * DIGEST_BYTES
                        other = (number * their_width + head - share.kept.start) * DIGEST_BYTES
                        if ours[mine : mine + DIGEST_BYTES] != theirs[other : other + DIGEST_BYTES]:
                            return f"block {block}, KV head {head} is not what the holder's rank {source.rank} has"
        return ""

    def progress(self) -> None:
        """Serve peers that read our memory over lanes that need our CPU."""
        self._transport.progress()

    def close(self) -> None:
        self._transport.close()

    def _release_part(self, part: ReadHandle) -> bool:
        """Release a part if it has ended. It may still run although another part has failed."""
        return self._transport.poll(part) is not ReadState.RUNNING and self._transport.release(part)


DIGEST_BYTES = 8

BlockBytes = Callable[[int], bytes | bytearray | memoryview]  # returns a rank's share of a block


def region_bytes(region: CacheRegion) -> BlockBytes:
    """Return a function that reads blocks of a region. It copies GPU memory to the host block by block."""
    readers, firsts = [_arena_bytes(arena) for arena in region.arenas], region.first_blocks

    def read(block: int) -> bytes:
        arena = bisect.bisect_right(firsts, block) - 1
        return readers[arena](block - firsts[arena])

    return readers[0] if len(readers) == 1 else read


def _arena_bytes(arena: ArenaRegion) -> Callable[[int], bytes]:
    size = arena.block_bytes
    if arena.device == "cpu":
        return lambda block: bytes((ctypes.c_char * size).from_address(arena.address + block * size).raw)
    blocks = device_blocks(arena)
    return lambda block: bytes(blocks[block].cpu().numpy().tobytes())


def digests_of(content: bytes, heads: Sequence[Sequence[Piece]]) -> bytes:
    """Return the digests of a rank's share of a block, one for each head. `heads` has the pieces of each."""
    return b"".join(
        xxhash.xxh3_64_digest(b"".join(content[piece.offset : piece.offset + piece.num_bytes] for piece in pieces))
        for pieces in heads
    )


def _pieces_of_heads(arena: ArenaRegion) -> Sequence[Sequence[Piece]]:
    return [arena.layout.sections(arena.heads, range(head, head + 1)) for head in arena.heads]


def _kept_by(holders: Sequence[RankMemory], group: int, layout: KVLayout | StateLayout) -> Sequence[range]:
    """Return the heads of a cache group that each rank of a holder keeps. Raises `TransportError`."""
    if group == 0:
        return [holder.heads for holder in holders]
    try:
        return [layout.heads_of(rank, len(holders)) for rank in range(len(holders))]
    except UnevenHeads as error:
        raise TransportError(str(error)) from error
