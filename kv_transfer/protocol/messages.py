"""What engines say to each other about blocks, and the ticket that starts it.

    reader                                holder
      HandshakeRequest ------------------------------->        who are you, do our layouts match?
        <------------------------------ HandshakeAccepted     how to reach my memory (or HandshakeRefused: why not)
      Claim ------------------------------->        I read what this ticket offers
        <------------------------------ Granted     held for lease_s from when you sent that (or ClaimRefused)
        <-------------------------------- Grown     so many blocks are written by now (of an offer that grows)
      Renew ------------------------------->        I am not done
        <------------------------------ Granted
      AskDigests -------------------------->        I have read it all: what should it be? (only to verify)
        <------------------------------ Digests     of so many blocks; the next ones are asked for when these match
        <---------------------------- Withdrawn     please give up
      Finish | AbortRead ---------------------->        I need it no longer

An end that does not know itself in a message counts and drops it.

Bytes come from other processes: whatever they hold, decoding returns a valid message or raises `MalformedMessage`.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from .. import codec
from ..codec import Id, Name, Reason
from ..errors import MalformedMessage

TICKET_VERSION = 2
MAX_BLOCKS = 1 << 22  # of one ticket: 67 million tokens
MAX_METADATA_BYTES = 1 << 20
MAX_LEASE_S = 86400.0
MAX_DIGESTS_BYTES = 1 << 20  # of one message, whose channel takes four times as much
DIGEST_BLOCKS = 1024  # of one message, or order within a group, at most: a rank that digests long is heard in between

Count = Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_LEASE_S)]


class DigestMode(enum.StrEnum):
    """Whether a reader proves what it has read before it counts."""

    OFF = "off"
    VERIFY = "verify"


class EngineKey(msgspec.Struct, frozen=True, array_like=True):
    """One process. `epoch` is random per start, so a restarted engine has another key."""

    engine_id: Name
    epoch: Id


class LeaseKey(msgspec.Struct, frozen=True, array_like=True):
    """One offer of one process."""

    holder: EngineKey
    request_id: Name
    generation: Id
    offer: Id  # the holder's transfer id


class ReaderKey(msgspec.Struct, frozen=True, array_like=True):
    """One receive of one process."""

    engine: EngineKey
    receive: Id  # the reader's transfer id


class HandshakeRequest(msgspec.Struct, frozen=True, array_like=True, tag=0):
    sender: EngineKey
    to: EngineKey
    fingerprint: Name
    transport: Name
    digest: DigestMode


class HandshakeAccepted(msgspec.Struct, frozen=True, array_like=True, tag=1):
    sender: EngineKey
    to: EngineKey
    metadata: Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)]  # of the transport


class HandshakeRefused(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Sender is whom the hello was meant for, who may be another than who answers."""

    sender: EngineKey
    to: EngineKey
    reason: Reason


class LeaseMessage(msgspec.Struct, frozen=True, array_like=True):
    """Names both ends: the offer of one process and the receive of one process."""

    lease: LeaseKey
    reader: ReaderKey


class Claim(LeaseMessage, frozen=True, tag=3):
    number: Id  # counts claims and renewals of one receive, so that a grant tells from when it counts


class Renew(LeaseMessage, frozen=True, tag=4):
    number: Id


class Granted(LeaseMessage, frozen=True, tag=5):
    """The blocks stay for at least `lease_s` from when the reader sent message `number`."""

    number: Id
    lease_s: Seconds
    num_ready: Id  # of the offer's blocks, leading ones that are written


class ClaimRefused(LeaseMessage, frozen=True, tag=6):
    reason: Reason


class Withdrawn(LeaseMessage, frozen=True, tag=7):
    """The holder would like its blocks back before the lease ends; it waits for `AbortRead` or `Finish`."""


class Finish(LeaseMessage, frozen=True, tag=8):
    """All is read."""


class AbortRead(LeaseMessage, frozen=True, tag=9):
    """Nothing of it counts."""


class Grown(LeaseMessage, frozen=True, tag=10):
    """Leading blocks of the offer that are written; later ones must not be read yet."""

    num_ready: Id


class AskDigests(LeaseMessage, frozen=True, tag=11):
    """What do the offer's blocks hold, from block `first` of them on? Asked again until the answer comes."""

    first: Id


class Digests(LeaseMessage, frozen=True, tag=12):
    """Of `count` of the offer's blocks from `first` on: for each rank of the holder, of its heads; see `digests.py`."""

    first: Id
    count: Count
    by_rank: tuple[Annotated[bytes, Meta(max_length=MAX_DIGESTS_BYTES)], ...]


FromReader = Claim | Renew | AskDigests | Finish | AbortRead
FromHolder = Granted | Grown | ClaimRefused | Withdrawn | Digests
Message = HandshakeRequest | HandshakeAccepted | HandshakeRefused | FromReader | FromHolder

encode: Callable[[Message], bytes] = codec.encode
decode: Callable[[bytes], Message] = codec.decoder(Message, "transfer message")


class BlockRun(msgspec.Struct, frozen=True, array_like=True):
    """Blocks first, first + 1, ... first + count - 1."""

    first: Id
    count: Count


def runs_of(block_ids: Iterable[int]) -> tuple[BlockRun, ...]:
    """Run-length coding of block ids in their order; ascending neighbours share a run."""
    runs: list[list[int]] = []
    for block in block_ids:
        if runs and block == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([block, 1])
    return tuple(BlockRun(first, count) for first, count in runs)


def blocks_of(runs: Sequence[BlockRun]) -> list[int]:
    return [block for run in runs for block in range(run.first, run.first + run.count)]


class Ticket(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The offer of a prompt's blocks, as it travels through the gateway. Promised for `lease_s` from when it is sent.

    Where it grows, fewer than all blocks are written when it is sent: `num_ready`, from the first on.
    """

    version: int
    lease: LeaseKey
    kv_address: Name  # the holder's control socket
    fingerprint: Name
    transport: Name
    num_tokens: Annotated[int, Meta(ge=1, le=2**40)]
    lease_s: Seconds
    digest: DigestMode
    num_ready: Id
    runs: tuple[BlockRun, ...]
    refusal: Reason = ""  # why nothing is promised after all

    @functools.cached_property  # every step of a hand-off asks, and blocks that lie apart are a run each
    def num_blocks(self) -> int:
        return sum(run.count for run in self.runs)

    @property
    def block_ids(self) -> list[int]:
        return blocks_of(self.runs)

    def encode(self) -> bytes:
        return codec.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Ticket:
        """Raises `MalformedMessage` for bytes that are no ticket of this version."""
        ticket = _decode_ticket(data)
        if ticket.version != TICKET_VERSION:
            raise MalformedMessage(
                f"the ticket has version {ticket.version}, this engine reads version {TICKET_VERSION}"
            )
        if not 1 <= ticket.num_blocks <= MAX_BLOCKS:
            raise MalformedMessage(f"the ticket offers {ticket.num_blocks} blocks; from 1 to {MAX_BLOCKS} are allowed")
        return ticket

    def check_block_size(self, block_size: int) -> None:
        """Raises `MalformedMessage` where the blocks and the tokens do not go together."""
        needed = math.ceil(self.num_tokens / block_size)
        if needed != self.num_blocks:
            raise MalformedMessage(
                f"the ticket offers {self.num_blocks} blocks for {self.num_tokens} tokens;"
                f" blocks of {block_size} need {needed}"
            )


_decode_ticket: Callable[[bytes], Ticket] = codec.decoder(Ticket, "ticket")
