"""The reader's half of a hand-off: blocks that fill, and the rule by which their content counts.

receive ──> RESERVED ──peer is ready──> PULLING ──grant came AND read finished in time──> COMMITTED
               │                           │
               │ fail, cancel              │ fail, cancel, refused, withdrawn, too late, peer lost
               │                           v
               └──────────────────────> QUARANTINED ──nothing can write any more──> FREED

In time: the read finished before `t0 + lease_s - margin_s` on our clock, where t0 is when we sent the claim (or the
renewal) that the grant answers. The holder's own clock for the lease starts later, when that message reaches it.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterable, Sequence

from baton.engine.core.connector import BlocksReleased, Received, ReceiveFailed, TransferId

from .actions import Action, Emit, SendToHolder, StartRead, StopRead
from .messages import (
    Abort,
    Claim,
    EngineKey,
    Finish,
    FromHolder,
    Granted,
    ReaderKey,
    Refused,
    Renew,
    Ticket,
    Withdrawn,
)


class ReceiveState(enum.Enum):
    RESERVED = enum.auto()
    PULLING = enum.auto()
    COMMITTED = enum.auto()
    QUARANTINED = enum.auto()
    FREED = enum.auto()


TRANSITIONS = {
    ReceiveState.RESERVED: {ReceiveState.PULLING, ReceiveState.QUARANTINED},
    ReceiveState.PULLING: {ReceiveState.COMMITTED, ReceiveState.QUARANTINED},
    ReceiveState.QUARANTINED: {ReceiveState.FREED},
    ReceiveState.COMMITTED: set(),
    ReceiveState.FREED: set(),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Patience:
    """How long a reader waits for what, in seconds."""

    connect_s: float  # until the holder's memory can be reached
    retry_s: float  # before an unanswered claim or renewal is sent again
    margin_s: float  # a read that ends this close to the end of the lease is too late
    renew_at: float  # share of the lease after which a read that still runs asks for more


@dataclasses.dataclass(slots=True)
class Receive:
    key: ReaderKey
    ticket: Ticket
    source_blocks: list[int]  # at the holder
    block_ids: list[int]  # ours, of the same number
    deadline: float  # without progress it fails here
    state: ReceiveState = ReceiveState.RESERVED
    sent_at: dict[int, float] = dataclasses.field(default_factory=dict)  # unanswered claims and renewals by number
    last_number: int = 0
    ask_at: float = 0.0  # when the next claim or renewal is due
    granted_until: float | None = None
    read_finished_at: float | None = None
    writable: bool = False  # a transfer may write into the blocks

    @property
    def id(self) -> TransferId:
        return self.key.receive

    def move(self, state: ReceiveState) -> None:
        assert state in TRANSITIONS[self.state], f"receive {self.id} cannot go from {self.state} to {state}"
        self.state = state


class ReceiveTable:
    """All receives of one engine that are neither committed nor freed. Times are seconds on the caller's clock."""

    def __init__(self, engine: EngineKey, patience: Patience) -> None:
        self.engine = engine
        self.patience = patience
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.stale_messages = 0
        self._receives: dict[TransferId, Receive] = {}

    def __len__(self) -> int:
        return len(self._receives)

    def __getitem__(self, receive: TransferId) -> Receive:
        return self._receives[receive]

    @property
    def num_quarantined_blocks(self) -> int:
        return sum(len(r.block_ids) for r in self._receives.values() if r.state is ReceiveState.QUARANTINED)

    @property
    def next_deadline(self) -> float | None:
        return min((self._due(receive) for receive in self._active()), default=None)

    def waits_for(self, holder: EngineKey) -> bool:
        return any(receive.ticket.lease.holder == holder for receive in self._active())

    def start(
        self, receive: TransferId, ticket: Ticket, first_block: int, block_ids: Sequence[int], now: float
    ) -> None:
        """Blocks are reserved; `peer_ready` sets the receive going."""
        source = ticket.block_ids[first_block:]
        assert len(source) == len(block_ids), "checked by the caller"
        key = ReaderKey(self.engine, receive)
        self._receives[receive] = Receive(key, ticket, source, list(block_ids), deadline=now + self.patience.connect_s)

    def peer_ready(self, holder: EngineKey, now: float) -> list[Action]:
        """The holder's memory can be read: claim and read at once."""
        actions: list[Action] = []
        for receive in self._of(holder):
            if receive.state is ReceiveState.RESERVED:
                receive.move(ReceiveState.PULLING)
                receive.writable = True
                receive.deadline = now + receive.ticket.lease_s
                actions += [self._ask(receive, now), StartRead(receive.id)]
        return actions

    def peer_lost(self, holder: EngineKey, reason: str) -> list[Action]:
        return [action for receive in self._of(holder) for action in self._fail(receive, "lost", reason, tell=False)]

    def cancel(self, receive: TransferId) -> list[Action]:
        known = self._receives.get(receive)
        if known is None or known.state is ReceiveState.QUARANTINED:
            return []
        return self._fail(known, "cancelled", "cancelled by the engine")

    def abandon(self, reason: str) -> list[Action]:
        """Fails all that are under way."""
        return [action for receive in self._active() for action in self._fail(receive, "failed", reason)]

    def fail(self, receive: TransferId, reason: str) -> list[Action]:
        """Something about this one went wrong on our side."""
        known = self._receives.get(receive)
        if known is None or known.state is ReceiveState.QUARANTINED:
            return []
        return self._fail(known, "failed", reason)

    def on_message(self, message: FromHolder, now: float) -> list[Action]:
        receive = self._named_by(message)
        if receive is None:
            self.stale_messages += 1
            # Somebody still holds blocks for a receive that is over: let them go.
            if isinstance(message, Granted | Withdrawn) and message.reader.engine == self.engine:
                return [SendToHolder(message.lease.holder, Abort(message.lease, message.reader))]
            return []
        match message:
            case Granted():
                return self._granted(receive, message, now)
            case Refused():
                return self._fail(receive, "refused", f"the holder refused: {message.reason}", tell=False)
            case Withdrawn():
                return self._fail(receive, "withdrawn", "the holder withdrew the offer")

    def read_finished(self, receive: TransferId, now: float) -> list[Action]:
        """All bytes are there and the transport can no longer write."""
        known = self._receives[receive]
        known.writable = False
        known.read_finished_at = now
        if known.state is ReceiveState.QUARANTINED:
            return self._free(known)
        return self._commit_if_due(known)

    def read_failed(self, receive: TransferId, reason: str) -> list[Action]:
        return self.fail(receive, f"the read failed: {reason}")

    def read_released(self, receive: TransferId) -> list[Action]:
        """A read that was stopped or failed: the transport can no longer write."""
        known = self._receives[receive]
        known.writable = False
        return self._free(known)

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for receive in self._active():
            if now >= receive.deadline:
                actions += self._fail(receive, "expired", self._what_took_too_long(receive))
            elif receive.state is ReceiveState.PULLING and now >= receive.ask_at:
                actions.append(self._ask(receive, now))
        return actions

    def _active(self) -> list[Receive]:
        return [r for r in self._receives.values() if r.state in (ReceiveState.RESERVED, ReceiveState.PULLING)]

    def _of(self, holder: EngineKey) -> Iterable[Receive]:
        return [receive for receive in self._active() if receive.ticket.lease.holder == holder]

    def _due(self, receive: Receive) -> float:
        return min(receive.deadline, receive.ask_at) if receive.state is ReceiveState.PULLING else receive.deadline

    def _named_by(self, message: FromHolder) -> Receive | None:
        """The receive that this message is about: of this process, for exactly this offer, and under way."""
        receive = self._receives.get(message.reader.receive)
        if receive is None or receive.key != message.reader or receive.ticket.lease != message.lease:
            return None
        return receive if receive.state is ReceiveState.PULLING else None

    def _ask(self, receive: Receive, now: float) -> Action:
        receive.last_number += 1
        receive.sent_at[receive.last_number] = now
        receive.ask_at = now + self.patience.retry_s
        kind = Claim if receive.granted_until is None else Renew
        lease = receive.ticket.lease
        return SendToHolder(lease.holder, kind(lease, receive.key, receive.last_number))

    def _granted(self, receive: Receive, message: Granted, now: float) -> list[Action]:
        sent_at = receive.sent_at.pop(message.number, None)
        if sent_at is None:
            self.stale_messages += 1
            return []
        until = sent_at + message.lease_s - self.patience.margin_s
        if receive.granted_until is None or until > receive.granted_until:
            receive.granted_until = receive.deadline = until
            receive.ask_at = max(now, sent_at + message.lease_s * self.patience.renew_at)
        return self._commit_if_due(receive)

    def _commit_if_due(self, receive: Receive) -> list[Action]:
        if receive.read_finished_at is None or receive.granted_until is None:
            return []
        if not self._in_time(receive.read_finished_at, receive.granted_until):
            return self._fail(receive, "expired", "the read finished after the lease had ended")
        receive.move(ReceiveState.COMMITTED)
        del self._receives[receive.id]
        self.outcomes["received"] += 1
        lease = receive.ticket.lease
        return [Emit(Received(receive.id)), SendToHolder(lease.holder, Finish(lease, receive.key))]

    def _in_time(self, read_finished_at: float, granted_until: float) -> bool:
        return read_finished_at < granted_until

    def _fail(self, receive: Receive, outcome: str, reason: str, *, tell: bool = True) -> list[Action]:
        """`tell`: the holder, which may keep blocks for us, learns that it need not."""
        claimed = receive.state is ReceiveState.PULLING
        receive.move(ReceiveState.QUARANTINED)
        self.outcomes[outcome] += 1
        actions: list[Action] = [Emit(ReceiveFailed(receive.id, reason))]
        if tell and claimed:
            lease = receive.ticket.lease
            actions.append(SendToHolder(lease.holder, Abort(lease, receive.key)))
        if receive.writable:
            return [*actions, StopRead(receive.id)]
        return actions + self._free(receive)

    def _free(self, receive: Receive) -> list[Action]:
        receive.move(ReceiveState.FREED)
        del self._receives[receive.id]
        return [Emit(BlocksReleased(receive.id))]

    def _what_took_too_long(self, receive: Receive) -> str:
        holder = f"{receive.ticket.lease.holder.engine_id} at {receive.ticket.kv_address}"
        if receive.state is ReceiveState.RESERVED:
            return f"no connection to {holder} within {self.patience.connect_s:g} s"
        if receive.granted_until is None:
            return f"{holder} answered no claim within {receive.ticket.lease_s:g} s"
        return f"the lease at {holder} ended before the read did"
