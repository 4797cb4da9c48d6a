"""Bugs planted into hand-offs are caught by the simulation: what its oracle can see."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest

from baton.engine.core.connector import BlocksReleased, OfferEnded, OfferOutcome
from baton.engine.core.layout import KVLayout
from baton.kv_transfer.descriptors import AssignedHeads, HeadSlice, slice_heads
from baton.kv_transfer.group import rank_reader
from baton.kv_transfer.group.rank_reader import RankReader
from baton.kv_transfer.group.read_member import ReadHandler
from baton.kv_transfer.group.tp_read_group import TpReadGroup
from baton.kv_transfer.handoff.peers import Peers
from baton.kv_transfer.handoff.reads import BlockReads
from baton.kv_transfer.protocol.leases import LEASE_TABLE, LeaseEvent, LeaseRow, LeaseState, LeaseTable
from baton.kv_transfer.protocol.messages import DigestMode, Emit
from baton.kv_transfer.protocol.receive import Receive
from baton.kv_transfer.protocol.receive_rules import ReceiveState
from baton.kv_transfer.protocol.receives import ReceiveTable

from .handoff_machine import ALONE, GROUPS, HandoffMachine, run
from .simulated_engine import LEASE_S, Violation
from .simulation import World


class EnginesAlone(HandoffMachine):
    kinds = (ALONE,)
    digests = (DigestMode.OFF,)


class OneGroup(HandoffMachine):
    kinds = GROUPS[:1]
    digests = (DigestMode.OFF,)


class Verifying(HandoffMachine):
    kinds = (ALONE, GROUPS[0])
    digests = (DigestMode.VERIFY,)


# ---------------------------------------------------------------------- planted bugs


def free_before_the_read_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    on, early = ReceiveTable._on, set()

    def freeing_at_once(self, receive, event, reason="", now=0.0):
        before = receive.state
        actions = on(self, receive, event, reason, now)
        released = Emit(BlocksReleased(receive.id))
        if receive.state is ReceiveState.QUARANTINED and before is not ReceiveState.QUARANTINED:
            early.add(receive.key)
            return [*actions, released]
        return [action for action in actions if action != released or receive.key not in early]

    monkeypatch.setattr(ReceiveTable, "_on", freeing_at_once)


def free_what_a_reader_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = LeaseRow(LeaseState.RELEASED, ended=OfferOutcome.WITHDRAWN)
    monkeypatch.setitem(LEASE_TABLE, (LeaseState.GRANTED, LeaseEvent.WITHDRAW), at_once)


def expire_before_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    expire = LeaseTable.expire
    monkeypatch.setattr(LeaseTable, "expire", lambda self, now: expire(self, now + LEASE_S / 2))


def ignore_the_epoch_at_the_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseTable, "_named_by", lambda self, key: self._leases.get(key.offer))


def ignore_the_generation_at_the_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_request(self, key):
        of_request = [lease for lease in self._leases.values() if lease.key.request_id == key.request_id]
        return of_request[-1] if of_request and key.holder == self.engine else None

    monkeypatch.setattr(LeaseTable, "_named_by", by_request)


def ignore_the_epoch_at_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_number_only(self, message):
        return next((r for r in self._active() if r.id == message.reader.receive and r.sent_at), None)

    monkeypatch.setattr(ReceiveTable, "_named_by", by_number_only)


def keep_a_peer_that_was_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = Peers.connect

    def by_name(self, key, address, now):
        known = (peer for peer in self._peers.values() if peer.key.engine_id == key.engine_id)
        return next(known, None) or connect(self, key, address, now)

    monkeypatch.setattr(Peers, "connect", by_name)
    monkeypatch.setattr(Peers, "_forget", lambda self, key: None)


def release_blocks_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    on = ReceiveTable._on

    def twice(self, receive, *event, **options):
        actions = on(self, receive, *event, **options)
        return actions * 2 if actions == [Emit(BlocksReleased(receive.id))] else actions

    monkeypatch.setattr(ReceiveTable, "_on", twice)


def end_an_offer_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self, lease, outcome):
        return [Emit(OfferEnded(lease.key.offer, outcome))]

    monkeypatch.setattr(LeaseTable, "_release", forgetful)


def commit_after_expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReceiveTable, "_in_time", lambda self, read_finished_at, granted_until: True)


def commit_without_a_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    start = ReceiveTable.start

    def granting_oneself(self, receive, *values):
        start(self, receive, *values)
        self[receive].granted_until = self[receive].deadline + LEASE_S

    monkeypatch.setattr(ReceiveTable, "start", granting_oneself)


def count_the_lease_from_the_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    granted = ReceiveTable._granted

    def from_now(self, receive, message, now):
        if message.number in receive.sent_at:
            receive.sent_at[message.number] = now
        return granted(self, receive, message, now)

    monkeypatch.setattr(ReceiveTable, "_granted", from_now)


def count_no_time_while_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_time = World.pass_time

    def by_a_clock_that_stands_still(self, seconds, stalled=None, rank=None, **options):
        pass_time(self, seconds, stalled, rank, **options)
        if stalled is not None and rank is None:
            clock = stalled.handoff._clock
            stalled.handoff._clock = lambda: clock() - seconds

    monkeypatch.setattr(World, "pass_time", by_a_clock_that_stands_still)


def wait_for_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    init = BlockReads.__init__

    def patient(self, group, batch_bytes, reads_in_flight, stall_s, clock):
        init(self, group, batch_bytes, reads_in_flight, math.inf, clock)

    monkeypatch.setattr(BlockReads, "__init__", patient)


def forget_expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseTable, "expire", lambda self, now: [])


def read_what_is_not_written_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Receive, "grows", False)
    order = Receive.order

    def all_at_once(self):
        self.num_ready = self.ticket.num_blocks
        return order(self)

    monkeypatch.setattr(Receive, "order", all_at_once)


def promise_more_than_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = LeaseTable.advance
    monkeypatch.setattr(
        LeaseTable, "advance", lambda self, offer, ready, now, last=(): advance(self, offer, ready + 2, now)
    )


def forget_to_tell_the_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseTable, "advance", lambda self, offer, num_ready, now, last=(): [])


def read_the_block_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    grow = Receive.grow
    monkeypatch.setattr(Receive, "grow", lambda self, num_ready, last_blocks=(): grow(self, num_ready))


def tell_the_replaced_block_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost `Grown` must not lose it, since the next grant tells the growth, too."""
    advance = LeaseTable.advance

    def forgetting(self, offer, num_ready, now, last=()):
        actions = advance(self, offer, num_ready, now, last)
        if (lease := self.get(offer)) is not None:
            lease.last_blocks = ()
        return actions

    monkeypatch.setattr(LeaseTable, "advance", forgetting)


