"""The holder's half of a hand-off: finished blocks, kept until their reader has them.

offer ──> HELD ──finish, abort, withdraw (not granted), expiry──> RELEASED

A grant is a promise to one reader. Until `expires_at` only that reader can end it (Finish, Abort): not `withdraw`,
which merely asks, and not the news that the reader is dead, which may be a partition.
The promise grows with every claim and renewal that is granted and never shrinks.
"""

from __future__ import annotations

import collections
import dataclasses
import enum

from baton.engine.core.connector import OfferEnded, OfferOutcome, TransferId

from .actions import Action, Emit, SendToReader
from .messages import (
    Abort,
    Claim,
    EngineKey,
    Finish,
    FromReader,
    Granted,
    LeaseKey,
    ReaderKey,
    Refused,
    Renew,
    Withdrawn,
)


class LeaseState(enum.Enum):
    HELD = enum.auto()
    RELEASED = enum.auto()


@dataclasses.dataclass(slots=True)
class Lease:
    key: LeaseKey
    num_blocks: int
    expires_at: float  # on the holder's clock
    reader: ReaderKey | None = None  # to whom it is promised
    withdrawing: bool = False
    state: LeaseState = LeaseState.HELD


class LeaseTable:
    """All offers of one engine that have not ended. Times are seconds on the caller's clock.

    Ending twice is a no-op; a message with another epoch, generation or reader changes nothing.
    """

    def __init__(self, engine: EngineKey, lease_s: float) -> None:
        self.engine = engine
        self.lease_s = lease_s
        self.outcomes: collections.Counter[OfferOutcome] = collections.Counter()
        self.stale_messages = 0
        self._leases: dict[TransferId, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_blocks(self) -> int:
        return sum(lease.num_blocks for lease in self._leases.values())

    @property
    def any_granted(self) -> bool:
        """Someone may be reading our memory now."""
        return any(lease.reader is not None for lease in self._leases.values())

    @property
    def next_expiry(self) -> float | None:
        return min((lease.expires_at for lease in self._leases.values()), default=None)

    def offer(self, key: LeaseKey, num_blocks: int, now: float) -> None:
        self._leases[key.offer] = Lease(key, num_blocks, expires_at=now + self.lease_s)

    def withdraw(self, offer: TransferId) -> list[Action]:
        lease = self._leases.get(offer)
        if lease is None or lease.withdrawing:
            return []
        if lease.reader is None:
            return self._release(lease, OfferOutcome.WITHDRAWN)
        lease.withdrawing = True
        return [SendToReader(lease.reader.engine, Withdrawn(lease.key, lease.reader))]

    def withdraw_all(self) -> list[Action]:
        return [action for offer in list(self._leases) for action in self.withdraw(offer)]

    def expire(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for lease in [lease for lease in self._leases.values() if now >= lease.expires_at]:
            actions += self._release(lease, OfferOutcome.WITHDRAWN if lease.withdrawing else OfferOutcome.EXPIRED)
        return actions

    def on_message(self, message: FromReader, now: float) -> list[Action]:
        lease = self._named_by(message.lease)
        match message:
            case Claim() | Renew():
                return self._extend(lease, message, now)
            case Finish() if lease is not None and lease.reader == message.reader:
                return self._release(lease, OfferOutcome.FINISHED)
            case Abort() if lease is not None and lease.reader in (None, message.reader):
                return self._release(lease, OfferOutcome.WITHDRAWN)
        self.stale_messages += 1
        return []

    def _named_by(self, key: LeaseKey) -> Lease | None:
        """The lease that exactly this offer made: same process, request and generation."""
        lease = self._leases.get(key.offer)
        return lease if lease is not None and lease.key == key else None

    def _extend(self, lease: Lease | None, message: Claim | Renew, now: float) -> list[Action]:
        reader = message.reader
        if lease is None:
            self.stale_messages += 1
            restarted = message.lease.holder != self.engine
            reason = "the holder was restarted" if restarted else "the offer has ended"
            return [SendToReader(reader.engine, Refused(message.lease, reader, reason))]
        if lease.reader not in (None, reader):
            return [SendToReader(reader.engine, Refused(message.lease, reader, "another reader has claimed the offer"))]
        if lease.withdrawing:
            return [SendToReader(reader.engine, Withdrawn(lease.key, reader))]
        lease.reader = reader
        lease.expires_at = max(lease.expires_at, now + self.lease_s)
        return [SendToReader(reader.engine, Granted(lease.key, reader, message.number, self.lease_s))]

    def _release(self, lease: Lease, outcome: OfferOutcome) -> list[Action]:
        if lease.state is LeaseState.RELEASED:
            return []
        lease.state = LeaseState.RELEASED
        del self._leases[lease.key.offer]
        self.outcomes[outcome] += 1
        return [Emit(OfferEnded(lease.key.offer, outcome))]
