"""The holder's half of a hand-off: it keeps a prompt's blocks until the reader has read them, or the lease ends.

    offer ──> OFFERED ──claim──> GRANTED ──withdraw──> ASKED_BACK
                 │ abort, withdraw, │ finish, abort,        │ finish, abort,
                 └ expiry           └ expiry                └ expiry ──────────> RELEASED

A grant is a promise to one reader. Until `expires_at` only that reader can end it (Finish, AbortRead). `withdraw` only
asks the reader to stop, and a report that the reader is dead does nothing: it may be a network partition.

Claims and renewals that are granted move `expires_at` later, and nothing moves it earlier. If a claim waited because
this process stood still, the lease counts from when it may have arrived at the earliest, and the grant is for the rest.

An offer may *grow*, in every state: its first `num_ready` blocks are written, and the others will be. While nobody has
claimed the offer, its growth extends the lease; after that, the reader's renewals do.

`LEASE_TABLE` holds all transitions; docs/concepts/handoff.md shows it.
"""

from __future__ import annotations

import collections
import dataclasses
import enum

from baton.engine.core.connector import OfferEnded, OfferOutcome, TransferId

from .messages import (
    DIGEST_BLOCKS,
    MAX_DIGESTS_BYTES,
    AbortRead,
    Action,
    AskDigests,
    Claim,
    ClaimRefused,
    Digests,
    Emit,
    EngineKey,
    Finish,
    FromHolder,
    FromReader,
    Granted,
    Grown,
    LeaseKey,
    ReaderKey,
    Renew,
    SendToReader,
    Withdrawn,
)


class LeaseState(enum.Enum):
    OFFERED = enum.auto()
    GRANTED = enum.auto()
    ASKED_BACK = enum.auto()
    RELEASED = enum.auto()  # or never existed


class LeaseEvent(enum.Enum):
    """Events of an offer. "Another reader" is any but the one to which the offer is granted."""

    CLAIM = "claim, renew"
    ASK_DIGESTS = "ask digests"
    FINISH = "finish"
    EARLY_FINISH = "finish while it grows"
    ABORT = "abort"
    STRANGER_ASKS = "claim, renew, ask digests of another reader"
    STRANGER_ENDS = "finish, abort of another reader"
    ADVANCE = "engine: more is written"
    WITHDRAW = "engine: withdraw"
    EXPIRY = "expiry"


class LeaseReply(enum.Enum):
    """The message with which the holder answers."""

    GRANTED = "Granted"
    REFUSED = "ClaimRefused"
    WITHDRAWN = "Withdrawn"
    GROWN = "Grown"
    DIGESTS = "Digests"  # once they are computed


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseRow:
    """The consequences of an event in a state."""

    next_state: LeaseState
    reply: LeaseReply | None = None
    ended: OfferOutcome | None = None  # reported to the engine
    counted: bool = False  # counted as a stale message, which changes nothing


_OFFERED, _GRANTED, _ASKED, _RELEASED = LeaseState
_E, _A = LeaseEvent, LeaseReply


def _stays(state: LeaseState, reply: LeaseReply | None = None, *, counted: bool = False) -> LeaseRow:
    return LeaseRow(state, reply, counted=counted)


def _ends(outcome: OfferOutcome) -> LeaseRow:
    return LeaseRow(_RELEASED, ended=outcome)


