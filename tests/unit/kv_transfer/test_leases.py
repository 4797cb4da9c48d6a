"""The holder's half: HELD until finish, abort, withdrawal or expiry; then RELEASED, once."""

from __future__ import annotations

import msgspec
import pytest

from baton.engine.core.connector import OfferEnded, OfferOutcome
from baton.kv_transfer.channel import MAX_MESSAGE_BYTES
from baton.kv_transfer.group.rank_reader import DIGEST_BYTES
from baton.kv_transfer.protocol.leases import LeaseTable
from baton.kv_transfer.protocol.messages import (
    AbortRead,
    AskDigests,
    Claim,
    ClaimRefused,
    Digests,
    Emit,
    EngineKey,
    Finish,
    Granted,
    Grown,
    LeaseKey,
    ReaderKey,
    Renew,
    SendToReader,
    Withdrawn,
    encode,
)

HOLDER = EngineKey("prefill", 1)
READER, OTHER = ReaderKey(EngineKey("decode", 2), 10), ReaderKey(EngineKey("decode-1", 3), 10)
LEASE = LeaseKey(HOLDER, "request", 4, 1)


@pytest.fixture
def table() -> LeaseTable:
    """One offer of three blocks, made at time 0, for ten seconds."""
    table = LeaseTable(HOLDER, lease_s=10.0)
    table.offer(LEASE, num_blocks=3, now=0.0)
    return table


@pytest.fixture
def growing() -> LeaseTable:
    """The same, of which one block is written."""
    table = LeaseTable(HOLDER, lease_s=10.0)
    table.offer(LEASE, num_blocks=3, now=0.0, num_ready=1)
    return table


def ended(outcome: OfferOutcome) -> list[Emit]:
    return [Emit(OfferEnded(1, outcome))]


def to_reader(message) -> list[SendToReader]:
    return [SendToReader(message.reader.engine, message)]


def test_a_claim_is_granted_from_when_it_came(table: LeaseTable) -> None:
    assert table.on_message(Claim(LEASE, READER, 7), now=4.0) == to_reader(Granted(LEASE, READER, 7, 10.0, 3))
    assert table.expire(now=13.9) == []
    assert table.expire(now=14.0) == ended(OfferOutcome.EXPIRED)


def test_a_renewal_extends_and_an_older_one_never_shortens(table: LeaseTable) -> None:
    table.on_message(Renew(LEASE, READER, 2), now=8.0)
    table.on_message(Claim(LEASE, READER, 1), now=5.0)
    assert table.next_expiry == 18.0


def test_a_claim_that_waited_is_granted_for_what_is_left_of_the_lease(table: LeaseTable) -> None:
    table.on_message(Claim(LEASE, READER, 1), now=2.0)
    assert table.on_message(Renew(LEASE, READER, 2), now=9.0, arrived=5.0) == to_reader(
        Granted(LEASE, READER, 2, 6.0, 3)
    )
    assert table.next_expiry == 15.0


def test_a_claim_that_waited_longer_than_the_lease_finds_it_over(table: LeaseTable) -> None:
    ended_first, refused = table.on_message(Claim(LEASE, READER, 1), now=40.0, arrived=5.0)
    assert [ended_first] == ended(OfferOutcome.EXPIRED)
    assert refused == SendToReader(READER.engine, ClaimRefused(LEASE, READER, "the offer has ended", offer_ended=True))


def test_a_finish_that_waited_longer_than_the_lease_still_counts(table: LeaseTable) -> None:
    table.on_message(Claim(LEASE, READER, 1), now=1.0)
    assert table.on_message(Finish(LEASE, READER), now=40.0, arrived=2.0) == ended(OfferOutcome.FINISHED)


def test_nobody_comes_and_the_blocks_go(table: LeaseTable) -> None:
    assert (table.num_blocks, table.any_granted) == (3, False)
    assert table.expire(now=10.0) == ended(OfferOutcome.EXPIRED)
    assert (len(table), table.num_blocks, table.next_expiry) == (0, 0, None)


