"""Every pair of state and event on both sides: the code does what its table says, and the page shows the same table."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from baton.engine.core.connector import BlocksReleased, OfferEnded, OfferOutcome, Received, ReceiveFailed
from baton.kv_transfer.protocol.block_runs import encode_runs
from baton.kv_transfer.protocol.leases import LEASE_TABLE, LeaseEvent, LeaseReply, LeaseRow, LeaseState, LeaseTable
from baton.kv_transfer.protocol.messages import (
    AbortRead,
    Action,
    AskDigests,
    Claim,
    ClaimRefused,
    CompareDigests,
    DigestMode,
    Digests,
    Emit,
    EngineKey,
    Finish,
    Granted,
    Grown,
    LeaseKey,
    ReadBlocks,
    ReaderKey,
    Renew,
    SendToHolder,
    SendToReader,
    StopReading,
    Withdrawn,
)
from baton.kv_transfer.protocol.receive_rules import (
    RECEIVE_TABLE,
    Reaction,
    ReceiveEvent,
    ReceiveRow,
    ReceiveState,
    ReceiveTimeouts,
)
from baton.kv_transfer.protocol.receives import ReceiveTable
from baton.kv_transfer.protocol.ticket import TICKET_VERSION, Ticket

PAGE = Path(__file__).parents[3] / "docs/concepts/handoff.md"
HOLDER, ME = EngineKey("prefill", 1), EngineKey("decode", 2)
LEASE, READER, STRANGER = LeaseKey(HOLDER, "request", 0, 1), ReaderKey(ME, 1), ReaderKey(EngineKey("decode", 3), 1)
DIGESTS = (b"8 bytes." * 3,)

# ---------------------------------------------------------------------- the page


def table(states: Iterable[enum.Enum], events: type[enum.Enum], cell: Callable[[object], str], rows: Mapping) -> str:
    states = list(states)
    lines = ["| | " + " | ".join(state.name for state in states) + " |", "|---" * (len(states) + 1) + "|"]
    for event in events:
        cells = [cell(rows[state, event]) if (state, event) in rows else "cannot be" for state in states]
        lines.append(f"| {event.value} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def lease_cell(row: LeaseRow) -> str:
    said = [row.reply.value] if row.reply else []
    moves = {LeaseState.RELEASED: [f"RELEASED: {row.ended.value}"] if row.ended else []}.get(row.next_state, [])
    return "; ".join([*moves, *said, *(["counted"] if row.counted else [])]) or "-"


def receive_cell(row: ReceiveRow) -> str:
    said = [reaction.value for reaction in row.reactions]
    moves = [f"{row.outcome.value}:"] if row.outcome else []
    return " ".join([*moves, "; ".join([*said, *(["counted"] if row.counted else [])])]).strip() or "-"


def with_moves(cell: Callable, rows: Mapping) -> Callable[[object], str]:
    """Names the next state where it is another."""
    changes = {id(row): row.next_state.name for (state, _), row in rows.items() if row.next_state is not state}

    def shown(row: object) -> str:
        text = cell(row)
        if id(row) not in changes or changes[id(row)] in text:
            return text
        return f"**{changes[id(row)]}** {'' if text == '-' else text}".strip()

    return shown


TABLES = {
    "holder": table(LeaseState, LeaseEvent, with_moves(lease_cell, LEASE_TABLE), LEASE_TABLE),
    "reader": table(
        (state for state in ReceiveState if state is not ReceiveState.COMMITTED),
        ReceiveEvent,
        with_moves(receive_cell, RECEIVE_TABLE),
        RECEIVE_TABLE,
    ),
}


@pytest.mark.parametrize("side", TABLES)
def test_the_page_shows_the_table_of_the_code(side: str) -> None:
    assert TABLES[side] in PAGE.read_text(), f"docs/concepts/handoff.md should show for the {side}:\n\n{TABLES[side]}"


# ---------------------------------------------------------------------- the holder


def leases(state: LeaseState, *, grows: bool) -> LeaseTable:
    """One offer of three blocks in that state, or none, at time 1."""
    made = LeaseTable(HOLDER, lease_s=10.0)
    made.offer(LEASE, 3, now=0.0, num_ready=1 if grows else 3)
    if state in (LeaseState.GRANTED, LeaseState.ASKED_BACK):
        made.on_message(Claim(LEASE, READER, 1), now=1.0)
        made.set_digests(1, DIGESTS)
    if state is LeaseState.ASKED_BACK:
        made.withdraw(1)
    if state is LeaseState.RELEASED:
        made.expire(now=10.0)
    return made


LEASE_EVENTS: dict[LeaseEvent, list[Callable[[LeaseTable], list[Action]]]] = {
    LeaseEvent.CLAIM: [
        lambda it: it.on_message(Claim(LEASE, READER, 5), now=2.0),
        lambda it: it.on_message(Renew(LEASE, READER, 5), now=2.0),
    ],
    LeaseEvent.ASK_DIGESTS: [lambda it: it.on_message(AskDigests(LEASE, READER, 0), now=2.0)],
    LeaseEvent.FINISH: [lambda it: it.on_message(Finish(LEASE, READER), now=2.0)],
    LeaseEvent.EARLY_FINISH: [lambda it: it.on_message(Finish(LEASE, READER), now=2.0)],
    LeaseEvent.ABORT: [lambda it: it.on_message(AbortRead(LEASE, READER), now=2.0)],
    LeaseEvent.STRANGER_ASKS: [
        lambda it: it.on_message(Claim(LEASE, STRANGER, 5), now=2.0),
        lambda it: it.on_message(Renew(LEASE, STRANGER, 5), now=2.0),
        lambda it: it.on_message(AskDigests(LEASE, STRANGER, 0), now=2.0),
    ],
    LeaseEvent.STRANGER_ENDS: [
        lambda it: it.on_message(Finish(LEASE, STRANGER), now=2.0),
        lambda it: it.on_message(AbortRead(LEASE, STRANGER), now=2.0),
    ],
    LeaseEvent.ADVANCE: [lambda it: it.advance(1, 2, now=2.0)],
    LeaseEvent.WITHDRAW: [lambda it: it.withdraw(1)],
    LeaseEvent.EXPIRY: [lambda it: it.expire(now=30.0)],
}

NO_SUCH_LEASE = {  # nobody is a stranger to what is granted to nobody; what is released neither grows nor expires
    *((LeaseState.OFFERED, event) for event in (LeaseEvent.STRANGER_ASKS, LeaseEvent.STRANGER_ENDS)),
    *(
        (LeaseState.RELEASED, event)
        for event in (
            LeaseEvent.STRANGER_ASKS,
            LeaseEvent.STRANGER_ENDS,
            LeaseEvent.EARLY_FINISH,
            LeaseEvent.EXPIRY,
        )
    ),
}

ANSWERS = {
    LeaseReply.GRANTED: Granted,
    LeaseReply.REFUSED: ClaimRefused,
    LeaseReply.WITHDRAWN: Withdrawn,
    LeaseReply.GROWN: Grown,
    LeaseReply.DIGESTS: Digests,
}


def test_the_holders_table_has_every_pair_that_can_be() -> None:
    every = {(state, event) for state in LeaseState for event in LeaseEvent}
    assert LEASE_TABLE.keys() == every - NO_SUCH_LEASE


@pytest.mark.parametrize(("state", "event"), LEASE_TABLE, ids=lambda value: value.name)
def test_the_holder_does_what_its_row_says(state: LeaseState, event: LeaseEvent) -> None:
    row = LEASE_TABLE[state, event]
    for happen in LEASE_EVENTS[event]:
        it = leases(state, grows=event is LeaseEvent.EARLY_FINISH)
        before = it.stale_messages
        actions = happen(it)
        told = [type(action.message) for action in actions if isinstance(action, SendToReader)]
        ended = [action.event for action in actions if isinstance(action, Emit)]
        lease = it.get(1)
        assert (LeaseState.RELEASED if lease is None else lease.state) is row.next_state
        assert told == ([ANSWERS[row.reply]] if row.reply else [])
        assert ended == ([OfferEnded(1, row.ended)] if row.ended else [])
        assert it.stale_messages - before == row.counted
        assert it.outcomes.total() == (row.ended is not None) + (state is LeaseState.RELEASED)


@pytest.mark.parametrize("state", LeaseState, ids=lambda state: state.name)
def test_no_message_and_no_call_finds_a_pair_that_the_holders_table_lacks(state: LeaseState) -> None:
    """A stranger to one state is the reader to another; a pair without a row would raise."""
    for happenings in LEASE_EVENTS.values():
        for happen in happenings:
            for grows in (False, True):
                it = leases(state, grows=grows)
                happen(it)
                lease = it.get(1)
                assert state is not LeaseState.RELEASED or lease is None


# ---------------------------------------------------------------------- the reader


def receives(state: ReceiveState, *, has_read: bool = False, digest: DigestMode = DigestMode.OFF) -> ReceiveTable:
    """One receive of three blocks in that state, or none, at time 1. QUARANTINED: its read still runs."""
    made = ReceiveTable(ME, ReceiveTimeouts(connect_s=3.0, retry_s=1.0, margin_s=0.5, renew_at=0.5), digest)
    ticket = Ticket(
        *(TICKET_VERSION, LEASE, "tcp://10.0.0.1:5", "fingerprint", "nixl", 3, 10.0, digest, 3), encode_runs([7, 8, 9])
    )
    if state is ReceiveState.FREED:
        return made
    made.start(1, ticket, 0, [20, 21, 22], now=0.0)
    if state is not ReceiveState.RESERVED:
        made.peer_ready(HOLDER, now=1.0)
    if has_read:
        made.read_finished(1, now=2.0)
    if state is ReceiveState.QUARANTINED:
        made.cancel(1)
    return made


def grant(number: int, at: float = 2.5) -> Callable[[ReceiveTable], list[Action]]:
    return lambda it: it.on_message(Granted(LEASE, READER, number, 10.0, 3), now=at)


unasked_grant = grant(77)


def digests_come(it: ReceiveTable) -> list[Action]:
    return it.on_message(Digests(LEASE, READER, 0, 3, DIGESTS), now=2.5)


def compared(it: ReceiveTable, *, match: bool) -> list[Action]:
    digests_come(it)
    return it.matched(1, now=2.6) if match else it.corrupt(1, "block 20")


def late(it: ReceiveTable) -> list[Action]:
    it.read_finished(1, now=10.6)
    return it.on_message(Granted(LEASE, READER, 1, 10.0, 3), now=10.7)


RECEIVE_EVENTS: dict[ReceiveEvent, list[Callable[[ReceiveTable], list[Action]]]] = {
    ReceiveEvent.PEER_READY: [lambda it: it.peer_ready(HOLDER, now=2.0)],
    ReceiveEvent.PEER_LOST: [lambda it: it.peer_lost(HOLDER, "it left")],
    ReceiveEvent.GRANT: [grant(1)],
    ReceiveEvent.UNASKED: [unasked_grant, digests_come],
    ReceiveEvent.GROWN: [lambda it: it.on_message(Grown(LEASE, READER, 3), now=2.0)],
    ReceiveEvent.DIGESTS: [digests_come],
    ReceiveEvent.REFUSED: [lambda it: it.on_message(ClaimRefused(LEASE, READER, "no"), now=2.0)],
    ReceiveEvent.WITHDRAWN: [lambda it: it.on_message(Withdrawn(LEASE, READER), now=2.0)],
    ReceiveEvent.READ_FINISHED: [lambda it: it.read_finished(1, now=2.0)],
    ReceiveEvent.READ_FAILED: [lambda it: it.read_failed(1, "link down")],
    ReceiveEvent.READ_RELEASED: [lambda it: it.read_released(1)],
    ReceiveEvent.MATCHED: [lambda it: compared(it, match=True)],
    ReceiveEvent.CORRUPT: [lambda it: compared(it, match=False)],
    ReceiveEvent.COMPLETE: [grant(1)],
    ReceiveEvent.TOO_LATE: [late],
    ReceiveEvent.ASK_DUE: [lambda it: it.tick(now=2.0)],
    ReceiveEvent.OVERDUE: [lambda it: it.tick(now=11.0)],
    ReceiveEvent.CANCEL: [lambda it: it.cancel(1)],
    ReceiveEvent.CLOSE: [lambda it: it.abandon("the engine is closing")],
}

NEEDS_READ = {ReceiveEvent.COMPLETE, ReceiveEvent.DIGESTS, ReceiveEvent.MATCHED, ReceiveEvent.CORRUPT}
NEEDS_DIGESTS = NEEDS_READ - {ReceiveEvent.COMPLETE}

ACTIONS: dict[Reaction, object] = {
    Reaction.ASK: Claim,
    Reaction.READ: ReadBlocks,
    Reaction.VERIFY: CompareDigests,
    Reaction.RECEIVED: Received,
    Reaction.FAILED: ReceiveFailed,
    Reaction.FINISH: Finish,
    Reaction.ABORT: AbortRead,
    Reaction.STOP: StopReading,
    Reaction.RELEASED: BlocksReleased,
}


def kind(action: Action) -> type:
    if isinstance(action, Emit):
        return type(action.event)
    return type(action.message) if isinstance(action, SendToHolder) else type(action)


def expected(row: ReceiveRow, event: ReceiveEvent, state: ReceiveState) -> list[object]:
    """Return what the row says, but for what there is no occasion to."""
    idle = {Reaction.ASK_DIGESTS}  # nothing is verified here
    if event in (ReceiveEvent.GRANT, ReceiveEvent.GROWN) and state is ReceiveState.READING:
        idle.add(Reaction.READ)  # all was written at once
    if event in NEEDS_READ or event is ReceiveEvent.TOO_LATE:
        idle.add(Reaction.STOP)  # nothing runs any more
    said = [ACTIONS[reaction] for reaction in row.reactions if reaction not in idle]
    nothing_runs = state is ReceiveState.RESERVED or (Reaction.STOP in row.reactions and Reaction.STOP in idle)
    if row.next_state is ReceiveState.QUARANTINED and (
        (row.outcome is not None and nothing_runs) or event is ReceiveEvent.READ_FINISHED
    ):
        said.append(BlocksReleased)  # QUARANTINED is left at once
    return said


def test_the_readers_table_has_a_row_for_every_message_and_every_call() -> None:
    live = (ReceiveState.RESERVED, ReceiveState.READING, ReceiveState.QUARANTINED, ReceiveState.FREED)
    from_outside = (
        *(ReceiveEvent.GRANT, ReceiveEvent.UNASKED, ReceiveEvent.GROWN, ReceiveEvent.REFUSED, ReceiveEvent.WITHDRAWN),
        ReceiveEvent.CANCEL,
    )
    assert RECEIVE_TABLE.keys() >= {(state, event) for state in live for event in from_outside}
    assert not [state for state, _ in RECEIVE_TABLE if state is ReceiveState.COMMITTED]  # it is forgotten at once
    assert {event for state, event in RECEIVE_TABLE if state is ReceiveState.READING} == set(ReceiveEvent) - {
        ReceiveEvent.READ_RELEASED  # the read was stopped or has failed before
    }


@pytest.mark.parametrize(("state", "event"), RECEIVE_TABLE, ids=lambda value: value.name)
def test_the_reader_does_what_its_row_says(state: ReceiveState, event: ReceiveEvent) -> None:
    row = RECEIVE_TABLE[state, event]
    for happen in RECEIVE_EVENTS[event]:
        if happen is unasked_grant and state is not ReceiveState.READING:
            continue  # where nothing was asked, any grant is one: the row GRANT
        digest = DigestMode.VERIFY if event in NEEDS_DIGESTS else DigestMode.OFF
        it = receives(state, has_read=event in NEEDS_READ, digest=digest)
        before, ended = it.stale_messages, it.outcomes.total()
        actions = happen(it)
        assert [kind(action) for action in actions] == expected(row, event, state)
        assert it.stale_messages - before == row.counted
        assert it.outcomes.total() - ended == (row.outcome is not None)
        over = row.next_state in (ReceiveState.COMMITTED, ReceiveState.FREED) or BlocksReleased in map(kind, actions)
        assert len(it) == (0 if over else 1)
        assert over or it[1].state is row.next_state


def test_quarantine_ends_only_with_the_read() -> None:
    for event in ReceiveEvent:
        row = RECEIVE_TABLE.get((ReceiveState.QUARANTINED, event))
        if row is not None and event is not ReceiveEvent.READ_RELEASED:
            assert row.next_state is ReceiveState.QUARANTINED
            assert Reaction.RELEASED not in row.reactions
    assert OfferOutcome.FINISHED not in {
        row.ended for (_, event), row in LEASE_TABLE.items() if event is not LeaseEvent.FINISH
    }
