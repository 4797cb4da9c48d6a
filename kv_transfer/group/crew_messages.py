"""What the ranks of one group say to each other about reads. Rank 0 orders, the others carry out and report.

    rank 0                              another rank
      <------------------------------ Join        here is my share of the blocks
      AddPeer, RemovePeer ----------->
      <------------------------------ PeerReport  whenever its state is another
      StartRead --------------------->
      <------------------------------ ReadReport  when it has ended; once more if only then it could be released
      MakeDigests, Compare ---------->            (only to verify)
      <------------------------------ CheckReport what these blocks hold, or how they differ from the holder's
      Attend ------------------------>            peers may be reading you; and are you there?
      <------------------------------ Present
      <------------------------------ Farewell    I cannot go on, and why

A connection keeps the order and loses nothing while it lasts; one that breaks is the end of the group. Bytes come from
other processes: whatever they hold, decoding returns a valid message or raises `MalformedMessage`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from .. import codec
from ..codec import Id, Name, Reason
from ..protocol.messages import MAX_DIGESTS_BYTES, MAX_METADATA_BYTES
from ..transports import PeerState, ReadState
from .rank_reader import MAX_RANKS, RankMemory

MAX_ORDER_BLOCKS = 1 << 16  # of one order, in which two numbers a block take 1.2 MB at most

CheckHandle = int

Metadata = Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)]
Blocks = Annotated[list[Id], Meta(min_length=1, max_length=MAX_ORDER_BLOCKS)]
MaybeBlocks = Annotated[list[Id], Meta(max_length=MAX_ORDER_BLOCKS)]
Digest = Annotated[bytes, Meta(max_length=MAX_DIGESTS_BYTES)]


class Join(msgspec.Struct, frozen=True, array_like=True, tag=0):
    rank: Annotated[int, Meta(ge=1, lt=MAX_RANKS)]
    fingerprint: Name
    num_blocks: Id
    transport: Name
    memory: RankMemory
    buffered: bool = False  # these are places of a host buffer


class PeerReport(msgspec.Struct, frozen=True, array_like=True, tag=1):
    peer: Id
    state: PeerState
    reason: Reason = ""  # why it is broken, where that is known


class ReadReport(msgspec.Struct, frozen=True, array_like=True, tag=2):
    read: Id
    state: ReadState
    reason: Reason
    released: bool  # nothing can write any more
    num_bytes: Id  # of all reads of this rank since its start
    num_descriptors: Id


class Present(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The answer to `Attend`."""


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag=4):
    reason: Reason


class CheckReport(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The answer to `MakeDigests` or `Compare`."""

    check: Id
    digests: Digest = b""
    objection: Reason = ""


class AddPeer(msgspec.Struct, frozen=True, array_like=True, tag=0):
    peer: Id
    metadata: Metadata  # of all ranks of the peer


class RemovePeer(msgspec.Struct, frozen=True, array_like=True, tag=1):
    peer: Id


class StartRead(msgspec.Struct, frozen=True, array_like=True, tag=2):
    read: Id
    peer: Id
    source_blocks: Blocks
    blocks: Blocks


class Attend(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Make progress for those who read your memory, for this long."""

    seconds: Annotated[float, Meta(ge=0, le=3600.0)]


class MakeDigests(msgspec.Struct, frozen=True, array_like=True, tag=4):
    check: Id
    blocks: Blocks


class Compare(msgspec.Struct, frozen=True, array_like=True, tag=5):
    check: Id
    peer: Id
    blocks: MaybeBlocks
    by_rank: tuple[Digest, ...]  # the peer's


Report = Join | PeerReport | ReadReport | Present | Farewell | CheckReport
Order = AddPeer | RemovePeer | StartRead | Attend | MakeDigests | Compare

encode: Callable[[Report | Order], bytes] = codec.encode
decode_report: Callable[[bytes], Report] = codec.decoder(Report, "report of a rank")
decode_order: Callable[[bytes], Order] = codec.decoder(Order, "order to a rank")