@pytest.mark.parametrize(("kind", "outcome"), [(Finish, OfferOutcome.FINISHED), (AbortRead, OfferOutcome.WITHDRAWN)])
def test_the_reader_ends_the_lease_once(kind, outcome: OfferOutcome, table: LeaseTable) -> None:
    table.on_message(Claim(LEASE, READER, 1), now=1.0)
    assert table.on_message(kind(LEASE, READER), now=2.0) == ended(outcome)
    assert table.on_message(kind(LEASE, READER), now=2.0) == []
    assert table.expire(now=99.0) == []
    assert table.withdraw(1) == []
    assert table.outcomes.total() == 1


def test_an_offer_without_a_reader_is_withdrawn_at_once(table: LeaseTable) -> None:
    assert table.withdraw(1) == ended(OfferOutcome.WITHDRAWN)
    (answer,) = table.on_message(Claim(LEASE, READER, 1), now=1.0)
    assert answer == SendToReader(READER.engine, ClaimRefused(LEASE, READER, "the offer has ended", offer_ended=True))


def test_what_was_promised_is_only_asked_back(table: LeaseTable) -> None:
    table.on_message(Claim(LEASE, READER, 1), now=1.0)
    assert table.withdraw(1) == to_reader(Withdrawn(LEASE, READER))
    assert table.withdraw(1) == []
    assert len(table) == 1
    assert table.on_message(Renew(LEASE, READER, 2), now=5.0) == to_reader(Withdrawn(LEASE, READER))
    assert table.on_message(AbortRead(LEASE, READER), now=6.0) == ended(OfferOutcome.WITHDRAWN)


def test_a_reader_that_does_not_let_go_keeps_its_promise_until_expiry_and_no_longer(table: LeaseTable) -> None:
    table.on_message(Claim(LEASE, READER, 1), now=1.0)
    table.withdraw(1)
    table.on_message(Renew(LEASE, READER, 2), now=5.0)
    assert table.expire(now=10.9) == []
    assert table.expire(now=11.0) == ended(OfferOutcome.WITHDRAWN)


def test_a_second_reader_is_refused_and_cannot_end_the_first_ones_lease(table: LeaseTable) -> None:
    table.on_message(Claim(LEASE, READER, 1), now=1.0)
    assert isinstance(table.on_message(Claim(LEASE, OTHER, 1), now=2.0)[0].message, ClaimRefused)
    assert table.on_message(Finish(LEASE, OTHER), now=2.0) == []
    assert table.on_message(AbortRead(LEASE, OTHER), now=2.0) == []
    assert len(table) == 1


def test_nobody_can_finish_what_nobody_claimed(table: LeaseTable) -> None:
    assert table.on_message(Finish(LEASE, READER), now=1.0) == []
    assert len(table) == 1


@pytest.mark.parametrize(
    "stale",
    [
        msgspec.structs.replace(LEASE, holder=EngineKey("prefill", 99)),
        msgspec.structs.replace(LEASE, generation=3),
        msgspec.structs.replace(LEASE, request_id="another"),
        msgspec.structs.replace(LEASE, offer=2),
    ],
    ids=["epoch", "generation", "request", "offer"],
)
def test_a_message_about_another_lease_changes_nothing_and_is_counted(stale: LeaseKey, table: LeaseTable) -> None:
    for kind in (Finish, AbortRead):
        assert table.on_message(kind(stale, READER), now=1.0) == []
    for kind in (Claim, Renew):
        assert isinstance(table.on_message(kind(stale, READER, 1), now=1.0)[0].message, ClaimRefused)
    assert table.stale_messages == 4
    assert (len(table), table.any_granted, table.next_expiry) == (1, False, 10.0)


