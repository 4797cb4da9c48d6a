"""The reader's half of a hand-off: it fills blocks, and decides whether they may be used.

    receive ──> RESERVED ──peer is ready──> READING ──grant AND read in time (AND digests)──> COMMITTED
                   │                           │
                   │ fail, cancel              │ fail, cancel, refused, withdrawn, too late, peer lost, corrupt
                   │                           v
                   └──────────────────────> QUARANTINED ──nothing can write any more──> FREED

"In time" means that the read finished before `t0 + lease_s - margin_s` on our clock, where t0 is when we sent the claim
or renewal that the grant answers. The holder counts the lease from later: from when that message arrived.

Blocks of a growing offer are read once the holder says that they are written. None is used before all are read.

`RECEIVE_TABLE` holds all transitions; docs/concepts/handoff.md shows it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from baton.engine.core.connector import BlocksReleased, Received, ReceiveFailed, TransferId

from .messages import (
    AbortRead,
    Action,
    AskDigests,
    ClaimRefused,
    CompareDigests,
    DigestMode,
    Digests,
    Emit,
    EngineKey,
    Finish,
    FromHolder,
    Granted,
    Grown,
    ReadBlocks,
    ReaderKey,
    SendToHolder,
    StopReading,
    Withdrawn,
)
from .receive import Receive
from .receive_rules import RECEIVE_TABLE, Reaction, ReceiveEvent, ReceiveOutcome, ReceiveState, ReceiveTimeouts
from .ticket import Ticket


class ReceiveTable:
    """The receives of one engine that are neither committed nor freed. Times are seconds on the caller's clock."""

    def __init__(self, engine: EngineKey, timeouts: ReceiveTimeouts, digest: DigestMode = DigestMode.OFF) -> None:
        self.engine = engine
        self.timeouts = timeouts
        self.outcomes: collections.Counter[ReceiveOutcome] = collections.Counter()
        self.stale_messages = 0
        self._verifies = digest is DigestMode.VERIFY
        self._receives: dict[TransferId, Receive] = {}

    def __len__(self) -> int:
        return len(self._receives)

    def __getitem__(self, receive: TransferId) -> Receive:
        return self._receives[receive]

    @property
    def num_active(self) -> int:
        """Number of receives that can still be committed."""
        return len(self._active())

    @property
    def num_quarantined_blocks(self) -> int:
        return sum(len(r.block_ids) for r in self._receives.values() if r.state is ReceiveState.QUARANTINED)

    @property
    def next_deadline(self) -> float | None:
        return min((receive.due for receive in self._active()), default=None)

    @property
    def claimed_at(self) -> float | None:
        """The time of the newest unanswered claim. None: all are answered."""
        return max((r.sent_at[1] for r in self._active() if 1 in r.sent_at and r.granted_until is None), default=None)

    def waits_for(self, holder: EngineKey) -> bool:
        return any(receive.ticket.lease.holder == holder for receive in self._active())

    # ------------------------------------------------------------------ the engine's calls

    def start(
        self, receive: TransferId, ticket: Ticket, first_block: int, block_ids: Sequence[int], now: float
    ) -> None:
        """Add a receive whose blocks are reserved. It begins with `peer_ready`."""
        assert ticket.num_blocks - first_block == len(block_ids), "checked by the caller"
        self._receives[receive] = Receive(
            ReaderKey(self.engine, receive),
            ticket,
            first_block,
            list(block_ids),
            deadline=now + self.timeouts.connect_s,
            num_ready=min(ticket.num_ready, ticket.num_blocks),
            num_unverified=len(block_ids) if self._verifies else 0,
        )

    def cancel(self, receive: TransferId) -> list[Action]:
        known = self._receives.get(receive)
        return [] if known is None else self._on(known, ReceiveEvent.CANCEL, "cancelled by the engine")

    def abandon(self, reason: str) -> list[Action]:
        """Fail all receives that are under way."""
        return self._on_all(self._active(), ReceiveEvent.CLOSE, reason)

    # ------------------------------------------------------------------ peers, messages, time

    def peer_ready(self, holder: EngineKey, now: float) -> list[Action]:
        """Claim and read for all receives of this holder, whose memory can be read now."""
        actions: list[Action] = []
        for receive in self._of(holder):
            if receive.state is ReceiveState.RESERVED:
                receive.writable = True
                receive.deadline = now + receive.ticket.lease_s
            actions += self._on(receive, ReceiveEvent.PEER_READY, now=now)
        return actions

    def peer_lost(self, holder: EngineKey, reason: str) -> list[Action]:
        """Fail all receives of a holder. It is told, since it may be alive and keep blocks for them."""
        return self._on_all(self._of(holder), ReceiveEvent.PEER_LOST, reason)

    def on_message(self, message: FromHolder, now: float) -> list[Action]:
        receive = self._named_by(message)
        event, reason = self._take_in(message, receive, now)
        if receive is None:
            return self._on_message_too_late(message, event)
        return self._on(receive, event, reason, now=now) + self._commit_if_all_is_there(receive)

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for receive in self._active():
            if now >= receive.deadline:
                actions += self._on(receive, ReceiveEvent.OVERDUE, receive.timeout_reason(self.timeouts.connect_s))
            elif receive.state is ReceiveState.READING and now >= receive.ask_at:
                actions += self._on(receive, ReceiveEvent.ASK_DUE, now=now)
        return actions

    # ------------------------------------------------------------------ reads

    def read_finished(self, receive: TransferId, now: float) -> list[Action]:
        """Note that all bytes are here and the transport can no longer write."""
        known = self._receives[receive]
        known.writable = False
        known.read_finished_at = now
        known.schedule_retry(now, self.timeouts.retry_s)
        actions = self._on(known, ReceiveEvent.READ_FINISHED, now=now)
        return actions + self._commit_if_all_is_there(known)

    def read_failed(self, receive: TransferId, reason: str) -> list[Action]:
        return self._on(self._receives[receive], ReceiveEvent.READ_FAILED, f"the read failed: {reason}")

    def read_released(self, receive: TransferId) -> list[Action]:
        """Note that a stopped or failed read can no longer write."""
        known = self._receives[receive]
        known.writable = False
        return self._on(known, ReceiveEvent.READ_RELEASED)

    def matched(self, receive: TransferId, now: float) -> list[Action]:
        """Note that the digests of the last `CompareDigests` match."""
        known = self._receives[receive]
        assert known.digests is not None, "they were compared"
        known.num_unverified -= known.digests.count
        known.digests = None
        known.schedule_retry(now, self.timeouts.retry_s)
        return self._on(known, ReceiveEvent.MATCHED) + self._commit_if_all_is_there(known)

    def corrupt(self, receive: TransferId, reason: str) -> list[Action]:
        return self._on(self._receives[receive], ReceiveEvent.CORRUPT, f"the digests differ: {reason}")

    # ------------------------------------------------------------------ which receives

    def _active(self) -> list[Receive]:
        return [r for r in self._receives.values() if r.state in (ReceiveState.RESERVED, ReceiveState.READING)]

    def _of(self, holder: EngineKey) -> Iterable[Receive]:
        return [receive for receive in self._receives.values() if receive.ticket.lease.holder == holder]

    def _named_by(self, message: FromHolder) -> Receive | None:
        """Return the receive to which a message belongs, if it is this process's and for exactly this offer."""
        receive = self._receives.get(message.reader.receive)
        if receive is None or receive.key != message.reader or receive.ticket.lease != message.lease:
            return None
        return receive

    # ------------------------------------------------------------------ events into the table

    def _take_in(self, message: FromHolder, receive: Receive | None, now: float) -> tuple[ReceiveEvent, str]:
        """Apply a message. Returns its event in the table, and the reason if it is a failure."""
        reading = receive if receive is not None and receive.state is ReceiveState.READING else None
        match message:
            case ClaimRefused():
                if reading is not None:
                    reading.offer_ended = message.offer_ended
                return ReceiveEvent.REFUSED, f"the holder refused: {message.reason}"
            case Withdrawn():
                return ReceiveEvent.WITHDRAWN, "the holder withdrew the offer"
            case Grown():
                if reading is not None:
                    reading.grow(message.num_ready, message.last_blocks)
                return ReceiveEvent.GROWN, ""
            case Digests():
                if reading is None or not reading.lacks(message):
                    return ReceiveEvent.UNASKED, ""
                reading.digests = message
                return ReceiveEvent.DIGESTS, ""
            case Granted():
                is_pending = reading is None or self._granted(reading, message, now)
                return (ReceiveEvent.GRANT if is_pending else ReceiveEvent.UNASKED), ""

    def _granted(self, receive: Receive, message: Granted, now: float) -> bool:
        """Note a grant. Returns False if it answers no pending claim or renewal."""
        sent_at = receive.sent_at.pop(message.number, None)
        if sent_at is None:
            return False
        receive.grow(message.num_ready, message.last_blocks)
        until = sent_at + message.lease_s - self.timeouts.margin_s
        if receive.granted_until is None or until > receive.granted_until:
            receive.granted_until = receive.deadline = until
            receive.ask_at = max(now, sent_at + message.lease_s * self.timeouts.renew_at)
        receive.schedule_retry(now, self.timeouts.retry_s)
        return True

    def _commit_if_all_is_there(self, receive: Receive) -> list[Action]:
        if receive.state is not ReceiveState.READING or not receive.all_is_there:
            return []
        assert receive.read_finished_at is not None
        assert receive.granted_until is not None
        if self._in_time(receive.read_finished_at, receive.granted_until):
            return self._on(receive, ReceiveEvent.COMPLETE)
        return self._on(receive, ReceiveEvent.TOO_LATE, "the read finished after the lease had ended")

    def _in_time(self, read_finished_at: float, granted_until: float) -> bool:
        return read_finished_at < granted_until

    def _on_all(self, receives: Iterable[Receive], event: ReceiveEvent, reason: str) -> list[Action]:
        return [action for receive in receives for action in self._on(receive, event, reason)]

    def _on_message_too_late(self, message: FromHolder, event: ReceiveEvent) -> list[Action]:
        """Handle a message for a receive that is over, or that an earlier process began."""
        row = RECEIVE_TABLE[ReceiveState.FREED, event]
        self.stale_messages += row.counted
        if Reaction.ABORT not in row.reactions or message.reader.engine != self.engine:
            return []
        return [SendToHolder(message.lease.holder, AbortRead(message.lease, message.reader))]

    def _on(self, receive: Receive, event: ReceiveEvent, reason: str = "", now: float = 0.0) -> list[Action]:
        """Apply a transition of the table. `reason` says why, if it is a failure."""
        row = RECEIVE_TABLE[receive.state, event]
        self.stale_messages += row.counted
        receive.state = row.next_state
        if row.outcome is not None:
            self.outcomes[row.outcome] += 1
        actions = [action for reaction in row.reactions for action in self._react(reaction, receive, reason, now)]
        if row.next_state in (ReceiveState.COMMITTED, ReceiveState.FREED):
            del self._receives[receive.id]
        elif row.next_state is ReceiveState.QUARANTINED and not receive.writable:
            return actions + self._on(receive, ReceiveEvent.READ_RELEASED)
        return actions

    # ------------------------------------------------------------------ actions out

    def _react(self, reaction: Reaction, receive: Receive, reason: str, now: float) -> list[Action]:
        lease, holder = receive.ticket.lease, receive.ticket.lease.holder
        match reaction:
            case Reaction.ASK:
                return [SendToHolder(holder, receive.claim(now, self.timeouts.retry_s))]
            case Reaction.READ:
                more = receive.order()
                return [] if more is None else [ReadBlocks(receive.id, more.start, more.stop)]
            case Reaction.ASK_DIGESTS:
                asked = AskDigests(lease, receive.key, receive.first_unverified)
                return [SendToHolder(holder, asked)] if receive.lacks_digests else []
            case Reaction.VERIFY:
                return [] if receive.digests is None else [CompareDigests(receive.id, receive.digests)]
            case Reaction.STOP:
                return [StopReading(receive.id)] if receive.writable else []
            case Reaction.FINISH:
                return [SendToHolder(holder, Finish(lease, receive.key))]
            case Reaction.ABORT:
                return [SendToHolder(holder, AbortRead(lease, receive.key))]
            case Reaction.RECEIVED:
                return [Emit(Received(receive.id, receive.first_claim_at, receive.read_finished_at))]
            case Reaction.FAILED:
                return [Emit(ReceiveFailed(receive.id, reason, receive.offer_ended))]
            case Reaction.RELEASED:
                return [Emit(BlocksReleased(receive.id))]