LEASE_TABLE: dict[tuple[LeaseState, LeaseEvent], LeaseRow] = {
    (_OFFERED, _E.CLAIM): LeaseRow(_GRANTED, _A.GRANTED),
    (_OFFERED, _E.ASK_DIGESTS): _stays(_OFFERED, counted=True),
    (_OFFERED, _E.FINISH): _stays(_OFFERED, counted=True),
    (_OFFERED, _E.EARLY_FINISH): _stays(_OFFERED, counted=True),
    (_OFFERED, _E.ABORT): _ends(OfferOutcome.WITHDRAWN),
    (_OFFERED, _E.ADVANCE): _stays(_OFFERED),
    (_OFFERED, _E.WITHDRAW): _ends(OfferOutcome.WITHDRAWN),
    (_OFFERED, _E.EXPIRY): _ends(OfferOutcome.EXPIRED),
    (_GRANTED, _E.CLAIM): _stays(_GRANTED, _A.GRANTED),
    (_GRANTED, _E.ASK_DIGESTS): _stays(_GRANTED, _A.DIGESTS),
    (_GRANTED, _E.FINISH): _ends(OfferOutcome.FINISHED),
    (_GRANTED, _E.EARLY_FINISH): _stays(_GRANTED, counted=True),
    (_GRANTED, _E.ABORT): _ends(OfferOutcome.WITHDRAWN),
    (_GRANTED, _E.STRANGER_ASKS): _stays(_GRANTED, _A.REFUSED),
    (_GRANTED, _E.STRANGER_ENDS): _stays(_GRANTED, counted=True),
    (_GRANTED, _E.ADVANCE): _stays(_GRANTED, _A.GROWN),
    (_GRANTED, _E.WITHDRAW): LeaseRow(_ASKED, _A.WITHDRAWN),
    (_GRANTED, _E.EXPIRY): _ends(OfferOutcome.EXPIRED),
    (_ASKED, _E.CLAIM): _stays(_ASKED, _A.WITHDRAWN),
    (_ASKED, _E.ASK_DIGESTS): _stays(_ASKED, _A.WITHDRAWN),
    (_ASKED, _E.FINISH): _ends(OfferOutcome.FINISHED),
    (_ASKED, _E.EARLY_FINISH): _stays(_ASKED, counted=True),
    (_ASKED, _E.ABORT): _ends(OfferOutcome.WITHDRAWN),
    (_ASKED, _E.STRANGER_ASKS): _stays(_ASKED, _A.REFUSED),
    (_ASKED, _E.STRANGER_ENDS): _stays(_ASKED, counted=True),
    (_ASKED, _E.ADVANCE): _stays(_ASKED),
    (_ASKED, _E.WITHDRAW): _stays(_ASKED),
    (_ASKED, _E.EXPIRY): _ends(OfferOutcome.WITHDRAWN),
    (_RELEASED, _E.CLAIM): _stays(_RELEASED, _A.REFUSED, counted=True),
    (_RELEASED, _E.ASK_DIGESTS): _stays(_RELEASED, _A.REFUSED, counted=True),
    (_RELEASED, _E.FINISH): _stays(_RELEASED, counted=True),
    (_RELEASED, _E.ABORT): _stays(_RELEASED, counted=True),
    (_RELEASED, _E.ADVANCE): _stays(_RELEASED),
    (_RELEASED, _E.WITHDRAW): _stays(_RELEASED),
}


@dataclasses.dataclass(slots=True)
class Lease:
    key: LeaseKey
    num_blocks: int
    num_ready: int  # leading blocks that are written
    expires_at: float  # on the holder's clock
    reader: ReaderKey | None = None  # the one to which it is granted
    granted_s: float = 0.0  # length of the newest grant, from the moment of the grant
    digests: tuple[bytes, ...] | None = None  # of all blocks, one entry for each rank
    last_blocks: tuple[int, ...] = ()  # they replace as many blocks at the end of the ticket's list
    state: LeaseState = LeaseState.OFFERED

    @property
    def grows(self) -> bool:
        return self.num_ready < self.num_blocks


