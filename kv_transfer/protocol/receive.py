"""One receive of a reader: its transition table, its data, and the conditions that follow from it.

The table has one row for each pair of state and event that can occur. A receive that is over, COMMITTED or FREED, is
forgotten, and later messages about it use the rows of FREED.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np

from baton.engine.core.connector import TransferId

from .block_runs import BlockNumbers
from .messages import Claim, Digests, ReaderKey, Renew
from .ticket import Ticket


class ReceiveState(enum.Enum):
    RESERVED = enum.auto()
    READING = enum.auto()
    QUARANTINED = enum.auto()
    COMMITTED = enum.auto()
    FREED = enum.auto()


class ReceiveEvent(enum.Enum):
    PEER_READY = "peer is ready"
    PEER_LOST = "peer is lost"  # it may be alive all the same, and gets our messages once it can be reached
    GRANT = "Granted"
    UNASKED = "Granted, Digests that nothing asked for"
    GROWN = "Grown"
    DIGESTS = "Digests"
    REFUSED = "ClaimRefused"
    WITHDRAWN = "Withdrawn"
    READ_FINISHED = "read finished"
    READ_FAILED = "read failed"
    READ_RELEASED = "nothing can write any more"
    MATCHED = "digests match"
    CORRUPT = "digests differ"
    COMPLETE = "all is there, in time"
    TOO_LATE = "all is there, too late"
    ASK_DUE = "time to ask again"
    OVERDUE = "deadline"
    CANCEL = "engine: cancel"
    CLOSE = "engine: close"


class ReceiveOutcome(enum.StrEnum):
    """Outcomes of receives, as counted in `baton_kv_receives_total{outcome}`."""

    RECEIVED = "received"
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"
    FAILED = "failed"
    LOST = "lost"
    CANCELLED = "cancelled"
    CORRUPT = "corrupt"


class Reaction(enum.Enum):
    """Reactions of a reader to an event, in the order in which it carries them out."""

    ASK = "Claim or Renew"
    READ = "read what is written"
    ASK_DIGESTS = "AskDigests"  # if digests are on, all blocks are read, and some are not verified
    VERIFY = "compare"
    RECEIVED = "tell Received"
    FAILED = "tell ReceiveFailed"
    FINISH = "Finish"
    ABORT = "AbortRead"
    STOP = "stop the read"  # if one runs; otherwise the receive leaves QUARANTINED at once
    RELEASED = "tell BlocksReleased"


@dataclasses.dataclass(frozen=True, slots=True)
class ReceiveRow:
    """The consequences of an event in a state."""

    next_state: ReceiveState
    reactions: tuple[Reaction, ...] = ()
    outcome: ReceiveOutcome | None = None
    counted: bool = False  # counted as a stale message, which changes nothing


_RESERVED, _READING, _QUARANTINED, _COMMITTED, _FREED = ReceiveState
_E = ReceiveEvent
_BY_ITSELF = (Reaction.FAILED, Reaction.ABORT, Reaction.STOP)  # the holder may still keep blocks for us
_BY_THE_HOLDER = (Reaction.FAILED, Reaction.STOP)


def _fails(outcome: ReceiveOutcome, *reactions: Reaction) -> ReceiveRow:
    return ReceiveRow(_QUARANTINED, reactions, outcome)


def _stays(state: ReceiveState, *reactions: Reaction) -> ReceiveRow:
    return ReceiveRow(state, reactions)


def _stale(state: ReceiveState, *reactions: Reaction) -> ReceiveRow:
    return ReceiveRow(state, reactions, counted=True)


RECEIVE_TABLE: dict[tuple[ReceiveState, ReceiveEvent], ReceiveRow] = {
    (_RESERVED, _E.PEER_READY): ReceiveRow(_READING, (Reaction.ASK, Reaction.READ)),
    (_RESERVED, _E.PEER_LOST): _fails(ReceiveOutcome.LOST, Reaction.FAILED),
    (_RESERVED, _E.GRANT): _stale(_RESERVED),
    (_RESERVED, _E.UNASKED): _stale(_RESERVED),
    (_RESERVED, _E.GROWN): _stale(_RESERVED),
    (_RESERVED, _E.REFUSED): _stale(_RESERVED),
    (_RESERVED, _E.WITHDRAWN): _stale(_RESERVED),
    (_RESERVED, _E.OVERDUE): _fails(ReceiveOutcome.EXPIRED, Reaction.FAILED),
    (_RESERVED, _E.CANCEL): _fails(ReceiveOutcome.CANCELLED, Reaction.FAILED),
    (_RESERVED, _E.CLOSE): _fails(ReceiveOutcome.FAILED, Reaction.FAILED),
    (_READING, _E.PEER_READY): _stays(_READING),
    (_READING, _E.PEER_LOST): _fails(ReceiveOutcome.LOST, *_BY_ITSELF),
    (_READING, _E.GRANT): _stays(_READING, Reaction.READ, Reaction.ASK_DIGESTS),
    (_READING, _E.UNASKED): _stale(_READING),
    (_READING, _E.GROWN): _stays(_READING, Reaction.READ, Reaction.ASK_DIGESTS),
    (_READING, _E.DIGESTS): _stays(_READING, Reaction.VERIFY),
    (_READING, _E.REFUSED): _fails(ReceiveOutcome.REFUSED, *_BY_THE_HOLDER),
    (_READING, _E.WITHDRAWN): _fails(ReceiveOutcome.WITHDRAWN, *_BY_ITSELF),
    (_READING, _E.READ_FINISHED): _stays(_READING, Reaction.ASK_DIGESTS),
    (_READING, _E.READ_FAILED): _fails(ReceiveOutcome.FAILED, *_BY_ITSELF),
    (_READING, _E.MATCHED): _stays(_READING, Reaction.ASK_DIGESTS),
    (_READING, _E.CORRUPT): _fails(ReceiveOutcome.CORRUPT, *_BY_ITSELF),
    (_READING, _E.COMPLETE): ReceiveRow(_COMMITTED, (Reaction.RECEIVED, Reaction.FINISH), ReceiveOutcome.RECEIVED),
    (_READING, _E.TOO_LATE): _fails(ReceiveOutcome.EXPIRED, *_BY_ITSELF),
    (_READING, _E.ASK_DUE): _stays(_READING, Reaction.ASK, Reaction.ASK_DIGESTS),
    (_READING, _E.OVERDUE): _fails(ReceiveOutcome.EXPIRED, *_BY_ITSELF),
    (_READING, _E.CANCEL): _fails(ReceiveOutcome.CANCELLED, *_BY_ITSELF),
    (_READING, _E.CLOSE): _fails(ReceiveOutcome.FAILED, *_BY_ITSELF),
    (_QUARANTINED, _E.PEER_READY): _stays(_QUARANTINED),
    (_QUARANTINED, _E.PEER_LOST): _stays(_QUARANTINED),
    (_QUARANTINED, _E.GRANT): _stale(_QUARANTINED, Reaction.ABORT),
    (_QUARANTINED, _E.UNASKED): _stale(_QUARANTINED),
    (_QUARANTINED, _E.GROWN): _stale(_QUARANTINED),
    (_QUARANTINED, _E.REFUSED): _stale(_QUARANTINED),
    (_QUARANTINED, _E.WITHDRAWN): _stale(_QUARANTINED, Reaction.ABORT),
    (_QUARANTINED, _E.READ_FINISHED): _stays(_QUARANTINED),
    (_QUARANTINED, _E.READ_FAILED): _stays(_QUARANTINED),
    (_QUARANTINED, _E.READ_RELEASED): ReceiveRow(_FREED, (Reaction.RELEASED,)),
    (_QUARANTINED, _E.CANCEL): _stays(_QUARANTINED),
    (_FREED, _E.GRANT): _stale(_FREED, Reaction.ABORT),  # the holder still keeps blocks for it: let it free them
    (_FREED, _E.UNASKED): _stale(_FREED),
    (_FREED, _E.GROWN): _stale(_FREED),
    (_FREED, _E.REFUSED): _stale(_FREED),
    (_FREED, _E.WITHDRAWN): _stale(_FREED, Reaction.ABORT),
    (_FREED, _E.CANCEL): _stays(_FREED),
}


@dataclasses.dataclass(frozen=True, slots=True)
class ReceiveTimeouts:
    """Times after which a reader asks again or gives up, in seconds."""

    connect_s: float  # limit for connecting to the holder's memory
    retry_s: float  # wait before sending an unanswered claim or renewal again
    margin_s: float  # a read that ends within this time before the lease does is too late
    renew_at: float  # fraction of the lease after which a reader that is not done renews it


@dataclasses.dataclass(slots=True, eq=False)
class Receive:
    key: ReaderKey
    ticket: Ticket
    first_block: int  # index in the ticket's blocks; earlier ones are in our prefix cache
    block_ids: list[int]  # the blocks to fill, as many as are to be read
    deadline: float  # when it fails, unless a connection or a grant extends it
    num_ready: int  # leading blocks of the ticket that may be read
    num_unverified: int  # trailing blocks that are not verified yet; 0 unless digests are on
    state: ReceiveState = ReceiveState.RESERVED
    sent_at: dict[int, float] = dataclasses.field(default_factory=dict)  # unanswered claims and renewals by number
    last_number: int = 0
    ask_at: float = 0.0  # time of the next claim or renewal
    granted_until: float | None = None
    num_ordered: int | None = None  # leading `block_ids` whose read was ordered; None: no read has begun
    first_claim_at: float | None = None
    read_finished_at: float | None = None
    digests: Digests | None = None  # the holder's, while they are being compared
    source: BlockNumbers | None = None  # see `source_blocks`
    writable: bool = False  # a read may write into the blocks
    offer_ended: bool = False  # the holder has said that its offer is over

    @property
    def id(self) -> TransferId:
        return self.key.receive

    @property
    def grows(self) -> bool:
        return self.num_ready < self.ticket.num_blocks

    @property
    def source_blocks(self) -> BlockNumbers:
        """The blocks to read, as the holder numbers them. They are listed when a read begins, behind the claim."""
        if self.source is None:
            self.source = self.ticket.block_ids[self.first_block :]
        return self.source

    def grow(self, num_ready: int, last_blocks: Sequence[int] = ()) -> None:
        """Allow reads of the ticket's leading `num_ready` blocks. A smaller number than before changes nothing.

        `last_blocks` replace as many blocks at the end of the ticket's list, which nothing has read yet.
        """
        is_last = self.grows and num_ready >= self.ticket.num_blocks
        count = min(len(last_blocks), len(self.block_ids))
        if is_last and count:
            last = np.array(last_blocks[-count:], dtype=np.int64)
            self.source = np.concatenate((self.source_blocks[:-count], last))  # running reads keep the old array
        self.num_ready = max(self.num_ready, min(num_ready, self.ticket.num_blocks))

    @property
    def due(self) -> float:
        """The time of the next action if no event comes."""
        return min(self.deadline, self.ask_at) if self.state is ReceiveState.READING else self.deadline

    def claim(self, now: float, retry_s: float) -> Claim | Renew:
        """Return the claim or renewal to send now. Unless it is answered, the next is due after `retry_s`."""
        self.last_number += 1
        self.sent_at[self.last_number] = now
        self.ask_at = now + retry_s
        if self.first_claim_at is None:
            self.first_claim_at = now
        kind = Claim if self.granted_until is None else Renew
        return kind(self.ticket.lease, self.key, self.last_number)

    def schedule_retry(self, now: float, retry_s: float) -> None:
        """Ask again soon if blocks or digests are still missing, since the holder's messages may be lost."""
        if self.grows or self.lacks_digests:
            self.ask_at = min(self.ask_at, now + retry_s)

    def order(self) -> range | None:
        """Return the range of `block_ids` to read next; empty: begin the read, no block is ready yet. None: no more."""
        ordered, ready = self.num_ordered, max(0, self.num_ready - self.first_block)
        if ordered is not None and ordered >= ready:
            return None
        self.num_ordered = ready
        return range(ordered or 0, ready)

    @property
    def all_is_read(self) -> bool:
        return self.read_finished_at is not None and not self.grows

    @property
    def all_is_there(self) -> bool:
        return self.all_is_read and self.granted_until is not None and not self.num_unverified

    @property
    def lacks_digests(self) -> bool:
        return self.all_is_read and self.digests is None and self.num_unverified > 0

    @property
    def first_unverified(self) -> int:
        """The index of the ticket's first unverified block. Ours are the ticket's last blocks."""
        return self.ticket.num_blocks - self.num_unverified

    def lacks(self, digests: Digests) -> bool:
        """Return whether these are the digests that this receive is waiting for."""
        return self.lacks_digests and digests.first == self.first_unverified and digests.count <= self.num_unverified

    def timeout_reason(self, connect_s: float) -> str:
        holder = f"{self.ticket.lease.holder.engine_id} at {self.ticket.kv_address}"
        if self.state is ReceiveState.RESERVED:
            return f"no connection to {holder} within {connect_s:g} s"
        if self.granted_until is None:
            return f"{holder} answered no claim within {self.ticket.lease_s:g} s"
        if self.read_finished_at is not None:
            return f"the lease at {holder} ended before it sent its digests"
        return f"the lease at {holder} ended before the read did"
