"""The reader's half: what commits, what is quarantined, and until when."""

from __future__ import annotations

import msgspec
import pytest

from baton.engine.core.connector import BlocksReleased, Received, ReceiveFailed
from baton.kv_transfer.protocol.block_runs import encode_runs
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
    StopReading,
    Withdrawn,
)
from baton.kv_transfer.protocol.receive_rules import ReceiveState, ReceiveTimeouts
from baton.kv_transfer.protocol.receives import ReceiveTable
from baton.kv_transfer.protocol.ticket import TICKET_VERSION, Ticket

HOLDER, ME = EngineKey("prefill", 1), EngineKey("decode", 2)
LEASE, READER = LeaseKey(HOLDER, "request", 0, 5), ReaderKey(ME, 1)
TICKET = Ticket(
    *(TICKET_VERSION, LEASE, "tcp://10.0.0.1:5", "fingerprint", "nixl", 48, 10.0),
    *(DigestMode.OFF, 3, encode_runs([7, 8, 9])),
)
PATIENCE = ReceiveTimeouts(connect_s=3.0, retry_s=1.0, margin_s=0.5, renew_at=0.5)
CLAIM = SendToHolder(HOLDER, Claim(LEASE, READER, 1))
ABORT, FINISH = SendToHolder(HOLDER, AbortRead(LEASE, READER)), SendToHolder(HOLDER, Finish(LEASE, READER))
RELEASED = Emit(BlocksReleased(1))


def received(pulled_s: float) -> Emit:
    """Return the event of a receive that was claimed at time 1."""
    return Emit(Received(1, claimed_s=1.0, pulled_s=pulled_s))


@pytest.fixture
def table() -> ReceiveTable:
    table = ReceiveTable(ME, PATIENCE)
    table.start(1, TICKET, first_block=1, block_ids=[20, 21], now=0.0)
    return table


@pytest.fixture
def reading(table: ReceiveTable) -> ReceiveTable:
    """Claimed at time 1, so that a grant of ten seconds counts until 10.5."""
    assert table.peer_ready(HOLDER, now=1.0) == [CLAIM, ReadBlocks(1, 0, 2)]
    return table


def failed(actions: list[Action]) -> str:
    (event,) = [action.event for action in actions if isinstance(action, Emit) and type(action.event) is ReceiveFailed]
    return event.reason


def grant(number: int = 1, lease_s: float = 10.0) -> Granted:
    return Granted(LEASE, READER, number, lease_s, 3)


def test_a_first_claim_is_known_from_when_it_was_sent_until_its_answer_comes(table: ReceiveTable) -> None:
    assert table.claimed_at is None
    table.peer_ready(HOLDER, now=1.0)
    assert table.claimed_at == 1.0
    assert table.tick(now=2.0) == [SendToHolder(HOLDER, Claim(LEASE, READER, 2))]
    assert table.claimed_at == 1.0, "asking again does not make it younger"
    table.on_message(grant(number=2), now=2.5)
    assert table.claimed_at is None


def test_nobody_waits_for_the_answer_to_a_claim_that_was_given_up(reading: ReceiveTable) -> None:
    reading.cancel(1)
    assert reading.claimed_at is None


def test_only_the_blocks_behind_the_cached_prefix_are_read(table: ReceiveTable) -> None:
    assert (table[1].source_blocks.tolist(), table[1].block_ids) == ([8, 9], [20, 21])


def test_grant_then_read_commits(reading: ReceiveTable) -> None:
    assert reading.on_message(grant(), now=1.5) == []
    assert reading.read_finished(1, now=2.0) == [received(2.0), FINISH]
    assert len(reading) == 0


def test_read_then_grant_commits(reading: ReceiveTable) -> None:
    assert reading.read_finished(1, now=2.0) == []
    assert reading.on_message(grant(), now=3.0) == [received(2.0), FINISH]


def test_a_late_grant_counts_if_the_read_was_in_time(reading: ReceiveTable) -> None:
    reading.read_finished(1, now=2.0)
    assert reading.on_message(grant(), now=10.9) == [received(2.0), FINISH]


