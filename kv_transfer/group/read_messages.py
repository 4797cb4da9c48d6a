"""Orders and reports of reads within one tensor-parallel group. Joining and giving up are in `rpc`.

rank 0                              another rank
  AddPeer, RemovePeer ----------->
  <------------------------------ PeerReport    whenever the state of a peer, or its lane, changes
  StartRead --------------------->
  <------------------------------ ReadReport    when the read has ended, and again if it is released later
  MakeDigests, CompareBlocks ---->              (only if blocks are verified)
  <------------------------------ CheckReport   the digests, or the first difference from the holder's
  MakeProgress ------------------>              peers may be reading this rank's memory
  <------------------------------ Alive
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ..codec import Id, Name, Reason
from ..protocol.messages import MAX_DIGESTS_BYTES, MAX_METADATA_BYTES
from ..transports import Lane, PeerState, ReadState
from .rank_reader import RankMemory
from .rpc import Service

MAX_ORDER_BLOCKS = 1 << 16  # in one order, whose two numbers for each block take 1.2 MB at most

CheckHandle = int

Metadata = Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)]
Blocks = Annotated[list[Id], Meta(min_length=1, max_length=MAX_ORDER_BLOCKS)]
MaybeBlocks = Annotated[list[Id], Meta(max_length=MAX_ORDER_BLOCKS)]
Digest = Annotated[bytes, Meta(max_length=MAX_DIGESTS_BYTES)]


class ReadDetails(msgspec.Struct, frozen=True, array_like=True):
    """The description of its memory that a rank sends to rank 0 when it joins."""

    num_blocks: Id
    transport: Name
    memory: RankMemory
    staged: bool = False  # its memory holds staging slots


class PeerReport(msgspec.Struct, frozen=True, array_like=True, tag=10):
    peer: Id
    state: PeerState
    reason: Reason = ""  # why it is broken, if known
    lane: Lane | None = None  # over which the rank reads it; None: it is not connected


class ReadReport(msgspec.Struct, frozen=True, array_like=True, tag=11):
    read: Id
    state: ReadState
    reason: Reason
    released: bool  # nothing can write into its blocks any more
    num_bytes: Id  # of all reads of this rank since its start
    num_descriptors: Id
    num_fallbacks: Id = 0  # of its reads that failed over one transport and began again over another


class CheckReport(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The answer to `MakeDigests` or `CompareBlocks`."""

    check: Id
    digests: Digest = b""
    difference: Reason = ""


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """The answer to `MakeProgress`."""


class AddPeer(msgspec.Struct, frozen=True, array_like=True, tag=10):
    peer: Id
    metadata: Metadata  # of all ranks of the peer


class RemovePeer(msgspec.Struct, frozen=True, array_like=True, tag=11):
    peer: Id


class StartRead(msgspec.Struct, frozen=True, array_like=True, tag=12):
    read: Id
    peer: Id
    source_blocks: Blocks
    blocks: Blocks


class MakeProgress(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Asks a rank to serve peers that read its memory, for `seconds`, and to answer with `Alive`."""

    seconds: Annotated[float, Meta(ge=0, le=3600.0)]


class MakeDigests(msgspec.Struct, frozen=True, array_like=True, tag=14):
    check: Id
    blocks: Blocks


class CompareBlocks(msgspec.Struct, frozen=True, array_like=True, tag=15):
    check: Id
    peer: Id
    blocks: MaybeBlocks
    by_rank: tuple[Digest, ...]  # the digests of the peer's ranks


Order = AddPeer | RemovePeer | StartRead | MakeProgress | MakeDigests | CompareBlocks
Report = PeerReport | ReadReport | CheckReport | Alive

READS = Service.of(Order, Report, ReadDetails)
