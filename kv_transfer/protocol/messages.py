"""Messages between engines about blocks, and the state machines' actions. A hand-off begins with a `ticket`.

    reader                                holder
      HandshakeRequest -------------------->        do our layouts match?
        <-------------------- HandshakeAccepted     how to reach my memory (or HandshakeRefused: why not)
      Claim ------------------------------->        I am reading the blocks of this ticket
        <------------------------------ Granted     I keep them for lease_s from when you sent that (or ClaimRefused)
        <-------------------------------- Grown     this many blocks of the growing offer are written by now
      Renew ------------------------------->        I am not done
        <------------------------------ Granted
      AskDigests -------------------------->        I have read all blocks: what are their digests? (only to verify)
        <------------------------------ Digests     of some blocks; when they match, the reader asks for the next ones
        <---------------------------- Withdrawn     please give up
      Finish | AbortRead ------------------>        I do not need the blocks any more

A message for another process, request or attempt is counted and dropped.

The state machines have no sockets and no memory. Their outputs are actions, such as to send a message.

The bytes come from other processes. Whatever they hold, decoding returns a valid message or raises `MalformedMessage`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.engine.core.connector import ConnectorEvent, TransferId

from .. import codec
from ..codec import BlockNumber, Id, Name, Reason

MAX_METADATA_BYTES = 1 << 20
MAX_LEASE_S = 86400.0
MAX_DIGESTS_BYTES = 1 << 20  # in one message; a channel takes messages of four times that size
DIGEST_BLOCKS = 1024  # in one message, or in one order to a rank, which must not be silent for long while it digests

LastBlocks = Annotated[tuple[BlockNumber, ...], Meta(max_length=64)]  # they replace as many at the end
Seconds = Annotated[float, Meta(gt=0, le=MAX_LEASE_S)]


class DigestMode(enum.StrEnum):
    """The setting `transfer.digest`: "verify" compares blocks with the holder's before they are used."""

    OFF = "off"
    VERIFY = "verify"


class EngineKey(msgspec.Struct, frozen=True, array_like=True):
    """One process of an engine. `epoch` is random per start, so a restarted engine has another key."""

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
    """`sender` is the engine to which the request was addressed, even if another one answers at that address."""

    sender: EngineKey
    to: EngineKey
    reason: Reason


class LeaseMessage(msgspec.Struct, frozen=True, array_like=True):
    """A message about one offer of one process and one receive of another."""

    lease: LeaseKey
    reader: ReaderKey


class Claim(LeaseMessage, frozen=True, tag=3):
    number: Id  # counts the claims and renewals of a receive; the grant repeats the number that it answers


class Renew(LeaseMessage, frozen=True, tag=4):
    number: Id


class Granted(LeaseMessage, frozen=True, tag=5):
    """The holder keeps the blocks for at least `lease_s` from when the reader sent message `number`."""

    number: Id
    lease_s: Seconds
    num_ready: Id  # leading blocks of the offer that are written
    last_blocks: LastBlocks = ()  # the final numbers of the last blocks, if the ticket could not have them yet


class ClaimRefused(LeaseMessage, frozen=True, tag=6):
    reason: Reason
    offer_ended: bool = False  # it expired or was withdrawn, which says nothing against its holder


class Withdrawn(LeaseMessage, frozen=True, tag=7):
    """The holder wants its blocks before the lease ends. It still waits for `AbortRead` or `Finish`."""


class Finish(LeaseMessage, frozen=True, tag=8):
    """The reader has read all blocks."""


class AbortRead(LeaseMessage, frozen=True, tag=9):
    """The reader has given up."""


class Grown(LeaseMessage, frozen=True, tag=10):
    """More blocks of a growing offer are written. Only the leading `num_ready` blocks may be read yet."""

    num_ready: Id
    last_blocks: LastBlocks = ()  # as in `Granted`


class AskDigests(LeaseMessage, frozen=True, tag=11):
    """Asks for digests of the offer's blocks from index `first` on. The reader repeats it until the answer comes."""

    first: Id


class Digests(LeaseMessage, frozen=True, tag=12):
    """Digests of `count` of the offer's blocks from index `first` on, by rank of the holder (`rank_reader.py`)."""

    first: Id
    count: Annotated[int, Meta(ge=1, le=DIGEST_BLOCKS)]
    by_rank: tuple[bytes, ...]

    def __post_init__(self) -> None:
        num_bytes = sum(map(len, self.by_rank))
        if num_bytes > MAX_DIGESTS_BYTES:
            raise ValueError(f"digests of {num_bytes} bytes, at most {MAX_DIGESTS_BYTES} are allowed")


FromReader = Claim | Renew | AskDigests | Finish | AbortRead
FromHolder = Granted | Grown | ClaimRefused | Withdrawn | Digests
Message = HandshakeRequest | HandshakeAccepted | HandshakeRefused | FromReader | FromHolder

encode: Callable[[Message], bytes] = codec.encode
decode: Callable[[bytes], Message] = codec.decoder(Message, "transfer message")


class SendToReader(msgspec.Struct, frozen=True):
    to: EngineKey
    message: FromHolder


class SendToHolder(msgspec.Struct, frozen=True):
    to: EngineKey
    message: FromReader


class Emit(msgspec.Struct, frozen=True):
    """Pass an event to the engine."""

    event: ConnectorEvent


class ReadBlocks(msgspec.Struct, frozen=True):
    """Read the next blocks of a receive, those with index [start, stop). The first such action begins the read.

    The answer is `read_finished` when all blocks of the receive are here, or `read_failed` and then `read_released`.
    """

    receive: TransferId
    start: int
    stop: int


class StopReading(msgspec.Struct, frozen=True):
    """Begin no further read for a receive. `read_released` follows once nothing can write into its blocks any more."""

    receive: TransferId


class CompareDigests(msgspec.Struct, frozen=True):
    """Compare some of the blocks that were read with the holder's digests. The answer is `matched` or `corrupt`."""

    receive: TransferId
    digests: Digests


Action = SendToReader | SendToHolder | Emit | ReadBlocks | StopReading | CompareDigests
