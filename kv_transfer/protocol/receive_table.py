"""What follows what on the reader's side of a hand-off: states, events, and one row for each pair that can be.

A receive that is over, COMMITTED or FREED, is forgotten: whatever comes then finds the rows of FREED.
"""

from __future__ import annotations

import dataclasses
import enum


class ReceiveState(enum.Enum):
    RESERVED = enum.auto()
    PULLING = enum.auto()
    QUARANTINED = enum.auto()
    COMMITTED = enum.auto()
    FREED = enum.auto()


class ReceiveEvent(enum.Enum):
    PEER_READY = "peer is ready"
    PEER_LOST = "peer is lost"  # and will not be spoken to again
    CUT_OFF = "peer is cut off"  # what is sent now waits for the connection
    GRANT = "Granted"
    UNASKED = "Granted, Digests that nothing asked for"
    GROWN = "Grown"
    DIGESTS = "Digests"
    REFUSED = "Refused"
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
    """As `baton_kv_receives_total{outcome}` counts them."""

    RECEIVED = "received"
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"
    FAILED = "failed"
    LOST = "lost"
    CANCELLED = "cancelled"
    CORRUPT = "corrupt"


class Say(enum.Enum):
    """What is done, in this order."""

    ASK = "Claim or Renew"
    READ = "read what is written"
    ASK_DIGESTS = "AskDigests"  # of what is not proven, where digests are to be verified and all is read
    VERIFY = "compare"
    RECEIVED = "tell Received"
    FAILED = "tell ReceiveFailed"
    FINISH = "Finish"
    ABORT = "Abort"
    STOP = "stop the read"  # if it runs; QUARANTINED is left at once if not
    RELEASED = "tell BlocksReleased"


@dataclasses.dataclass(frozen=True, slots=True)
class ReceiveRow:
    """What follows an event in a state."""

    then: ReceiveState
    says: tuple[Say, ...] = ()
    outcome: ReceiveOutcome | None = None
    counted: bool = False  # as stale: it changes nothing


_RESERVED, _PULLING, _QUARANTINED, _COMMITTED, _FREED = ReceiveState
_E = ReceiveEvent
_BY_ITSELF = (Say.FAILED, Say.ABORT, Say.STOP)  # the holder, which may keep blocks for us, learns that it need not
_BY_THE_HOLDER = (Say.FAILED, Say.STOP)


def _fails(outcome: ReceiveOutcome, *says: Say) -> ReceiveRow:
    return ReceiveRow(_QUARANTINED, says, outcome)


def _stays(state: ReceiveState, *says: Say) -> ReceiveRow:
    return ReceiveRow(state, says)


def _stale(state: ReceiveState, *says: Say) -> ReceiveRow:
    return ReceiveRow(state, says, counted=True)