@pytest.mark.parametrize(("finished_at", "commits"), [(10.49, True), (10.5, False), (11.5, False)])
def test_a_read_counts_only_before_the_lease_less_a_margin(
    finished_at: float, commits: bool, reading: ReceiveTable
) -> None:
    reading.on_message(grant(), now=1.2)
    actions = reading.read_finished(1, now=finished_at)
    assert (received(finished_at) in actions) == commits
    assert (RELEASED in actions) != commits


def test_the_lease_counts_from_when_the_claim_was_sent_not_from_when_it_was_granted(reading: ReceiveTable) -> None:
    reading.on_message(grant(), now=9.0)
    assert reading[1].granted_until == 10.5


def test_a_read_that_takes_long_renews_and_may_then_finish_later(reading: ReceiveTable) -> None:
    reading.on_message(grant(), now=1.2)
    assert reading.tick(now=5.9) == []
    assert reading.tick(now=6.0) == [SendToHolder(HOLDER, Renew(LEASE, READER, 2))]
    reading.on_message(grant(2), now=6.3)
    assert received(15.4) in reading.read_finished(1, now=15.4)


def test_an_unanswered_claim_is_sent_again_and_the_answer_tells_which_was_heard(reading: ReceiveTable) -> None:
    assert reading.tick(now=2.0) == [SendToHolder(HOLDER, Claim(LEASE, READER, 2))]
    reading.on_message(grant(2), now=2.5)
    assert reading[1].granted_until == 11.5


def test_a_grant_that_comes_twice_or_was_never_asked_for_is_stale(reading: ReceiveTable) -> None:
    reading.on_message(grant(), now=1.2)
    reading.on_message(grant(), now=1.3)
    reading.on_message(grant(77), now=1.4)
    assert reading.stale_messages == 2
    assert reading[1].granted_until == 10.5


def test_a_lease_that_ends_before_the_read_quarantines_until_nothing_can_write(reading: ReceiveTable) -> None:
    reading.on_message(grant(), now=1.2)
    actions = reading.tick(now=10.5)
    assert "ended before the read did" in failed(actions)
    assert actions[1:] == [ABORT, StopReading(1)]
    assert (reading[1].state, reading.num_quarantined_blocks) == (ReceiveState.QUARANTINED, 2)
    assert reading.read_released(1) == [RELEASED]
    assert len(reading) == 0


def test_a_cancelled_read_that_finishes_after_all_frees_and_does_not_commit(reading: ReceiveTable) -> None:
    reading.on_message(grant(), now=1.2)
    assert reading.cancel(1)[1:] == [ABORT, StopReading(1)]
    assert reading.cancel(1) == []
    assert reading.read_finished(1, now=2.0) == [RELEASED]


def test_what_was_never_begun_frees_at_once(table: ReceiveTable) -> None:
    assert table.cancel(1)[1:] == [RELEASED]
    assert table.peer_ready(HOLDER, now=1.0) == []


def test_a_peer_that_cannot_be_reached_fails_the_receive(table: ReceiveTable) -> None:
    assert table.tick(now=2.9) == []
    actions = table.tick(now=3.0)
    assert "no connection to prefill at tcp://10.0.0.1:5 within 3 s" in failed(actions)
    assert actions[-1] == RELEASED


def test_a_peer_that_left_fails_its_receives_and_is_told_since_it_may_be_alive(reading: ReceiveTable) -> None:
    assert reading.peer_lost(EngineKey("prefill", 2), "another process") == []
    assert reading.peer_lost(HOLDER, "it left") == [Emit(ReceiveFailed(1, "it left")), ABORT, StopReading(1)]


def test_a_refusal_fails_the_receive(reading: ReceiveTable) -> None:
    assert "the offer has ended" in failed(
        reading.on_message(ClaimRefused(LEASE, READER, "the offer has ended"), now=1.5)
    )


@pytest.mark.parametrize("ended", [True, False])
def test_the_engine_is_told_whether_the_offer_had_just_ended(reading: ReceiveTable, ended: bool) -> None:
    actions = reading.on_message(ClaimRefused(LEASE, READER, "why", offer_ended=ended), now=1.5)
    assert Emit(ReceiveFailed(1, "the holder refused: why", offer_ended=ended)) in actions