class LeaseTable:
    """The offers of one engine that have not ended. Times are seconds on the caller's clock.

    Ending an offer twice does nothing. A message with another epoch, generation or reader changes nothing.
    """

    def __init__(self, engine: EngineKey, lease_s: float, digest_blocks: int = DIGEST_BLOCKS) -> None:
        """One message carries the digests of at most `digest_blocks` blocks."""
        self.engine = engine
        self.lease_s = lease_s
        self._digest_blocks = digest_blocks
        self.outcomes: collections.Counter[OfferOutcome] = collections.Counter()
        self.stale_messages = 0
        self._leases: dict[TransferId, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, offer: TransferId) -> Lease | None:
        return self._leases.get(offer)

    @property
    def num_blocks(self) -> int:
        return sum(lease.num_blocks for lease in self._leases.values())

    @property
    def any_granted(self) -> bool:
        """True if a reader may be reading our memory now."""
        return any(lease.reader is not None for lease in self._leases.values())

    @property
    def next_expiry(self) -> float | None:
        return min((lease.expires_at for lease in self._leases.values()), default=None)

    def offer(self, key: LeaseKey, num_blocks: int, now: float, num_ready: int | None = None) -> None:
        """Add an offer whose first `num_ready` blocks are written: by default all, so that it does not grow."""
        ready = num_blocks if num_ready is None else num_ready
        self._leases[key.offer] = Lease(key, num_blocks, ready, expires_at=now + self.lease_s)

    def advance(self, offer: TransferId, num_ready: int, now: float, last_blocks: tuple[int, ...] = ()) -> list[Action]:
        """Note that `num_ready` blocks are written. If nobody has claimed the offer, its lease begins anew.

        `last_blocks` replace as many blocks at the end of the ticket's list.
        """
        lease = self._leases.get(offer)
        if lease is not None and lease.state is not LeaseState.ASKED_BACK:
            lease.last_blocks = last_blocks or lease.last_blocks
            lease.num_ready = max(lease.num_ready, num_ready)
        if lease is not None and lease.state is LeaseState.OFFERED:
            lease.expires_at = max(lease.expires_at, now + self.lease_s)
        return self._on(lease, LeaseEvent.ADVANCE)

    def set_digests(self, offer: TransferId, digests: tuple[bytes, ...]) -> None:
        lease = self._leases.get(offer)
        if lease is not None:
            lease.digests = digests

    def withdraw(self, offer: TransferId) -> list[Action]:
        return self._on(self._leases.get(offer), LeaseEvent.WITHDRAW)

    def withdraw_all(self) -> list[Action]:
        return [action for offer in list(self._leases) for action in self.withdraw(offer)]

    def expire(self, now: float) -> list[Action]:
        due = [lease for lease in self._leases.values() if now >= lease.expires_at]
        return [action for lease in due for action in self._on(lease, LeaseEvent.EXPIRY)]

    def on_message(self, message: FromReader, now: float, arrived: float | None = None) -> list[Action]:
        """Answer a reader. `arrived` is the earliest time at which the message may have come, by default `now`."""
        lease = self._named_by(message.lease)
        event = _event_of(message, lease)
        ended: list[Action] = []
        if lease is not None and event is LeaseEvent.CLAIM and lease.state is not LeaseState.ASKED_BACK:
            lease.expires_at = max(lease.expires_at, (now if arrived is None else arrived) + self.lease_s)
            if now >= lease.expires_at:
                ended, lease = self._on(lease, LeaseEvent.EXPIRY), None
            else:
                lease.reader = message.reader
                lease.granted_s = min(self.lease_s, lease.expires_at - now)
        return ended + self._on(lease, event, message)

    def _named_by(self, key: LeaseKey) -> Lease | None:
        """Return the lease of exactly this offer: of the same process, request and generation."""
        lease = self._leases.get(key.offer)
        return lease if lease is not None and lease.key == key else None

    def _on(self, lease: Lease | None, event: LeaseEvent, message: FromReader | None = None) -> list[Action]:
        row = LEASE_TABLE[LeaseState.RELEASED if lease is None else lease.state, event]
        self.stale_messages += row.counted
        if lease is not None and row.ended is not None:
            return self._release(lease, row.ended)
        if lease is not None:
            lease.state = row.next_state
        return [] if row.reply is None else self._reply(row.reply, lease, message)

    def _reply(self, reply: LeaseReply, lease: Lease | None, message: FromReader | None) -> list[Action]:
        if reply is LeaseReply.REFUSED:
            assert message is not None, "only a message is refused"
            has_ended = lease is None and message.lease.holder == self.engine
            reason = self._why_refused(lease, message.lease)
            refused = ClaimRefused(message.lease, message.reader, reason, has_ended)
            return [SendToReader(message.reader.engine, refused)]
        assert lease is not None, "a released lease only refuses"
        assert lease.reader is not None, "only its reader is told"
        said = self._message(reply, lease, lease.reader, message)
        return [] if said is None else [SendToReader(lease.reader.engine, said)]

    def _message(
        self, reply: LeaseReply, lease: Lease, reader: ReaderKey, message: FromReader | None
    ) -> FromHolder | None:
        match reply, message:
            case LeaseReply.GRANTED, Claim() | Renew():
                return Granted(lease.key, reader, message.number, lease.granted_s, lease.num_ready, lease.last_blocks)
            case LeaseReply.GROWN, _:
                return Grown(lease.key, reader, lease.num_ready, lease.last_blocks)
            case LeaseReply.DIGESTS, AskDigests():
                return self._digests_of(lease, reader, message.first)
        return Withdrawn(lease.key, reader)

    def _digests_of(self, lease: Lease, reader: ReaderKey, first: int) -> Digests | None:
        """Return as many digests as fit into one message. None: not computed yet, or there is no block `first`."""
        if lease.digests is None or first >= lease.num_blocks:
            return None
        sizes = [len(digests) // lease.num_blocks for digests in lease.digests]  # of one block, by rank
        most = max(1, min(self._digest_blocks, MAX_DIGESTS_BYTES // max(1, sum(sizes))))
        count = min(most, lease.num_blocks - first)
        told = (
            digests[first * size : (first + count) * size] for digests, size in zip(lease.digests, sizes, strict=True)
        )
        return Digests(lease.key, reader, first, count, tuple(told))

    def _why_refused(self, lease: Lease | None, asked: LeaseKey) -> str:
        if lease is not None:
            return "another reader has claimed the offer"
        return "the holder was restarted" if asked.holder != self.engine else "the offer has ended"

    def _release(self, lease: Lease, outcome: OfferOutcome) -> list[Action]:
        lease.state = LeaseState.RELEASED
        del self._leases[lease.key.offer]
        self.outcomes[outcome] += 1
        return [Emit(OfferEnded(lease.key.offer, outcome))]


def _event_of(message: FromReader, lease: Lease | None) -> LeaseEvent:
    ends = isinstance(message, Finish | AbortRead)
    if lease is not None and lease.reader not in (None, message.reader):
        return LeaseEvent.STRANGER_ENDS if ends else LeaseEvent.STRANGER_ASKS
    match message:
        case Finish():
            return LeaseEvent.EARLY_FINISH if lease is not None and lease.grows else LeaseEvent.FINISH
        case AbortRead():
            return LeaseEvent.ABORT
        case AskDigests():
            return LeaseEvent.ASK_DIGESTS
    return LeaseEvent.CLAIM