def ask_nobody_for_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockReads, "given_up", ())


BUGS = [
    free_before_the_read_has_ended,
    free_what_a_reader_was_promised,
    expire_before_the_time,
    ignore_the_epoch_at_the_holder,
    ignore_the_generation_at_the_holder,
    ignore_the_epoch_at_the_reader,
    keep_a_peer_that_was_restarted,
    release_blocks_twice,
    end_an_offer_twice,
    commit_after_expiry,
    commit_without_a_grant,
    count_the_lease_from_the_grant,
    count_no_time_while_suspended,
    wait_for_what_hangs,
    forget_expiry,
    read_what_is_not_written_yet,
    promise_more_than_is_written,
    forget_to_tell_the_growth,
    read_the_block_that_was_replaced,
    tell_the_replaced_block_only_once,
    ask_nobody_for_help,
]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("plant", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation):
        run(EnginesAlone, 1500)  # most are found within 100


# ---------------------------------------------------------------------- planted bugs of groups


def commit_when_rank_0_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TpReadGroup, "poll", lambda self, read: self._own.poll(read))


def release_what_only_rank_0_has_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TpReadGroup, "release", lambda self, read: self._own.release(read))


def report_a_read_as_released_when_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    report = ReadHandler._report
    at_once = lambda self, read, state, reason, *, released: report(self, read, state, reason, released=True)  # noqa: E731
    monkeypatch.setattr(ReadHandler, "_report", at_once)


def take_the_holders_first_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_the_first(layout: KVLayout, heads: range, remote: range, local: range) -> HeadSlice:
        right = slice_heads(layout, heads, remote, local)
        return dataclasses.replace(right, pieces=tuple(piece._replace(remote=0) for piece in right.pieces))

    monkeypatch.setattr(rank_reader, "slice_heads", of_the_first)


def read_as_if_both_sides_had_as_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def same_rank(rank: int, heads: range, holders: Sequence[range]) -> list[AssignedHeads]:
        return [AssignedHeads(rank % len(holders), heads)]

    monkeypatch.setattr(rank_reader, "assign_heads", same_rank)


GROUP_BUGS = [
    commit_when_rank_0_is_done,
    release_what_only_rank_0_has_let_go,
    report_a_read_as_released_when_it_failed,
    take_the_holders_first_heads,
    read_as_if_both_sides_had_as_many_ranks,
]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("plant", GROUP_BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_planted_in_a_group_is_caught(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation):
        run(OneGroup, 400)


# ---------------------------------------------------------------------- planted bugs of digests


def compare_no_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankReader, "difference", lambda self, peer, blocks, by_rank: "")


def commit_before_the_digests_came(monkeypatch: pytest.MonkeyPatch) -> None:
    start = ReceiveTable.start

    def believing(self, receive, *values):
        start(self, receive, *values)
        self[receive].num_unverified = 0

    monkeypatch.setattr(ReceiveTable, "start", believing)


def commit_when_some_are_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    matched = ReceiveTable.matched

    def believing(self, receive, now):
        self[receive].num_unverified = self[receive].digests.count
        return matched(self, receive, now)

    monkeypatch.setattr(ReceiveTable, "matched", believing)


DIGEST_BUGS = [compare_no_digests, commit_before_the_digests_came, commit_when_some_are_proven]


@pytest.mark.slow
@pytest.mark.parametrize("plant", DIGEST_BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_planted_in_the_comparison_is_caught(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation):
        run(Verifying, 400)