def test_a_withdrawal_is_answered_by_an_abort(reading: ReceiveTable) -> None:
    reading.on_message(grant(), now=1.2)
    assert ABORT in reading.on_message(Withdrawn(LEASE, READER), now=1.5)


def test_a_failed_read_stays_in_quarantine_until_it_is_released(reading: ReceiveTable) -> None:
    assert failed(reading.read_failed(1, "link down")) == "the read failed: link down"
    assert reading.num_quarantined_blocks == 2
    assert reading.read_released(1) == [RELEASED]


@pytest.mark.parametrize(
    ("lease", "reader"),
    [
        (msgspec.structs.replace(LEASE, holder=EngineKey("prefill", 9)), READER),
        (msgspec.structs.replace(LEASE, generation=1), READER),
        (LEASE, ReaderKey(EngineKey("decode", 99), 1)),
        (LEASE, ReaderKey(ME, 2)),
    ],
    ids=["holder's epoch", "generation", "reader's epoch", "receive"],
)
def test_a_message_about_something_else_changes_nothing(
    lease: LeaseKey, reader: ReaderKey, reading: ReceiveTable
) -> None:
    for message in (Granted(lease, reader, 1, 10.0, 3), ClaimRefused(lease, reader, "no"), Withdrawn(lease, reader)):
        assert not [action for action in reading.on_message(message, now=1.5) if isinstance(action, Emit)]
    assert reading[1].granted_until is None
    assert reading.stale_messages == 3


def test_a_grant_for_a_receive_that_is_over_lets_the_holder_go(reading: ReceiveTable) -> None:
    reading.cancel(1)
    reading.read_released(1)
    assert reading.on_message(grant(), now=2.0) == [ABORT]


# ---------------------------------------------------------------------- offers that grow


@pytest.fixture
def growing() -> ReceiveTable:
    """Return a table with a receive of three blocks: the first was here, and two were written with the ticket."""
    table = ReceiveTable(ME, PATIENCE)
    table.start(1, msgspec.structs.replace(TICKET, num_ready=2), first_block=1, block_ids=[20, 21], now=0.0)
    assert table.peer_ready(HOLDER, now=1.0) == [CLAIM, ReadBlocks(1, 0, 1)]
    return table


def test_blocks_are_read_when_they_are_written_and_count_when_all_are(growing: ReceiveTable) -> None:
    growing.on_message(Granted(LEASE, READER, 1, 10.0, 2), now=1.2)
    assert growing.on_message(Grown(LEASE, READER, 3), now=2.0) == [ReadBlocks(1, 1, 2)]
    assert growing.read_finished(1, now=3.0) == [received(3.0), FINISH]


def test_last_blocks_that_are_replaced_change_no_read_that_runs(growing: ReceiveTable) -> None:
    """A read may wait with the blocks that it was given, and a peer may name more last blocks than it may replace."""
    running = growing[1].source_blocks[0:1]
    growing.on_message(Grown(LEASE, READER, 3, (5, 6)), now=2.0)
    assert growing[1].source_blocks.tolist() == [5, 6]
    assert running.tolist() == [8]


def test_news_of_growth_that_come_twice_or_late_read_nothing_twice(growing: ReceiveTable) -> None:
    assert growing.on_message(Grown(LEASE, READER, 3), now=2.0) == [ReadBlocks(1, 1, 2)]
    assert growing.on_message(Grown(LEASE, READER, 3), now=2.1) == []
    assert growing.on_message(Grown(LEASE, READER, 2), now=2.2) == []
    assert growing.on_message(Grown(LEASE, READER, 1 << 40), now=2.3) == []


def test_while_it_grows_the_reader_asks_again_and_again_for_what_may_have_been_lost(growing: ReceiveTable) -> None:
    growing.on_message(Granted(LEASE, READER, 1, 10.0, 2), now=1.2)
    assert growing.tick(now=2.1) == []
    assert growing.tick(now=2.2) == [SendToHolder(HOLDER, Renew(LEASE, READER, 2))]
    assert growing.on_message(Granted(LEASE, READER, 2, 10.0, 3), now=2.3) == [ReadBlocks(1, 1, 2)]