def test_a_reader_hears_at_once_how_far_an_offer_has_grown(growing: LeaseTable) -> None:
    assert growing.on_message(Claim(LEASE, READER, 1), now=1.0) == to_reader(Granted(LEASE, READER, 1, 10.0, 1))
    assert growing.advance(1, 2, now=2.0) == to_reader(Grown(LEASE, READER, 2))
    assert growing.on_message(Renew(LEASE, READER, 2), now=3.0) == to_reader(Granted(LEASE, READER, 2, 10.0, 2))


def test_while_nobody_has_claimed_it_an_offer_grows_silently_and_stays_alive(growing: LeaseTable) -> None:
    assert growing.advance(1, 2, now=8.0) == []
    assert growing.expire(now=17.9) == []
    assert growing.expire(now=18.0) == ended(OfferOutcome.EXPIRED)


def test_what_was_claimed_lives_by_its_reader_and_not_by_its_growth(growing: LeaseTable) -> None:
    growing.on_message(Claim(LEASE, READER, 1), now=1.0)
    growing.advance(1, 2, now=9.0)
    assert growing.next_expiry == 11.0
    growing.on_message(Renew(LEASE, READER, 2), now=10.0)
    assert growing.next_expiry == 20.0


def test_nothing_can_be_finished_before_all_of_it_is_written(growing: LeaseTable) -> None:
    growing.on_message(Claim(LEASE, READER, 1), now=1.0)
    assert growing.on_message(Finish(LEASE, READER), now=2.0) == []
    growing.advance(1, 3, now=3.0)
    assert growing.on_message(Finish(LEASE, READER), now=4.0) == ended(OfferOutcome.FINISHED)


def test_an_offer_that_was_asked_back_grows_no_more_and_lives_no_longer(growing: LeaseTable) -> None:
    growing.on_message(Claim(LEASE, READER, 1), now=1.0)
    growing.withdraw(1)
    assert growing.advance(1, 2, now=9.0) == []
    assert growing.expire(now=11.0) == ended(OfferOutcome.WITHDRAWN)


def test_digests_are_told_to_the_reader_once_they_are_known(table: LeaseTable) -> None:
    table.on_message(Claim(LEASE, READER, 1), now=1.0)
    assert table.on_message(AskDigests(LEASE, READER, 0), now=2.0) == []
    of_a_block = (b"12345678", b"abcdefghABCDEFGH")
    table.set_digests(1, tuple(3 * digests for digests in of_a_block))
    told = Digests(LEASE, READER, 0, 3, tuple(3 * digests for digests in of_a_block))
    assert table.on_message(AskDigests(LEASE, READER, 0), now=3.0) == to_reader(told)
    assert table.on_message(AskDigests(LEASE, READER, 2), now=3.0) == to_reader(
        Digests(LEASE, READER, 2, 1, of_a_block)
    )
    assert table.on_message(AskDigests(LEASE, READER, 3), now=3.0) == [], "it has no such block"


@pytest.mark.parametrize(("num_heads", "num_ranks"), [(8, 1), (1, 8), (128, 1), (8, 64), (128, 1024)])
def test_digests_of_a_million_tokens_are_told_in_messages_that_a_channel_takes(num_heads: int, num_ranks: int) -> None:
    num_blocks = 2**20 // 16
    table = LeaseTable(HOLDER, lease_s=10.0)
    table.offer(LEASE, num_blocks, now=0.0)
    table.on_message(Claim(LEASE, READER, 1), now=1.0)
    of_a_rank = bytes(num_blocks * DIGEST_BYTES * max(1, num_heads // num_ranks))
    table.set_digests(1, (of_a_rank,) * num_ranks)
    known = 0
    while known < num_blocks:
        (action,) = table.on_message(AskDigests(LEASE, READER, known), now=2.0)
        assert action.message.first == known
        assert len(encode(action.message)) < MAX_MESSAGE_BYTES
        known += action.message.count
    assert known == num_blocks
