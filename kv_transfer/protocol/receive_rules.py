"""The rules of a receive at its reader: a transition table, and times.

The table has one row for each pair of state and event that can occur. A receive that is over, COMMITTED or FREED, is
forgotten, and later messages about it use the rows of FREED.
"""

from __future__ import annotations

import dataclasses
import enum


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