def test_what_needs_no_read_still_waits_for_the_end_of_the_prompt() -> None:
    table = ReceiveTable(ME, PATIENCE)
    table.start(1, msgspec.structs.replace(TICKET, num_ready=0), first_block=3, block_ids=[], now=0.0)
    assert table.peer_ready(HOLDER, now=1.0) == [CLAIM, ReadBlocks(1, 0, 0)]
    table.on_message(Granted(LEASE, READER, 1, 10.0, 0), now=1.2)
    assert table.read_finished(1, now=1.3) == []
    assert table.on_message(Grown(LEASE, READER, 3), now=2.0) == [received(1.3), FINISH]


# ---------------------------------------------------------------------- digests


@pytest.fixture
def verifying() -> ReceiveTable:
    """All is read, and granted until 10.5."""
    table = ReceiveTable(ME, PATIENCE, DigestMode.VERIFY)
    table.start(1, TICKET, first_block=1, block_ids=[20, 21], now=0.0)
    table.peer_ready(HOLDER, now=1.0)
    table.on_message(grant(), now=1.2)
    assert table.read_finished(1, now=2.0) == [ask_digests(1)]
    return table


def ask_digests(first: int) -> SendToHolder:
    return SendToHolder(HOLDER, AskDigests(LEASE, READER, first))


def digests(first: int, count: int) -> Digests:
    return Digests(LEASE, READER, first, count, (b"8 bytes." * count,))


def test_digests_that_match_commit(verifying: ReceiveTable) -> None:
    assert verifying.on_message(digests(1, 2), now=2.5) == [CompareDigests(1, digests(1, 2))]
    assert verifying.matched(1, now=2.6) == [received(2.0), FINISH]


def test_digests_of_some_blocks_are_followed_by_a_question_for_the_next_ones(verifying: ReceiveTable) -> None:
    assert verifying.on_message(digests(1, 1), now=2.5) == [CompareDigests(1, digests(1, 1))]
    assert verifying.matched(1, now=2.6) == [ask_digests(2)]
    assert ask_digests(2) in verifying.tick(now=3.6), "an answer may be lost"
    assert verifying.on_message(digests(2, 1), now=4.0) == [CompareDigests(1, digests(2, 1))]
    assert verifying.matched(1, now=4.1) == [received(2.0), FINISH]


@pytest.mark.parametrize(("first", "count"), [(0, 3), (0, 1), (2, 1), (1, 3), (1, 2**10)])
def test_digests_of_other_blocks_than_were_asked_for_prove_nothing(
    first: int, count: int, verifying: ReceiveTable
) -> None:
    assert verifying.on_message(digests(first, count), now=2.5) == []
    assert verifying.stale_messages == 1


def test_digests_that_come_twice_are_compared_once(verifying: ReceiveTable) -> None:
    verifying.on_message(digests(1, 1), now=2.5)
    assert verifying.on_message(digests(1, 1), now=2.6) == []
    verifying.matched(1, now=2.7)
    assert verifying.on_message(digests(1, 1), now=2.8) == []
    assert len(verifying) == 1


def test_digests_that_differ_fail_the_receive_and_the_blocks_are_free(verifying: ReceiveTable) -> None:
    verifying.on_message(digests(1, 2), now=2.5)
    actions = verifying.corrupt(1, "block 20")
    assert failed(actions) == "the digests differ: block 20"
    assert actions[1:] == [ABORT, RELEASED]
    assert verifying.outcomes == {"corrupt": 1}


def test_digests_that_do_not_come_are_asked_for_again(verifying: ReceiveTable) -> None:
    assert ask_digests(1) in verifying.tick(now=3.0)
    assert "before it sent its digests" in failed(verifying.tick(now=10.5))


def test_digests_that_nobody_asked_for_prove_nothing(reading: ReceiveTable) -> None:
    assert reading.on_message(digests(1, 2), now=1.5) == []
    assert reading.stale_messages == 1