RECEIVE_TABLE: dict[tuple[ReceiveState, ReceiveEvent], ReceiveRow] = {
    (_RESERVED, _E.PEER_READY): ReceiveRow(_PULLING, (Say.ASK, Say.READ)),
    (_RESERVED, _E.PEER_LOST): _fails(ReceiveOutcome.LOST, Say.FAILED),
    (_RESERVED, _E.CUT_OFF): _fails(ReceiveOutcome.LOST, Say.FAILED),
    (_RESERVED, _E.GRANT): _stale(_RESERVED),
    (_RESERVED, _E.UNASKED): _stale(_RESERVED),
    (_RESERVED, _E.GROWN): _stale(_RESERVED),
    (_RESERVED, _E.REFUSED): _stale(_RESERVED),
    (_RESERVED, _E.WITHDRAWN): _stale(_RESERVED),
    (_RESERVED, _E.OVERDUE): _fails(ReceiveOutcome.EXPIRED, Say.FAILED),
    (_RESERVED, _E.CANCEL): _fails(ReceiveOutcome.CANCELLED, Say.FAILED),
    (_RESERVED, _E.CLOSE): _fails(ReceiveOutcome.FAILED, Say.FAILED),
    (_PULLING, _E.PEER_READY): _stays(_PULLING),
    (_PULLING, _E.PEER_LOST): _fails(ReceiveOutcome.LOST, *_BY_THE_HOLDER),
    (_PULLING, _E.CUT_OFF): _fails(ReceiveOutcome.LOST, *_BY_ITSELF),
    (_PULLING, _E.GRANT): _stays(_PULLING, Say.READ, Say.ASK_DIGESTS),
    (_PULLING, _E.UNASKED): _stale(_PULLING),
    (_PULLING, _E.GROWN): _stays(_PULLING, Say.READ, Say.ASK_DIGESTS),
    (_PULLING, _E.DIGESTS): _stays(_PULLING, Say.VERIFY),
    (_PULLING, _E.REFUSED): _fails(ReceiveOutcome.REFUSED, *_BY_THE_HOLDER),
    (_PULLING, _E.WITHDRAWN): _fails(ReceiveOutcome.WITHDRAWN, *_BY_ITSELF),
    (_PULLING, _E.READ_FINISHED): _stays(_PULLING, Say.ASK_DIGESTS),
    (_PULLING, _E.READ_FAILED): _fails(ReceiveOutcome.FAILED, *_BY_ITSELF),
    (_PULLING, _E.MATCHED): _stays(_PULLING, Say.ASK_DIGESTS),
    (_PULLING, _E.CORRUPT): _fails(ReceiveOutcome.CORRUPT, *_BY_ITSELF),
    (_PULLING, _E.COMPLETE): ReceiveRow(_COMMITTED, (Say.RECEIVED, Say.FINISH), ReceiveOutcome.RECEIVED),
    (_PULLING, _E.TOO_LATE): _fails(ReceiveOutcome.EXPIRED, *_BY_ITSELF),
    (_PULLING, _E.ASK_DUE): _stays(_PULLING, Say.ASK, Say.ASK_DIGESTS),
    (_PULLING, _E.OVERDUE): _fails(ReceiveOutcome.EXPIRED, *_BY_ITSELF),
    (_PULLING, _E.CANCEL): _fails(ReceiveOutcome.CANCELLED, *_BY_ITSELF),
    (_PULLING, _E.CLOSE): _fails(ReceiveOutcome.FAILED, *_BY_ITSELF),
    (_QUARANTINED, _E.PEER_READY): _stays(_QUARANTINED),
    (_QUARANTINED, _E.PEER_LOST): _stays(_QUARANTINED),
    (_QUARANTINED, _E.CUT_OFF): _stays(_QUARANTINED),
    (_QUARANTINED, _E.GRANT): _stale(_QUARANTINED, Say.ABORT),
    (_QUARANTINED, _E.UNASKED): _stale(_QUARANTINED),
    (_QUARANTINED, _E.GROWN): _stale(_QUARANTINED),
    (_QUARANTINED, _E.REFUSED): _stale(_QUARANTINED),
    (_QUARANTINED, _E.WITHDRAWN): _stale(_QUARANTINED, Say.ABORT),
    (_QUARANTINED, _E.READ_FINISHED): _stays(_QUARANTINED),
    (_QUARANTINED, _E.READ_FAILED): _stays(_QUARANTINED),
    (_QUARANTINED, _E.READ_RELEASED): ReceiveRow(_FREED, (Say.RELEASED,)),
    (_QUARANTINED, _E.CANCEL): _stays(_QUARANTINED),
    (_FREED, _E.GRANT): _stale(_FREED, Say.ABORT),  # somebody still holds blocks for it: let them go
    (_FREED, _E.UNASKED): _stale(_FREED),
    (_FREED, _E.GROWN): _stale(_FREED),
    (_FREED, _E.REFUSED): _stale(_FREED),
    (_FREED, _E.WITHDRAWN): _stale(_FREED, Say.ABORT),
    (_FREED, _E.CANCEL): _stays(_FREED),
}
